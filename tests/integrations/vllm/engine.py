"""Runs vLLM's engine in a process of its own: models in turn, as JSON comes in and goes out.

    python -m tests.integrations.vllm.engine < runs.json

`runs.json` is a list of {"path", "prompts", "max_tokens", "options"}. Each gives a line on stdout
that begins with `RESULT ` and is {"error"}, its class first, or

    tokens         of each prompt
    logprobs       of the likeliest first tokens of the first prompt
    ready, arenas  workers' reports, and how many arenas the process had, before the first prompt;
    reports        and after the last one, as the second of `arenas`
"""

import json
import os
import subprocess
import sys
import traceback
from typing import Any
from unittest.mock import Mock, patch

MARK = "RESULT "
EXTENSION = "firesteel.integrations.vllm.worker.WorkerExtension"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def run(runs: list[dict[str, Any]], **environment: str) -> list[dict[str, Any]]:
    """The results of runs, in order."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.vllm.engine"],
        input=json.dumps(runs),
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = done.stdout.splitlines()
    found = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    assert len(found) == len(runs), done.stdout[-4000:] + done.stderr[-4000:]
    return found


def _run(path: str, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]) -> Any:
    from vllm import LLM, SamplingParams

    from firesteel.launch import Arena

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False, logprobs=5)
    allocate = Mock(side_effect=Arena.allocate)
    with patch.object(Arena, "allocate", allocate):
        llm = LLM(
            path,
            **{
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "quantization": "firesteel",
                "dtype": "float32",
                "max_model_len": 128,
                "worker_extension_cls": EXTENSION,
                **options,
            },
        )
        ready = llm.collective_rpc("firesteel_report")
        arenas = [allocate.call_count]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
        reports = llm.collective_rpc("firesteel_report")
        arenas.append(allocate.call_count)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    first = outputs[0].outputs[0].logprobs[0]
    logprobs = {token: found.logprob for token, found in first.items()}
    reported = {"ready": ready, "reports": reports, "arenas": arenas}
    return {"tokens": tokens, "logprobs": logprobs, **reported}


def main() -> None:
    for given in json.load(sys.stdin):
        try:
            found = _run(**given)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(f"{MARK}{json.dumps(found)}\n")
        sys.stdout.flush()
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
