"""Compiled kernels: as bytes, by what they are identified, and how many compile at once."""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.launch import Kernel, LaunchKey, plan
from firesteel.launch import binary as binaries
from firesteel.launch.binary import (
    Binary,
    checked_target,
    compile_all,
    has_gluon,
    identity,
    supports_dependent_launch,
    supports_wgmma,
    triton_source,
    triton_version,
)
from firesteel.moe.spec import geometry
from tests.launch.gather_rows import GatherRows
from tests.launch.rig import pretended
from tests.moe.tiles import FIXED

PLAN = plan(GatherRows(), 40)
WANTED = [(PLAN.kernels[key.kernel], key) for key in PLAN.keys]
KERNEL, KEY = WANTED[0]
BINARY = pretended(KERNEL, KEY, "sm_90")


def rehashed(body: bytes) -> bytes:
    return sha256(body).hexdigest().encode() + b"\n" + body


def with_header(**changes: object) -> bytes:
    """A binary with other fields, and the hash that belongs to them."""
    line, _, image = BINARY.to_bytes().partition(b"\n")[2].partition(b"\n")
    header = {**json.loads(line), **changes}
    kept = {name: value for name, value in header.items() if value is not None}
    return rehashed(json.dumps(kept).encode() + b"\n" + image)


@given(
    image=st.binary(max_size=50),
    symbol=st.from_regex(r"[a-z_$.][\w$.]*", fullmatch=True, alphabet=st.characters(codec="ascii")),
    number=st.integers(0, 2**24),
)
def test_bytes_give_the_binary_back(image: bytes, symbol: str, number: int) -> None:
    made = replace(BINARY, image=image, symbol=symbol, shared_bytes=number)
    assert Binary.from_bytes(made.to_bytes(), made.digest) == made


@given(place=st.integers(0, len(BINARY.to_bytes()) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_wherever_it_is(place: int, bit: int) -> None:
    data = bytearray(BINARY.to_bytes())
    data[place] ^= 1 << bit
    with pytest.raises(ValueError, match="its hash does not match its bytes"):
        Binary.from_bytes(bytes(data), BINARY.digest)


@given(size=st.integers(0, len(BINARY.to_bytes()) - 1))
def test_a_file_that_was_cut_is_noticed(size: int) -> None:
    with pytest.raises(ValueError, match="its hash does not match its bytes"):
        Binary.from_bytes(BINARY.to_bytes()[:size], BINARY.digest)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_header(format=2), "it is not of format 1"),
        (with_header(format=None), "it is not of format 1"),
        (with_header(grid=3), "its fields are"),
        (with_header(symbol=None), "its fields are"),
        (with_header(format=True), "it is not of format 1"),
        (with_header(digest="0" * 64), "it is of 0000"),
        (with_header(digest=0), "its digest is 0"),
        (with_header(target=90), "its target is 90"),
        (with_header(target="sm_120"), "it is for sm_120, not sm_90"),
        (with_header(symbol=5), "its symbol is 5"),
        (with_header(symbol=""), "its symbol is ''"),
        (with_header(symbol="a\0b"), "its symbol is 'a"),
        (with_header(symbol="\u2603"), "its symbol is "),
        (with_header(shared_bytes="x"), "its shared_bytes is 'x', not an integer up to"),
        (with_header(shared_bytes=-1), "its shared_bytes is -1"),
        (with_header(shared_bytes=10**12), "its shared_bytes is 10"),
        (with_header(num_warps=1.5), "its num_warps is 1.5"),
        (with_header(num_warps=True), "its num_warps is True"),
        (with_header(num_warps=0), "its num_warps is 0"),
        (with_header(num_warps=64), "its num_warps is 64"),
        (with_header(num_hidden=-1), "its num_hidden is -1"),
        (with_header(num_hidden="2"), "its num_hidden is '2'"),
        (with_header(num_hidden=10**7), "its num_hidden is 10"),
        (rehashed(b"[" * 100_000), "its header is nested too deeply"),
        (rehashed(b"[1]\n"), "its header is no object"),
        (rehashed(b"not json\n"), "Expecting value"),
        (rehashed(b"\xff\n"), "decode"),
    ],
)
def test_a_whole_file_of_something_else_is_noticed(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Binary.from_bytes(data, BINARY.digest, "sm_90")


@pytest.mark.parametrize(("target", "number"), [("sm_80", 80), ("sm_90", 90), ("sm_120", 120)])
def test_a_target_has_a_number(target: str, number: int) -> None:
    assert checked_target(target) == number


@pytest.mark.parametrize(
    "target", ["", "90", "sm90", "sm_75", "sm_9", "sm_1200", "sm_90a", "gfx942"]
)
def test_another_target_is_refused(target: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"target: got '{target}', must be sm_80 or la"):
        checked_target(target)


def test_everything_that_changes_code_changes_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "as it is": identity(KERNEL, KEY, "sm_90"),
        "target": identity(KERNEL, KEY, "sm_120"),
        "key": identity(KERNEL, replace(KEY, num_warps=8), "sm_90"),
        "order": identity(KERNEL, replace(KEY, arguments=KEY.arguments[::-1]), "sm_90"),
        "one": identity(KERNEL, replace(KEY, constexprs=(("A", 1),)), "sm_90"),
        "true": identity(KERNEL, replace(KEY, constexprs=(("A", True),)), "sm_90"),
    }
    assert identity(Kernel(KERNEL.function), KEY, "sm_90") == found["as it is"]
    for name in ("triton_version", "environment"):
        with monkeypatch.context() as patched:
            patched.setattr(binaries, name, lambda *_: "other")
            found[name] = identity(KERNEL, KEY, "sm_90")
    monkeypatch.setattr(Kernel, "source_digest", "other")
    found["source"] = identity(KERNEL, KEY, "sm_90")
    assert len(set(found.values())) == len(found), found


def test_without_triton_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnsupportedError, match="triton: not installed, kernels need it"):
        triton_version()


class Pretender:
    """Stands in for the compile of one kernel; may wait for others, or fail."""

    def __init__(self, act: Callable[[LaunchKey], None] = lambda key: None) -> None:
        self.act = act
        self.asked: list[LaunchKey] = []
        self.threads: set[int] = set()

    def __call__(self, kernel: Kernel, key: LaunchKey, target: str) -> Binary:
        self.asked.append(key)
        self.threads.add(threading.get_ident())
        self.act(key)
        return pretended(kernel, key, target)


def compile_with(
    pretender: Pretender, monkeypatch: pytest.MonkeyPatch, threads: int
) -> dict[LaunchKey, Binary]:
    monkeypatch.setattr(binaries, "_compile", pretender)
    found: dict[LaunchKey, Binary] = {}

    def done(key: LaunchKey, binary: Binary) -> None:
        assert threading.current_thread() is threading.main_thread()
        found[key] = binary

    compile_all(WANTED, "sm_90", threads=threads, done=done)
    return found


def test_every_kernel_is_compiled_once_and_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pretender = Pretender()
    found = compile_with(pretender, monkeypatch, 2)
    assert found == {key: pretended(kernel, key, "sm_90") for kernel, key in WANTED}
    assert sorted(map(str, pretender.asked)) == sorted(map(str, PLAN.keys))


def test_as_many_as_asked_for_compile_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(2, timeout=20)
    assert len(WANTED) % 2 == 1
    last = WANTED[-1][1]
    pretender = Pretender(lambda key: None if key == last else barrier.wait() and None)
    compile_with(pretender, monkeypatch, 2)
    assert len(pretender.threads) == 2
    pretender = Pretender()
    compile_with(pretender, monkeypatch, 1)
    assert len(pretender.threads) == 1


def test_a_kernel_that_cannot_be_compiled_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(key: LaunchKey) -> None:
        if key == KEY:
            raise MemoryError("no room")

    pretender = Pretender(fail)
    with pytest.raises(MemoryError, match="no room"):
        compile_with(pretender, monkeypatch, 1)
    assert pretender.asked == [KEY]


def test_each_is_handed_over_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rest_is_done = threading.Event()
    order: list[LaunchKey] = []

    def wait(key: LaunchKey) -> None:
        if key == KEY:
            assert rest_is_done.wait(20)

    def done(key: LaunchKey, binary: Binary) -> None:
        del binary
        order.append(key)
        if len(order) == len(WANTED) - 1:
            rest_is_done.set()

    monkeypatch.setattr(binaries, "_compile", Pretender(wait))
    compile_all(WANTED, "sm_90", threads=2, done=done)
    assert order[-1] == KEY
    assert set(order) == {key for _, key in WANTED}


def test_what_others_have_compiled_is_not_lost_when_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second = WANTED[1][1]
    both = threading.Barrier(2, timeout=20)
    has_failed = threading.Event()

    def act(key: LaunchKey) -> None:
        both.wait()
        if key == KEY:
            has_failed.set()
            raise MemoryError("no room")
        assert has_failed.wait(20)
        time.sleep(0.05)

    pretender = Pretender(act)
    monkeypatch.setattr(binaries, "_compile", pretender)
    found: dict[LaunchKey, Binary] = {}
    with pytest.raises(MemoryError, match="no room"):
        compile_all(WANTED, "sm_90", threads=2, done=found.__setitem__)
    assert set(found) == {second}
    assert set(pretender.asked) == {KEY, second}


def test_where_handing_over_fails_nothing_more_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    pretender = Pretender()
    monkeypatch.setattr(binaries, "_compile", pretender)

    def done(key: LaunchKey, binary: Binary) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_all(WANTED * 1000, "sm_90", threads=1, done=done)
    assert len(pretender.asked) < 1000 * len(WANTED)


def test_nothing_to_compile_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "ThreadPoolExecutor", None)
    compile_all([], "sm_90", threads=1, done=lambda key, binary: None)


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_a_kernel_compiles_without_a_gpu(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: dict[LaunchKey, Binary] = {}
    compile_all(WANTED[:2], target, threads=2, done=found.__setitem__)
    for kernel, key in WANTED[:2]:
        made = found[key]
        assert made.digest == identity(kernel, key, target)
        assert (made.target, made.num_warps) == (target, key.num_warps)
        assert made.symbol.startswith(key.name)
        assert made.image.startswith(b"\x7fELF")
        # Triton 3.4 adds one scratch pointer, later versions two.
        assert made.num_hidden in (1, 2)
    assert not any(tmp_path.iterdir())


@triton.jit
def broken_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0)


@pytest.mark.compile
def test_a_kernel_that_triton_refuses_is_named_with_its_key() -> None:
    kernel = Kernel(broken_kernel)
    key = kernel.key({"x_ptr": "*fp32"}, {"BLOCK": 17})
    message = (
        r"broken_kernel\(x_ptr: \*fp32@16, BLOCK=17, .*\): Triton cannot compile it for sm_90: "
    )
    with pytest.raises(UnsupportedError, match=message) as caught:
        compile_all([(kernel, key)], "sm_90", threads=1, done=lambda key, binary: None)
    assert "must be a power of 2" in str(caught.value)


@pytest.mark.compile
def test_compiling_again_gives_the_same_bytes() -> None:
    found: list[bytes] = []
    for _ in range(2):
        compile_all(
            WANTED[:1], "sm_90", threads=1, done=lambda key, made: found.append(made.to_bytes())
        )
    assert found[0] == found[1]


def test_kernels_in_triton_and_in_gluon_are_compiled_as_such() -> None:
    from triton.experimental.gluon._runtime import GluonASTSource

    made = plan(geometry("glm-5.2", tensor_parallel=4).for_target("sm_90"), 4096)
    kinds = {
        key.name: type(triton_source(made.kernels[key.kernel], key)) is GluonASTSource
        for key in made.keys
    }
    assert kinds == {name: "_stream_" in name or "_wgmma_" in name for name in kinds}
    assert set(kinds.values()) == {True, False}
    # Either is told types, constants and alignments alike.
    for key in made.keys:
        source = triton_source(made.kernels[key.kernel], key)
        parameters = [parameter.name for parameter in made.kernels[key.kernel].parameters]
        assert list(source.signature) == parameters
        constants = [name for name, kind in source.signature.items() if kind == "constexpr"]
        assert {source.fn.arg_names[place] for (place,) in source.constants} == set(constants)
        aligned = [name for name, kind in key.arguments if kind.endswith("@16")]
        assert [parameters[place] for (place,) in source.attrs] == aligned


@pytest.mark.parametrize(
    ("version", "expected"),
    [("3.4.0", (False, False)), ("3.5.1", (True, False)), ("3.6.0", (True, True))],
)
def test_what_a_version_of_triton_has(
    monkeypatch: pytest.MonkeyPatch, version: str, expected: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert (supports_dependent_launch("sm_90"), supports_wgmma("sm_90")) == expected
    assert has_gluon() == expected[1]
    # Only one target has those products.
    assert not supports_wgmma("sm_80")
    assert not supports_wgmma("sm_100")
    assert not supports_wgmma("sm_120")


def test_without_triton_there_is_no_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not has_gluon()
    with pytest.raises(UnsupportedError, match="triton: not installed, kernels need it"):
        triton_version()


def test_a_kernel_of_one_target_is_not_given_to_another_s_compiler() -> None:
    """LLVM ends the process where it meets an instruction of Hopper's in code for another GPU."""
    spec = replace(geometry("glm-5.2", tensor_parallel=4), table=FIXED)
    # Past 18 routes an expert sorted ones take kernels that are Hopper's alone.
    made = plan(spec, 600, flags={"ids": ["i32"]})
    own = [key for key in made.keys if made.kernels[key.kernel].target == "sm_90"]
    assert {key.name for key in own} == {"gate_up_wgmma_kernel", "down_wgmma_kernel"}
    for key in own:
        with pytest.raises(UnsupportedError, match=r"target: got sm_120, .* is for sm_90 alone"):
            compile_all([(made.kernels[key.kernel], key)], "sm_120", threads=1, done=pytest.fail)
    other = plan(spec.for_target("sm_120"), 600)
    assert {other.kernels[key.kernel].target for key in other.keys} == {None}
