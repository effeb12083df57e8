"""What every test has: one thread, Hypothesis profiles, the data folder, the version guard."""

import os
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported, here and in the processes that tests start: products this small are
# slower on several threads, and ten times as slow where another process has one of the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A slow shared machine must not fail a test, and CI must draw the same cases every time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--expect-transformers", help="fail unless this version is the one imported")


def pytest_configure(config: pytest.Config) -> None:
    expected = config.getoption("--expect-transformers")
    if expected is not None and (found := version("transformers")) != expected:
        raise pytest.UsageError(f"--expect-transformers: got {found}, must be {expected}")


def pytest_report_header() -> str:
    return " ".join(f"{name}-{version(name)}" for name in ("torch", "transformers"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of small committed checkpoints."""
    return Path(__file__).parent / "data"
