"""vLLM's own engine on a CPU gives the tokens of transformers' model of the stored numbers."""

import json
from dataclasses import replace

import pytest
import torch

from firesteel.integrations.transformers import load_model
from tests.checkpoints import STORAGES, edit_config, oracle, write, write_tensors
from tests.integrations.vllm.engine import run

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
]

PROMPTS = [[1, 5, 9, 33, 77, 12], [4, 4, 8]]
MAX_TOKENS = 8
# Latent attention of vLLM's CPU engine multiplies in 16 bits, and takes heads of real size alone.
LATENT = {
    "topk_method": "noaux_tc",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
CASES = [
    ("qwen3_moe", "ct-w4-g32-asym", {}, {}),
    ("qwen3_moe", "ct-w3-ten-a-word", {}, {}),
    ("mixtral", "awq-asym", {}, {}),
    ("olmoe", "gptq-w4-desc_act", {}, {}),
    ("glm4_moe", "nvfp4", {}, {}),
    ("gpt_oss", "mxfp4-gpt-oss", {}, {}),
    # Which vLLM's own model of it does not pass on.
    ("gpt_oss", "nf3", {"swiglu_limit": 0.5, "swiglu_alpha": 1.0}, {}),
    ("qwen3_moe", "exl3-mixed", {}, {}),
    ("qwen3_moe", "ct-w4-g32", {}, {"enforce_eager": False}),
]
N = {"moe_intermediate_size": 160}
SHARED = [
    ("qwen3_moe", "ct-w4-g32", N, {"tensor_parallel_size": 2}),
    ("qwen3_moe", "gptq-w4-desc_act", N, {"tensor_parallel_size": 2}),
    ("qwen3_moe", "ct-w3-ten-a-word", N, {"tensor_parallel_size": 2}),
    ("qwen3_moe", "awq-asym", N, {"tensor_parallel_size": 2}),
    ("qwen3_moe", "exl3-3-mcg", {"moe_intermediate_size": 200}, {"tensor_parallel_size": 2}),
    (
        "qwen3_moe",
        "ct-w4-g32",
        {"num_experts": 5},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
]


def _tokens(model):
    found = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(ids[0, len(prompt) :].tolist())
    return found


def _compared(tmp_path_factory, cases):
    """Of each case what the engine gave and what it should."""
    root = tmp_path_factory.mktemp("vllm")
    runs, wanted = [], []
    for place, (family, storage, config, options) in enumerate(cases):
        written = write(
            root / str(place),
            family,
            STORAGES[storage],
            linears=family != "gpt_oss",
            **config,
        )
        given = {"path": str(written.path), "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
        runs.append({**given, "options": options})
        dtype = getattr(torch, options.get("dtype", "float32"))
        expected = _tokens(oracle(written, dtype))
        # What `firesteel generate` gives.
        assert _tokens(load_model(written.path, device="cpu", dtype=dtype)) == expected
        wanted.append(expected)
    return list(zip(run(runs), wanted, strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return _compared(tmp_path_factory, CASES)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return _compared(tmp_path_factory, SHARED)


@pytest.mark.parametrize("place", range(len(CASES)), ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_tokens_of_one_process(alone, place):
    got, wanted = alone[place]
    assert "error" not in got, got["error"]
    assert got["tokens"] == wanted
    (report,) = got["reports"]
    assert report["layers"] == 2
    assert report["bytes"] > 0
    assert list(report["kernels"]["refused"]) == ["device: cpu, kernels need a CUDA device"]


@pytest.mark.parametrize("place", range(len(SHARED)), ids=["-".join(c[:2]) for c in SHARED])
def test_tokens_of_two_ranks(shared, place):
    got, wanted = shared[place]
    assert "error" not in got, got["error"]
    assert got["tokens"] == wanted
    assert [report["layers"] for report in got["reports"]] == [2, 2]


def _plain_copy(written, path):
    """A checkpoint of the stored numbers themselves, which the engine reads without firesteel."""
    config = json.loads((written.path / "config.json").read_text())
    del config["quantization_config"]
    tensors = {}
    for name, tensor in written.state.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts"):
            exact = tensor.bfloat16()
            tensors[name] = exact if torch.equal(exact.float(), tensor) else tensor
            continue
        names = ["gate_proj", "up_proj"] if last == "gate_up_proj" else ["down_proj"]
        for expert, matrix in enumerate(tensor.bfloat16()):
            for own, part in zip(names, matrix.chunk(len(names)), strict=True):
                tensors[f"{prefix}.{expert}.{own}.weight"] = part
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    write_tensors(path, tensors)
    return path


def test_latent_attention_gives_what_the_engine_makes_of_the_same_plain_numbers(tmp_path):
    """Its model of DeepSeek differs from transformers' for so small a config."""
    written = write(
        tmp_path / "a", "deepseek_v3", STORAGES["ct-w3-ten-a-word"], linears=True, **LATENT
    )
    plain = _plain_copy(written, tmp_path / "b")
    given = {"prompts": PROMPTS[:1], "max_tokens": 1}
    bf16 = {"dtype": "bfloat16"}
    ours, theirs = run(
        [
            {"path": str(written.path), **given, "options": bf16},
            {"path": str(plain), **given, "options": {**bf16, "quantization": None}},
        ]
    )
    assert ours["reports"][0]["layers"] == 2
    assert theirs["reports"] == [None]
    assert ours["logprobs"].keys() == theirs["logprobs"].keys()
    for token, logprob in ours["logprobs"].items():
        assert abs(logprob - theirs["logprobs"][token]) < 0.1


def _write_eagle(path):
    """A draft model of plain numbers for targets of 128 columns and 96 tokens."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "vocab_size": 96,
        "draft_vocab_size": 96,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    shapes = {
        "fc": (128, 384),
        "midlayer.self_attn.q_proj": (128, 256),
        "midlayer.self_attn.k_proj": (64, 256),
        "midlayer.self_attn.v_proj": (64, 256),
        "midlayer.self_attn.o_proj": (128, 128),
        "midlayer.mlp.gate_proj": (64, 128),
        "midlayer.mlp.up_proj": (64, 128),
        "midlayer.mlp.down_proj": (128, 64),
        "midlayer.input_layernorm": (128,),
        "midlayer.hidden_norm": (128,),
        "midlayer.post_attention_layernorm": (128,),
        "norm": (128,),
        "lm_head": (96, 128),
    }
    generator = torch.Generator().manual_seed(0)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator).bfloat16() / 10
        for name, shape in shapes.items()
    }
    write_tensors(path, tensors)
    return path


def test_draft_models_may_be_plain_and_their_target_quantised(tmp_path):
    storage = STORAGES["ct-w4-g32"]
    target = write(tmp_path / "a", "qwen3_moe", storage, linears=True, num_hidden_layers=8)
    draft = {"method": "eagle3", "model": str(_write_eagle(tmp_path / "b"))}
    options = {"speculative_config": {**draft, "num_speculative_tokens": 1}}
    given = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}
    (got,) = run([{"path": str(target.path), **given, "options": options}])
    assert "error" not in got, got["error"]
    assert got["tokens"] == _tokens(oracle(target))
    (report,) = got["reports"]
    assert report["layers"] == 7


def _write_predicting(path, **options):
    """A checkpoint whose fourth layer predicts a further token, and its model without it."""
    written = write(path, "glm4_moe", STORAGES["ct-w4-g32"], num_hidden_layers=4, **options)
    head = "model.layers.3."
    norms = {f"{head}{name}.weight": torch.ones(128) for name in ("enorm", "hnorm")}
    own = {
        **norms,
        f"{head}shared_head.norm.weight": torch.ones(128),
        f"{head}shared_head.head.weight": written.tensors["lm_head.weight"].clone(),
        f"{head}embed_tokens.weight": written.tensors["model.embed_tokens.weight"].clone(),
        f"{head}eh_proj.weight": torch.eye(128, 256),
    }
    tensors = {**written.tensors, **{name: tensor.bfloat16() for name, tensor in own.items()}}
    write_tensors(path, tensors)
    edit_config(path, num_hidden_layers=3, num_nextn_predict_layers=1)
    state = {name: t for name, t in written.state.items() if not name.startswith(head)}
    return replace(written, tensors=tensors, state=state)


def test_layers_that_predict_may_be_plain_and_are_refused_if_quantised(tmp_path):
    quantised = _write_predicting(tmp_path / "a", linears=True)
    plain = _write_predicting(tmp_path / "b", plain_layers=(3,))
    given = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}
    mtp = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    cases = [(quantised, mtp), (quantised, {}), (plain, mtp)]
    refused, *others = run(
        [{"path": str(w.path), **given, "options": options} for w, options in cases]
    )
    assert "got method 'mtp', must be another or None: model.layers.3.mlp." in refused["error"]
    for got, written in zip(others, (quantised, plain), strict=True):
        assert "error" not in got, got["error"]
        assert got["tokens"] == _tokens(oracle(written))
        assert got["reports"][0]["layers"] == 2


def test_it_claims_what_it_is_told_to_and_nothing_else(tmp_path):
    quantised = write(tmp_path / "a", "qwen3_moe", STORAGES["awq-sym"])
    plain = write(tmp_path / "b", "qwen3_moe")
    given = {"prompts": [[1, 2]], "max_tokens": 2, "options": {"quantization": None}}
    broken = write(tmp_path / "c", "qwen3_moe", STORAGES["awq-sym"])
    left = {n: t for n, t in broken.tensors.items() if n != "model.norm.weight"}
    write_tensors(broken.path, left)
    claimed, other, lacking = run(
        [{"path": str(w.path), **given} for w in (quantised, plain, broken)], FIRESTEEL_VLLM="auto"
    )
    assert claimed["reports"][0]["layers"] == 2
    assert other["reports"] == [None]
    # vLLM itself would run it with what memory held.
    assert "lacks 1 tensor(s) of the model, first model.norm.weight" in lacking["error"]
    (refused,) = run([{"path": str(plain.path), **given, "options": {}}])
    assert "nothing in" in refused["error"]
    (left,) = run([{"path": str(quantised.path), **given}])
    assert left.get("reports") in (None, [None])


def test_linears_alone_are_reported_too(tmp_path):
    storage = STORAGES["ct-w4-g32"]
    written = write(tmp_path / "a", "qwen3_moe", storage, linears=True, plain_layers=(0, 1, 2))
    (got,) = run([{"path": str(written.path), "prompts": PROMPTS, "max_tokens": 2, "options": {}}])
    (report,) = got["reports"]
    assert (report["layers"], report["kernels"]) == (0, None)
    # Three layers of q, k, v and o, and the dense one's gate, up and down.
    assert report["expanded_linears"] == 15
