"""The launch path on a real GPU: graphs, streams, threads, torch.compile, misses, forks."""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from examples.scale_rows.scale_rows import ScaleRows
from firesteel.errors import ArenaError, ForkedError, InvalidArgumentError, NotPlannedError
from firesteel.launch import Arena, Bound, Ready, plan, prewarm
from firesteel.launch.op import run_op
from firesteel.moe.layer import MoeLayer
from firesteel.moe.spec import MoeSpec
from firesteel.settings import Settings
from tests.moe.layers import random_layer

pytestmark = pytest.mark.gpu

K = 96
LAUNCHERS = ("native", "python")
MOE = MoeSpec(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)


def _settings(launcher: str = "auto", **changes: object) -> Settings:
    return Settings(launcher=launcher, cache="off", **changes)  # type: ignore[arg-type]


def _ready(launcher: str = "auto", max_tokens: int = 300, **changes: object) -> Ready:
    return prewarm(plan(ScaleRows(K), max_tokens), settings=_settings(launcher, **changes))


def _bound(ready: Ready) -> Bound:
    scale = torch.arange(K, dtype=torch.float32, device="cuda")
    return ready.bind({"scale": scale}, ready.arena(), dtype="fp32")


def _call(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, K, device="cuda")
    return x, torch.full_like(x, torch.nan)


def _expected(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(K, dtype=torch.float32, device="cuda")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_token_count_runs_in_any_order_and_nothing_else_happens(launcher: str) -> None:
    ready = _ready(launcher)
    assert ready.launcher == launcher
    bound = _bound(ready)
    counts = list(range(301))
    random.Random(0).shuffle(counts)
    calls = [_call(num_tokens) for num_tokens in counts]
    torch.cuda.synchronize()
    with ready.watch() as seen:
        for x, out in calls:
            bound.run(x, out)
    assert seen.is_clean, seen
    assert all(torch.equal(out, _expected(x)) for x, out in calls)
    audit = ready.audit.as_dict()
    # Half the keys are of the other type.
    assert audit["planned"] == 4
    assert audit["launched"] == 2
    assert audit["launches"] == 300
    assert audit["misses"] == audit["launched_unplanned"] == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_first_call_ever_can_be_captured(launcher: str) -> None:
    for num_tokens in (1, 63, 64, 300):
        bound = _bound(_ready(launcher))
        x, out = _call(num_tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bound.run(x, out)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, _expected(x))


def test_a_miss_under_capture_raises_before_anything_compiles() -> None:
    ready = _ready(on_miss="compile")
    bound = _bound(ready)
    x, out = _call(301)
    graph = torch.cuda.CUDAGraph()
    before = ready.audit.prewarmed.compiled
    with pytest.raises(NotPlannedError, match="301 tokens"), torch.cuda.graph(graph):
        bound.run(x, out)
    assert ready.audit.prewarmed.compiled == before
    torch.cuda.synchronize()
    assert bound.run(x, out) == 1
    assert torch.equal(out, _expected(x))


def test_an_arena_belongs_to_one_stream_until_released() -> None:
    layer = random_layer(MOE)
    ready = prewarm(plan(MOE, 8), settings=_settings())
    arena = ready.arena()
    made = MoeLayer(ready, layer.tensors("cuda"), arena)
    x = torch.randn(4, 256, device="cuda").bfloat16()
    ids = torch.zeros(4, 2, dtype=torch.int32, device="cuda")
    weights, out = torch.ones(4, 2, device="cuda"), torch.empty_like(x)
    made.run(x, ids, weights, out)
    first = out.clone()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        with pytest.raises(ArenaError, match="release"):
            made.run(x, ids, weights, out)
        arena.release()
        out.fill_(torch.nan)
        made.run(x, ids, weights, out)
    other.synchronize()
    assert torch.equal(out, first)
    with pytest.raises(ArenaError, match="release"):
        made.run(x, ids, weights, out)


def test_an_arena_freed_while_bound_is_refused() -> None:
    layer = random_layer(MOE)
    ready = prewarm(plan(MOE, 8), settings=_settings())
    arena = ready.arena()
    made = MoeLayer(ready, layer.tensors("cuda"), arena)
    arena.storage.untyped_storage().resize_(0)
    x = torch.randn(4, 256, device="cuda").bfloat16()
    ids = torch.zeros(4, 2, dtype=torch.int32, device="cuda")
    with pytest.raises(ArenaError, match="freed"):
        made.run(x, ids, torch.ones(4, 2, device="cuda"), torch.empty_like(x))


def test_an_arena_that_is_too_small_says_both_sizes() -> None:
    ready = prewarm(plan(MOE, 8), settings=_settings())
    needed = ready.plan.workspace.num_bytes
    small = Arena.allocate(needed - 1, torch.device("cuda", 0))
    with pytest.raises(ArenaError, match=f"requested {needed} bytes, provided {needed - 1}"):
        MoeLayer(ready, random_layer(MOE).tensors("cuda"), small)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_eight_threads_share_one_bound(launcher: str) -> None:
    bound = _bound(_ready(launcher))
    failures: list[object] = []

    def work(seed: int) -> None:
        for num_tokens in random.Random(seed).sample(range(1, 301), 60):
            x, out = _call(num_tokens)
            bound.run(x, out)
            if not torch.equal(out, _expected(x)):
                failures.append((seed, num_tokens))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_with_their_own_streams_and_arenas() -> None:
    layer = random_layer(MOE)
    ready = prewarm(plan(MOE, 64), settings=_settings())
    tensors = layer.tensors("cuda")
    x = torch.randn(64, 256, device="cuda").bfloat16()
    ids = torch.randint(0, 8, (64, 2), device="cuda")
    weights = torch.rand(64, 2, device="cuda")
    expected = torch.empty_like(x)
    MoeLayer(ready, tensors, ready.arena()).run(x, ids, weights, expected)
    torch.cuda.synchronize()
    failures: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            made, out = MoeLayer(ready, tensors, ready.arena()), torch.empty_like(x)
            for _ in range(50):
                out.fill_(torch.nan)
                made.run(x, ids, weights, out)
                if not torch.equal(out, expected):
                    failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_torch_compile_traces_past_a_layer(backend: str) -> None:
    layer = random_layer(MOE)
    ready = prewarm(plan(MOE, 64), settings=_settings())
    made = MoeLayer(ready, layer.tensors("cuda"), ready.arena())

    def step(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return made(x * 2, ids, weights) + 1

    x = torch.randn(40, 256, device="cuda").bfloat16()
    ids = torch.randint(0, 8, (40, 2), device="cuda")
    weights = torch.rand(40, 2, device="cuda")
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(x, ids, weights), step(x, ids, weights))


def test_the_operator_runs_by_handle_and_refuses_one_that_is_gone() -> None:
    bound = _bound(_ready())
    x, out = _call(7)
    run_op(bound.handle, [x], [out])
    assert torch.equal(out, _expected(x))
    handle = bound.handle
    del bound
    with pytest.raises(InvalidArgumentError, match="no longer exists"):
        run_op(handle, [x], [out])


def test_a_forked_worker_is_told_so() -> None:
    bound = _bound(_ready())
    x, out = _call(7)
    bound.run(x, out)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            bound.run(x, out)
        except ForkedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_spawned_worker_prewarms_for_itself(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from firesteel.launch import plan, prewarm;"
        "from firesteel.settings import Settings;"
        "from examples.scale_rows.scale_rows import ScaleRows;"
        f"s = Settings(cache_dir=Path({str(tmp_path)!r}));"
        "r = prewarm(plan(ScaleRows(96), 300), settings=s); print(r.audit.prewarmed)"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for worker in workers:
        stdout, _ = worker.communicate(timeout=120)
        assert worker.returncode == 0
        assert stdout.startswith("4 kernels loaded")


def test_a_tensor_of_another_device_or_alignment_is_named() -> None:
    bound = _bound(_ready())
    x, out = _call(7)
    with pytest.raises(InvalidArgumentError, match="x: is on cpu"):
        bound.run(x.cpu(), out)
    shifted = torch.empty(7 * K + 1, device="cuda")[1:].view(7, K)
    with pytest.raises(InvalidArgumentError, match="out: starts at"):
        bound.run(x, shifted)
