"""vLLM's own engine on a GPU: experts on kernels that were planned and loaded before it was ready.

Its monitor of compilers and its check of synchronisations make an error of what they find.
"""

import pytest
import torch

from tests.checkpoints import STORAGES, oracle, write

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.integrations.vllm.engine import run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

PROMPTS = [[1, 5, 9, 33, 77, 12], [4, 4, 8]]
MAX_TOKENS = 8
# Type of transformers' model, and how far logprobs may be from its. bfloat16 alone moves those of
# this gpt-oss by 0.29.
REFERENCES = {"gpt_oss": (torch.bfloat16, 0.15)}
OPTIONS = {
    "dtype": "bfloat16",
    "attention_backend": "TRITON_ATTN",
    "gpu_memory_utilization": 0.1,
    "jit_monitor_mode": "error",
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
}
GRAPHS = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
# Of decode alone, and no other compiler than ours.
PLAIN_GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}
CASES = [
    ("qwen3_moe", "ct-w4-g32", GRAPHS),
    ("qwen3_moe", "ct-w3-ten-a-word", PLAIN_GRAPHS),
    ("qwen3_moe", "exl3-3-mcg", PLAIN_GRAPHS),
    ("glm4_moe", "nvfp4", PLAIN_GRAPHS),
    # After its warm-up vLLM compiles a kernel of attention in windows. Its monitor, once set, is
    # that of the process.
    ("gpt_oss", "mxfp4-gpt-oss", {**PLAIN_GRAPHS, "jit_monitor_mode": "warn"}),
]


def _check_logprobs(got, written):
    """Of the token after the first prompt, by transformers' model of the stored numbers."""
    dtype, bound = REFERENCES.get(written.family, (torch.float32, 0.1))
    with torch.no_grad():
        logits = oracle(written, dtype)(torch.tensor(PROMPTS[:1])).logits[0, -1]
    wanted = logits.float().log_softmax(dim=-1)
    for token, logprob in got["logprobs"].items():
        assert abs(logprob - wanted[int(token)]) < bound


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of each case what the engine gave, and its checkpoint."""
    root = tmp_path_factory.mktemp("vllm")
    runs, files = [], []
    for place, (family, storage, options) in enumerate(CASES):
        written = write(root / str(place), family, STORAGES[storage], linears=family != "gpt_oss")
        given = {"path": str(written.path), "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
        runs.append({**given, "options": {**OPTIONS, **options}})
        files.append(written)
    got = [*_checked(runs[:-1]), *_checked(runs[-1:])]
    return list(zip(got, files, strict=True))


def _checked(runs):
    return run(runs, VLLM_GPU_SYNC_CHECK="error")


@pytest.mark.parametrize("place", range(len(CASES)), ids=["-".join(c[:2]) for c in CASES])
def test_experts_run_on_what_was_planned(found, place):
    got, written = found[place]
    assert "error" not in got, got["error"]
    assert [len(tokens) for tokens in got["tokens"]] == [MAX_TOKENS] * len(PROMPTS)
    _check_logprobs(got, written)
    for (before,), (after,) in [(got["ready"], got["reports"])]:
        assert after["kernels"]["layers"] == after["layers"] == 2
        assert after["kernels"]["refused"] == {}
        (plan,), (ready,) = after["kernels"]["plans"], before["kernels"]["plans"]
        assert plan["max_tokens"] == OPTIONS["max_num_batched_tokens"]
        # Nothing was loaded after the engine was ready.
        assert plan["prewarmed"] == ready["prewarmed"]
        assert plan["prewarmed"]["loaded"] == plan["planned"]
        assert plan["launches"] > ready["launches"] > 0
        assert plan["misses"] == plan["launched_unplanned"] == []
        # No stream of the engine's warm-up or of its steps took memory.
        assert got["arenas"] == [1, 1]


def test_layers_without_kernels_are_refused_where_graphs_are_captured(tmp_path):
    written = write(tmp_path / "a", "qwen3_moe", STORAGES["gptq-w4-desc_act"], linears=True)
    given = {"path": str(written.path), "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
    graphs, eager = run(
        [
            {**given, "options": {**OPTIONS, **PLAIN_GRAPHS}},
            {**given, "options": OPTIONS},
        ]
    )
    assert "enforce_eager: got False, must be True since" in graphs["error"]
    assert list(eager["reports"][0]["kernels"]["refused"].values()) == [2]
    _check_logprobs(eager, written)
