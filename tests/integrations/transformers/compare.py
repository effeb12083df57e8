"""What the tests of this folder compare: logits, tokens, buffers, files.

Where a packed model and its oracle are compared in fp32 they multiply the same fp32 weights, so
only the order of sums differs. A sum of K = 128 terms errs by about sqrt(K) * 2**-24 of its size in
either order; with seven products a layer and three layers that is 21 * 11 * 6e-8 * sqrt(2), about
2e-5 if every error pulled one way and 4e-6 if they are independent. `LOGITS_BOUND` lies between.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from firesteel.integrations.transformers import PackedExperts

LOGITS_BOUND = 1e-5
"""Largest difference of two fp32 models' logits, as a part of the largest logit."""
NEW_TOKENS = 8


def prompts(vocab_size: int = 96) -> Tensor:
    """Two prompts of 13 tokens, longer than any sliding window or index top-k of the tests."""
    return torch.randint(vocab_size, (2, 13), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run(model: Any, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of all positions, then tokens and logits of a greedy continuation with a cache."""
    logits = model(ids, use_cache=False).logits
    # Every continuation has its eight tokens.
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return logits.float(), out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1).float()


def assert_same(model: Any, oracle: Any, ids: Tensor | None = None) -> None:
    """Two fp32 models give the same logits, within `LOGITS_BOUND`, and the same tokens."""
    has_own = ids is not None
    ids = prompts(model.config.vocab_size) if ids is None else ids
    logits, tokens, steps = run(model, ids)
    wanted, wanted_tokens, wanted_steps = run(oracle, ids)
    assert tokens.shape == (ids.shape[0], NEW_TOKENS)
    assert tokens.tolist() == wanted_tokens.tolist()
    # Tokens that never change would hide a wrong cache.
    assert has_own or len(set(tokens.flatten().tolist())) > NEW_TOKENS // 2
    for got, want in ((logits, wanted), (steps, wanted_steps)):
        assert torch.isfinite(want).all()
        assert want.abs().max() > 1
        assert (got - want).abs().max() <= LOGITS_BOUND * want.abs().max()


def packed_experts(model: nn.Module) -> dict[str, PackedExperts]:
    """The packed experts of a model, by path."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, PackedExperts)
    }


def num_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers, a tied one once."""
    own = (*module.parameters(), *module.buffers())
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in own if tensor.numel()}.values())


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """The same names, and under each the same shape, dtype and bytes."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        other = second[name]
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), name
        assert torch.equal(_bytes(tensor), _bytes(other)), name


def assert_saved(path: Path, wanted: dict[str, Tensor], dtype: torch.dtype) -> None:
    """The files hold `wanted`, bit for bit.

    The host keeps its own weights in `dtype`, the model's, and 5.24 routers in fp32; it saves them
    so, with or without firesteel.
    """
    saved = files_of(path)
    own = {}
    for name, tensor in wanted.items():
        is_host_s = name.endswith("weight") and ".experts." not in name
        is_router = name.endswith(".gate.weight")
        wide = torch.float32 if is_router and saved[name].dtype == torch.float32 else dtype
        own[name] = tensor.to(wide) if is_host_s and tensor.is_floating_point() else tensor
    assert_same_bits(saved, own)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named}


def files_of(path: Path) -> dict[str, Tensor]:
    """Every tensor in the safetensors files of a folder."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.iterdir())
        if file.is_file()
    }


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
