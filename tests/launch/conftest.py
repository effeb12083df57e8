"""A stub driver, and the kinds of Runner that run on it."""

from collections.abc import Iterator

import pytest

from firesteel.errors import UnsupportedError
from firesteel.launch.runner import native_failure
from firesteel.launch.stub import StubDriver
from tests.launch.stage import Stage


@pytest.fixture
def kinds() -> list[str]:
    """Every kind that there is, for tests that start a process and can try all in one."""
    return ["python"] if native_failure() else ["native", "python"]


@pytest.fixture(params=["native", "python"])
def kind(request) -> str:
    if request.param == "native" and (reason := native_failure()) is not None:
        pytest.skip(f"the native Runner was not built: {reason}")
    return request.param


@pytest.fixture(scope="module")
def built_stage() -> Stage:
    try:
        return Stage()
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture
def stage(built_stage):
    built_stage.driver.reset()
    yield built_stage
    built_stage.driver.reset()


@pytest.fixture
def driver() -> Iterator[StubDriver]:
    made = StubDriver.open()
    made.reset()
    yield made
    made.reset()
