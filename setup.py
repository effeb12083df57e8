"""Builds the two optional C extensions; all else about the package is in pyproject.toml."""

import sys
import sysconfig

from setuptools import Extension, setup

# A free-threaded Python has no stable ABI to build against.
USES_STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")

FOLDER = "src/firesteel/launch"


def extension(name: str) -> Extension:
    """`firesteel.launch.<name>`; where it cannot be built, the package does without."""
    return Extension(
        f"firesteel.launch.{name}",
        [f"{FOLDER}/{name}.c"],
        define_macros=[("Py_LIMITED_API", "0x030A0000")] if USES_STABLE_ABI else [],
        py_limited_api=USES_STABLE_ABI,
        extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
        optional=True,
    )


extensions = [extension("_native"), extension("_stub_driver")]
if sys.platform != "linux":
    extensions.clear()

setup(
    ext_modules=extensions,
    exclude_package_data={"firesteel.launch": ["*.c"]},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if extensions and USES_STABLE_ABI else {},
)
