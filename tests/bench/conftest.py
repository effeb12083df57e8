import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="session")
def tables() -> Iterator[ModuleType]:
    """`bench/write_tables.py` as a module; as when it is run, its imports start in its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("write_tables")


@pytest.fixture(scope="session")
def counters() -> Iterator[ModuleType]:
    """`bench/kernel_counters.py` as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("kernel_counters")


@pytest.fixture(scope="session")
def load_memory() -> Iterator[ModuleType]:
    """`bench/load_memory.py` as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("load_memory")
