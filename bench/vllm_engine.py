"""A few layers of a real model in vLLM's engine: firesteel's experts against vLLM's own.

    python bench/vllm_engine.py [--model qwen3-30b-a3b --layers 4 --recipe int4-g128 --out FILE]

One checkpoint of random weights is loaded twice in one process, with `quantization="firesteel"` and
as vLLM loads it by itself; all else of the two engines is the same, CUDA graphs as vLLM chooses
them. A line an engine and a case: what the GPU worked a step, summed over its kernels by the
profiler, the kernels that took most, and what a step took by the clock, which the engine's Python
bounds where layers are few. An engine whose logprobs are not those of the stored numbers in float32
has no time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from firesteel.cli.bench.decode import tolerance
from firesteel.cli.bench.records import context, writer
from firesteel.cli.bench.stacks import stack_config, write_stack
from firesteel.integrations.transformers import load_model

if TYPE_CHECKING:
    from vllm import LLM  # pyright: ignore[reportMissingImports]

_EXPERTS = ("firesteel", "vllm")
# Further from the model's than this many tolerances is no other expert of a router.
_FLIPPED = 4
_PROMPT = 16
_STEPS = 32
_CHECKED = (8, 64)
_REPEATS = 5
_SHOWN = 16
_CACHE_BYTES = 4 * 1024**3


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--recipe", default="int4-g128")
    parser.add_argument("--batches", default="1,8,64", help="sequences that decode together")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of a step without decode")
    parser.add_argument(
        "--experts", nargs="+", default=_EXPERTS, choices=_EXPERTS, help="whose, one after another"
    )
    parser.add_argument("--options", default="{}", help="of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    given = parser.parse_args()
    if given.prefill % 2:
        parser.error(f"--prefill: got {given.prefill}, must be even: two prompts share it")
    # The profiler sees the kernels of its own process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with (
        tempfile.TemporaryDirectory(prefix="firesteel-") as folder,
        writer(given.out, as_json=True) as write,
    ):
        write_stack(Path(folder), stack_config(given.model, given.layers), given.recipe)
        expected = _expected(folder, device)
        made_by = context(device)
        is_wrong = False
        for experts in given.experts:
            began = time.perf_counter()
            llm = _engine(folder, experts, given)
            found = {
                **_named(given, experts),
                "ready_seconds": time.perf_counter() - began,
                "differences": {n: _differences(llm, n, of) for n, of in expected.items()},
                "tolerances": [tolerance(given.layers), _FLIPPED * tolerance(given.layers)],
            }
            if _is_right(found):
                for row in _measure(llm, given):
                    write({**found, **row, **made_by})
            else:
                is_wrong = True
                write({**found, "reason": "logprobs are not the model's", **made_by})
            del llm
            _end_engine()
    raise SystemExit(is_wrong)


@torch.no_grad()
def _expected(folder: str, device: torch.device) -> dict[int, Tensor]:
    """By the number of prompts float32 `[prompts, vocabulary]`: logprobs of the stored numbers."""
    # Moved after it was loaded, so that experts run on PyTorch's operators.
    model = load_model(folder, device="cpu", dtype=torch.float32).to(device)
    found: dict[int, Tensor] = {}
    for count in _CHECKED:
        ids = torch.tensor([prompt["prompt_token_ids"] for prompt in _prompts(count, _PROMPT)])
        found[count] = model(ids.to(device)).logits[:, -1].log_softmax(dim=-1).cpu()
    return found


def _named(given: argparse.Namespace, experts: str) -> dict[str, Any]:
    import vllm  # pyright: ignore[reportMissingImports]

    return {
        "bench": "vllm_engine",
        "model": given.model,
        "layers": given.layers,
        "recipe": given.recipe,
        "experts": experts,
        "vllm": vllm.__version__,
    }


def _engine(folder: str, experts: str, given: argparse.Namespace) -> LLM:
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    options = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": given.prefill,
        "kv_cache_memory_bytes": _CACHE_BYTES,
        **json.loads(given.options),
    }
    return LLM(folder, quantization="firesteel" if experts == "firesteel" else None, **options)


def _end_engine() -> None:
    from vllm.distributed import (  # pyright: ignore[reportMissingImports]
        cleanup_dist_env_and_memory,
    )

    gc.collect()
    cleanup_dist_env_and_memory()


def _prompts(count: int, tokens: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(1, 1000, (count, tokens), generator=generator)
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def _generate(
    llm: LLM, prompts: list[Any], max_tokens: int, logprobs: int | None = None
) -> list[Any]:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False,
                              ignore_eos=True, logprobs=logprobs)  # fmt: skip
    return llm.generate(prompts, sampling, use_tqdm=False)


def _differences(llm: LLM, count: int, expected: Tensor) -> list[float]:
    """How far the engine's five best logprobs are from `expected` on average.

    Of half of the prompts at most so far, and of three quarters: now and then rounding makes a
    router take another expert.
    """
    found: list[float] = []
    outputs = _generate(llm, _prompts(count, _PROMPT), 1, logprobs=5)
    for output, wanted in zip(outputs, expected, strict=True):
        best = output.outputs[0].logprobs[0].items()
        found.append(statistics.mean(abs(one.logprob - float(wanted[id])) for id, one in best))
    return [sorted(found)[count * quarters // 4 - 1] for quarters in (2, 3)]


def _is_right(found: Mapping[str, Any]) -> bool:
    return all(
        each <= most
        for differences in found["differences"].values()
        for each, most in zip(differences, found["tolerances"], strict=True)
    )


def _measure(llm: LLM, given: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in map(int, given.batches.split(",")):
        prompts = _prompts(batch, _PROMPT)
        long, short = _step(llm, prompts, _STEPS + 1), _step(llm, prompts, 1)
        rows.append({"case": f"decode {batch}", "tokens": batch, **_spent(long, short, _STEPS)})
    prompts = _prompts(2, given.prefill // 2)
    rows.append({"case": f"prefill {given.prefill}", "tokens": given.prefill,
                 **_spent(_step(llm, prompts, 1), None, 1)})  # fmt: skip
    return rows


def _step(llm: LLM, prompts: list[Any], max_tokens: int) -> Callable[[], Any]:
    return lambda: _generate(llm, prompts, max_tokens)


def _spent(run: Callable[[], Any], less: Callable[[], Any] | None, steps: int) -> dict[str, Any]:
    """What a step took: of `run`, less what `less` took."""
    walls = [_seconds(run) - (_seconds(less) if less else 0) for _ in range(_REPEATS)]
    kernels = _kernels(run)
    for name, us in (_kernels(less) if less else {}).items():
        kernels[name] = kernels.get(name, 0.0) - us
    a_step = {name: us / steps for name, us in kernels.items()}
    most = sorted(a_step, key=lambda name: -a_step[name])[:_SHOWN]
    return {
        "gpu_us": sum(a_step.values()) if a_step else None,
        "wall_us": statistics.median(walls) / steps * 1e6,
        "wall_us_all": [wall / steps * 1e6 for wall in walls],
        "kernels_us": {name[:120]: round(a_step[name], 3) for name in most},
    }


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _kernels(run: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel by name; none on a CPU."""
    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    return {event.key: event.self_device_time_total for event in profiled.key_averages()}


if __name__ == "__main__":
    main()
