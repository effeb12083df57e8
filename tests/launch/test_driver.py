import ctypes
import re
import threading
from ctypes.util import find_library

import pytest

from firesteel.errors import DriverError, FiresteelError, InvalidArgumentError, UnsupportedError
from firesteel.launch.driver import RUNNER_FUNCTIONS, Driver
from firesteel.launch.stub import StubDriver

OUT_OF_MEMORY = 2
KERNEL = b"cubin"


@pytest.fixture
def stub() -> StubDriver:
    try:
        driver = StubDriver.open()
    except UnsupportedError as error:
        pytest.skip(str(error))
    driver.reset()
    yield driver
    driver.reset()


def current_context(driver: Driver) -> int | None:
    get_current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    context = ctypes.c_void_p()
    assert get_current(driver.addresses["cuCtxGetCurrent"])(ctypes.addressof(context)) == 0
    return context.value


def test_a_library_that_cannot_be_loaded_is_named():
    with pytest.raises(DriverError, match=r"got 'no-such-driver\.so', which cannot be loaded: "):
        Driver.open("no-such-driver.so")


def test_a_library_that_is_no_driver_is_named_with_what_it_lacks():
    library = find_library("c")
    with pytest.raises(DriverError, match=re.escape(f"got {library!r}, which has no cuInit")):
        Driver.open(library)


def test_only_the_stub_opens_as_a_stub(stub):
    class Renamed:
        """The stub's cu* functions without those that only the stub has."""

        def __init__(self):
            self.library = ctypes.CDLL(stub.path)

        def __getattr__(self, name):
            if name.startswith("stub_"):
                raise AttributeError(name)
            return getattr(self.library, name)

    with pytest.raises(DriverError, match=r"got 'x\.so', must be the stub driver"):
        StubDriver(Renamed(), "x.so")


def test_a_stub_that_was_not_built_is_unsupported(monkeypatch):
    def fail(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr("firesteel.launch.stub.import_module", fail)
    with pytest.raises(UnsupportedError, match=r"no firesteel\.launch\._stub_driver"):
        StubDriver.open()


def test_addresses_are_those_of_the_library(stub):
    library = ctypes.CDLL(stub.path)
    names = {*RUNNER_FUNCTIONS, "cuLaunchKernel"}
    assert set(stub.addresses) == names
    for name in names:
        expected = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert stub.addresses[name] == expected
    assert stub.runner_addresses == tuple(stub.addresses[name] for name in RUNNER_FUNCTIONS)


def test_a_driver_is_initialised_once_and_a_context_retained_once_a_device(stub):
    driver = StubDriver.open()
    threads = [threading.Thread(target=driver.context, args=(i % 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.context(0) != driver.context(1)
    calls = stub.calls()
    assert calls["cuInit"] == 1
    assert calls["cuDevicePrimaryCtxRetain"] == 2


def test_a_context_that_failed_is_asked_for_again(stub):
    driver = StubDriver.open()
    stub.fail("cuInit", 100)
    with pytest.raises(DriverError, match=r"cuInit: got CUresult 100 "):
        driver.context(0)
    assert driver.context(0) != 0


def test_no_such_device(stub):
    with pytest.raises(DriverError, match=r"cuDeviceGet: got CUresult 101 "):
        stub.context(99)


def test_compute_capability(stub):
    assert stub.compute_capability(0) == (9, 0)


def test_the_message_of_a_failure_holds_the_drivers_own_words(stub):
    context = stub.context(0)
    stub.fail("cuModuleLoadData", OUT_OF_MEMORY)
    message = (
        r"^cuModuleLoadData: got CUresult 2 \(CUDA_ERROR_OUT_OF_MEMORY: out of memory\), must be 0$"
    )
    with pytest.raises(DriverError, match=message) as raised:
        stub.load(context, KERNEL, "kernel", shared_bytes=0)
    assert isinstance(raised.value, FiresteelError)
    assert isinstance(raised.value, RuntimeError)


def test_a_failure_without_words_is_still_told(stub):
    stub.fail("cuGetErrorName", 1)
    stub.fail("cuStreamIsCapturing", 7)
    with pytest.raises(
        DriverError, match=r"got CUresult 7 \(a number that the driver does not kno"
    ):
        stub.is_capturing(1)


def test_load_gives_distinct_handles_and_what_a_thread_takes(stub):
    context = stub.context(0)
    first = stub.load(context, KERNEL, "one", shared_bytes=0)
    second = stub.load(context, KERNEL, "two", shared_bytes=0)
    assert len({first.handle, second.handle, first.module, second.module, 0}) == 5
    assert (first.num_registers, first.local_bytes) == (32, 0)
    assert stub.calls()["cuFuncLoad"] == 2


@pytest.mark.parametrize(("shared_bytes", "asks"), [(0, 0), (49152, 0), (49153, 1), (232448, 1)])
def test_shared_memory_is_asked_for_above_48_kib(stub, shared_bytes, asks):
    stub.load(stub.context(0), KERNEL, "kernel", shared_bytes=shared_bytes)
    assert stub.calls().get("cuFuncSetAttribute", 0) == asks


def test_a_driver_without_cufuncload_loads_too(stub):
    class Older:
        def __init__(self):
            self.library = ctypes.CDLL(stub.path)

        def __getattr__(self, name):
            if name == "cuFuncLoad":
                raise AttributeError(name)
            return getattr(self.library, name)

    driver = Driver(Older(), stub.path)
    assert driver.load(driver.context(0), KERNEL, "kernel", shared_bytes=0).handle != 0
    assert "cuFuncLoad" not in stub.calls()


@pytest.mark.parametrize(
    "name",
    ["cuModuleGetFunction", "cuFuncLoad", "cuFuncSetAttribute", "cuFuncGetAttribute"],
)
def test_what_fails_to_load_is_unloaded_and_leaves_no_context(stub, name):
    context = stub.context(0)
    stub.fail(name, OUT_OF_MEMORY)
    with pytest.raises(DriverError, match=f"^{name}: "):
        stub.load(context, KERNEL, "kernel", shared_bytes=100_000)
    assert stub.calls()["cuModuleUnload"] == 1
    assert current_context(stub) is None


def test_a_context_that_cannot_be_made_current_is_not_popped(stub):
    context = stub.context(0)
    stub.fail("cuCtxPushCurrent_v2", 201)
    with pytest.raises(DriverError, match=r"^cuCtxPushCurrent_v2: "):
        stub.synchronize(context)
    assert "cuCtxPopCurrent_v2" not in stub.calls()


@pytest.mark.parametrize(
    ("image", "shared_bytes", "message"),
    [
        (b"", 0, r"image: got 0 bytes, must be a cubin with 'kernel'"),
        (KERNEL, -1, r"shared_bytes: got -1, must be 0 or more"),
    ],
)
def test_bad_arguments_of_load(stub, image, shared_bytes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        stub.load(stub.context(0), image, "kernel", shared_bytes=shared_bytes)


def test_synchronize_runs_in_the_context_and_leaves_none(stub):
    context = stub.context(0)
    stub.synchronize(context)
    calls = stub.calls()
    assert calls["cuCtxSynchronize"] == 1
    assert calls["cuCtxPushCurrent_v2"] == calls["cuCtxPopCurrent_v2"] == 1
    assert current_context(stub) is None


def test_capturing_streams(stub):
    stub.set_capturing(64, True)
    assert stub.is_capturing(64)
    assert not stub.is_capturing(65)
    stub.set_capturing(64, False)
    assert not stub.is_capturing(64)


def test_the_stub_refuses_what_it_does_not_know(stub):
    with pytest.raises(InvalidArgumentError, match=r"name: got 'cuNothing', must be one of "):
        stub.fail("cuNothing", 1)
    with pytest.raises(InvalidArgumentError, match=r"function, num_params: got 7 and 1"):
        stub.expect_params(7, 1)
    for stream in range(1, 65):
        stub.set_capturing(stream, True)
    with pytest.raises(InvalidArgumentError, match=r"stream: got 65, at most 64"):
        stub.set_capturing(65, True)
