"""Little models with sparse attention, and kernels that an emulator stands in for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaModel

from firesteel.indexer.pages import CACHE_DTYPES, page_views
from firesteel.indexer.reference import quantize_reference, top_k_reference
from firesteel.indexer.spec import DecodeSpec, PageWriterSpec
from firesteel.integrations.transformers import swap_indexers
from firesteel.integrations.transformers.index_kernels import IndexKernels, IndexSpecs
from firesteel.integrations.transformers.indexers import (
    IndexerOptions,
    IndexerReport,
    swap_with,
)
from firesteel.launch import plan
from firesteel.launch.check import check_operand
from firesteel.launch.spec import Spec

FAMILIES = ("glm_moe_dsa", "deepseek_v32")
INDEXERS = {"glm_moe_dsa": 2, "deepseek_v32": 3}
TOP_K = 4
VOCAB = 96
CPU = torch.device("cpu")

_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": TOP_K,
    "index_head_dim": 64,
    "index_n_heads": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def little(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "eager",
    seed: int = 0,
    **changes: Any,
) -> Any:
    """A random model of three layers; of GLM-MoE-DSA the last has no indexer of its own."""
    fields = {**_CONFIG, **changes}
    if family == "glm_moe_dsa":
        fields["indexer_types"] = ["full", "full", "shared"]
    config = AutoConfig.for_model(family, **fields)
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            # Outputs as large as inputs, and more, so that tokens differ.
            parameter.data.normal_(0, 2 / parameter.shape[-1] ** 0.5)
    return made.eval()


# Amplitudes and phases of the first pairs that RoPE turns, and a constant: of the distances from 0
# to 13 these scores put 2 to 5 first, and 0 to 3, a third of their range above all others.
_PATTERNS = (
    ((0.233, 0.653, 0.182), (3.049, 4.312, 4.848), 0.512),
    ((0.508, 0.312, 0.800), (4.276, 5.795, 0.009), 1.004),
)


def separated(family: str, seed: int = 5) -> Any:
    """A model whose scores are far apart, up to 14 tokens.

    They follow the distance of row and key, by RoPE, since queries and keys are nearly the same at
    each token: they come from the first column of the hidden state, which no layer changes.
    """
    made = little(family, seed=seed)
    generator = torch.Generator().manual_seed(7)
    made.model.embed_tokens.weight.data[:, 0] = 3.0
    made.lm_head.weight.data[:, 0] = 0.0
    for number, layer in enumerate(made.model.layers):
        layer.self_attn.o_proj.weight.data[0] = 0.0
        mlp = layer.mlp
        if hasattr(mlp, "experts"):
            mlp.experts.down_proj.data[:, 0] = 0.0
            mlp = mlp.shared_experts
        mlp.down_proj.weight.data[0] = 0.0
        indexer = layer.self_attn.indexer
        if indexer is None:
            continue
        q, k = _pattern(family, indexer, *_PATTERNS[number % 2])
        first = torch.randn(indexer.q_lora_rank, generator=generator)
        q_a = layer.self_attn.q_a_proj.weight.data
        q_a *= 0.02
        q_a[:, 0] = first
        # What the norm of q_a's rows leaves of `first` comes out as q.
        way = first / first.square().mean().sqrt() / len(first)
        indexer.wq_b.weight.data.mul_(0.02).add_(q.repeat(indexer.n_heads)[:, None] * way)
        indexer.k_norm.weight.data.fill_(0.02)
        indexer.k_norm.bias.data.copy_(k)
        indexer.weights_proj.weight.data.mul_(0.02)[:, 0] = 1.0
    return made


def _pattern(
    family: str, indexer: Any, amplitudes: Any, phases: Any, constant: float
) -> tuple[Tensor, Tensor]:
    """q and k with q . k = constant + sum of amplitude * cos(distance * frequency + phase)."""
    q, k = torch.zeros(2, indexer.head_dim)
    size = indexer.qk_rope_head_dim
    for pair, (amplitude, phase) in enumerate(zip(amplitudes, phases, strict=True)):
        is_interleaved = family == "glm_moe_dsa"
        one, two = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + size // 2)
        k[one] = 1.0
        q[one], q[two] = amplitude * math.cos(phase), amplitude * math.sin(phase)
    q[size], k[size] = constant, 1.0
    return q, k


def indexers(model: nn.Module) -> list[Any]:
    """The indexers of a model, in order."""
    return [module for module in model.modules() if type(module).__name__.endswith("Indexer")]


# The later name of what was `past_key_values`, which is deprecated.
_CACHE = (
    "cache"
    if "cache" in inspect.signature(inspect.unwrap(GlmMoeDsaModel.forward)).parameters
    else "past_key_values"
)


@torch.no_grad()
def forward(model: Any, ids: Tensor, cache: Any = None, **options: Any) -> tuple[Tensor, Any]:
    """Tokens `[B, S]` that follow each of ids, and the cache."""
    out = model(ids, **{_CACHE: cache, "use_cache": True, **options})
    return out.logits.argmax(dim=-1), getattr(out, _CACHE)


def prompt(batch: int = 2, length: int = 13, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def generated(
    model: Any, ids: Tensor, *, new: int = 8, padding: int = 0, **options: Any
) -> list[list[int]]:
    """Tokens of a greedy continuation; the first request begins with `padding` pads."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **{"max_new_tokens": new, **options},
    )
    return out[:, ids.shape[1] :].tolist()


@contextmanager
def recorded(model: Any) -> Iterator[list[tuple[Any, dict[str, Any], Tensor]]]:
    """Of each call of an indexer while open: the module, its arguments by name, its result."""
    calls: list[tuple[Any, dict[str, Any], Tensor]] = []
    names = ("hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids")

    def note(module: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        calls.append((module, {name: given[name] for name in names}, result.clone()))

    hooks = [each.register_forward_hook(note, with_kwargs=True) for each in indexers(model)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


class EmulatedReady:
    """Stands in for a plan made ready: what is bound computes in float64, by the oracles."""

    launcher, target = "emulator", "sm_90"

    def __init__(self, spec: Spec, max_tokens: int) -> None:
        flags = {"slots": ("i64",)} if isinstance(spec, PageWriterSpec) else None
        self.plan = plan(spec, max_tokens, flags=flags)
        self.binds = 0
        self.runs: list[int] = []

    def bind(self, tensors: Mapping[str, Tensor], arena: Any, **flags: str) -> EmulatedBound:
        assert arena.num_bytes >= self.plan.workspace.num_bytes
        self.binds += 1
        return EmulatedBound(self, tensors, tuple(flags.items()))


class EmulatedBound:
    def __init__(self, ready: EmulatedReady, tensors: Mapping[str, Tensor], flags: Any) -> None:
        self.ready, self.tensors = ready, dict(tensors)
        self.addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self.operands = ready.plan.spec.operands(flags)
        for operand in self.operands:
            if not operand.is_per_call:
                check_operand(operand, tensors[operand.name], 0, CPU)

    def run(self, *given: Tensor) -> int:
        """Check as `Bound.run` does, and compute."""
        spec, count = self.ready.plan.spec, len(given[0])
        assert count <= self.ready.plan.max_tokens
        self.ready.runs.append(count)
        passed = [operand for operand in self.operands if operand.is_per_call]
        for operand, tensor in zip(passed, given, strict=True):
            check_operand(operand, tensor, count, CPU)
        # What was bound is read where it was, as a kernel does.
        for name, tensor in self.tensors.items():
            assert tensor.data_ptr() == self.addresses[name]
        named = dict(zip([operand.name for operand in passed], given, strict=True))
        named |= self.tensors
        if isinstance(spec, PageWriterSpec):
            _write(spec, **named)
        elif isinstance(spec, DecodeSpec):
            lengths = named["seq_lens"][:, None] - torch.arange(spec.rows).flip(0)
            tables = named["page_table"].repeat_interleave(spec.rows, dim=0)
            _select(spec, named, tables, lengths.flatten())
        else:
            tables = named["page_table"][named["row_request"].long()]
            _select(spec, named, tables, named["k_end"])
        return 1


def _cache_dtype(spec: Any) -> torch.dtype:
    return CACHE_DTYPES[spec.cache_dtype]


def _views(spec: Any, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Values `[pages, 64, 128]` and scales `[pages, 64]` of a cache."""
    dtype = _cache_dtype(spec)
    if dtype == torch.float8_e4m3fn:
        return page_views(cache, spec.page_stride)
    values = cache.view(dtype).view(-1, 64, 128)
    return values, torch.ones(values.shape[:2])


def _write(spec: PageWriterSpec, cache: Tensor, keys: Tensor, slots: Tensor) -> None:
    values, scales = _views(spec, cache)
    page, offset = slots // 64, slots % 64
    if values.dtype == torch.float8_e4m3fn:
        keys, scales[page, offset] = quantize_reference(keys)
        values, keys = values.view(torch.uint8), keys.view(torch.uint8)
    values[page, offset] = keys


def _select(spec: Any, named: Mapping[str, Tensor], tables: Tensor, lengths: Tensor) -> None:
    """`indices` of each row, whose pages are in `tables` and of which it sees so many keys."""
    values, scales = _views(spec, named["cache"])
    q, w = named["q"].flatten(0, -3).double(), named["w"].flatten(0, -2).double()
    indices = named["indices"].flatten(0, -2)
    for row, length in enumerate(lengths.clamp(min=0).tolist()):
        table = tables[row, : -(-length // 64)].long()
        assert (table >= 0).all()
        # Bytes, since e4m3 has no indexing.
        keys = values.view(torch.uint8)[table].view(values.dtype).reshape(-1, 128)[:length]
        dots = (q[row] @ keys.double().t()).relu()
        found = (w[row] @ dots) * scales[table].reshape(-1)[:length].double()
        indices[row] = torch.tensor(top_k_reference(found.tolist(), spec.top_k))


@pytest.fixture
def small_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let specs be of 16 keys, so that short prompts have more; nothing is compiled."""
    for module in ("indexer.spec", "integrations.transformers.index_kernels"):
        monkeypatch.setattr(f"firesteel.{module}.TOP_KS", (16,))


def emulated(specs: IndexSpecs, device: torch.device) -> IndexKernels:
    return IndexKernels(specs, device, EmulatedReady)  # pyright: ignore


def swap_emulated(model: Any, **options: Any) -> IndexerReport:
    """Swap a model's indexers for ones on emulated kernels."""
    sizes = {"max_keys": 256, "max_requests": 4, "max_rows": 64}
    return swap_with(model, IndexerOptions(**{**sizes, **options}), emulated)


def on_kernels(family: str, **changes: Any) -> Any:
    """A little model of which kernels of 16 keys exist."""
    return little(family, index_head_dim=128, index_topk=16, **changes)


def kernels_of(model: Any) -> Any:
    """The kernels of a model's indexers, which share them."""
    first, *others = [each.firesteel.kernels for each in indexers(model)]
    assert all(other is first for other in others)
    return first


def runs_of(model: Any) -> dict[str, list[int]]:
    """Counts of the calls of each operation since the last time asked."""
    found = {}
    for name, ready in kernels_of(model).ready.items():
        if ready.runs:
            found[name] = list(ready.runs)
            ready.runs.clear()
    return found


def both(family: str, **changes: Any) -> tuple[Any, Any]:
    """The same model twice: on PyTorch operators and on emulated kernels, with e4m3 keys."""
    by_torch, model = on_kernels(family, **changes), on_kernels(family, **changes)
    swap_indexers(by_torch)
    report = swap_emulated(model)
    assert report.num_layers == INDEXERS[family]
    assert report.refused == {}
    return by_torch, model
