"""Scores of the host's indexers in float64, and how far rounding to e4m3 may move them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm


def parts_of(module: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q `[B, S, H, D]`, keys `[B, S, D]` and weights `[B, S, H]` of a call, in fp32."""
    x = given["hidden_states"]
    size = module.qk_rope_head_dim
    q = module.wq_b(given["q_resid"]).unflatten(-1, (module.n_heads, module.head_dim))
    k = module.k_norm(module.wk(x)).unsqueeze(2)
    is_glm = isinstance(module, glm.GlmMoeDsaIndexer)
    rope = glm.apply_rotary_pos_emb_interleave if is_glm else deepseek.apply_rotary_pos_emb
    q_turned, k_turned = rope(
        q[..., :size], k[..., :size], *given["position_embeddings"], unsqueeze_dim=2
    )
    q = torch.cat([q_turned, q[..., size:]], dim=-1)
    k = torch.cat([k_turned, k[..., size:]], dim=-1).squeeze(2)
    w = (
        module.weights_proj(x.to(module.weights_proj.weight.dtype)).float()
        * (module.n_heads * module.head_dim) ** -0.5
    )
    return q.float(), k.float(), w


def scores_of(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """float64 `[B, S, T]`; -inf after the row's own key."""
    dots = torch.einsum("bshd,btd->bsht", q.double(), k.double()).relu()
    scores = torch.einsum("bsh,bsht->bst", w.double(), dots)
    later = torch.ones(scores.shape[1:], device=scores.device).triu(1).bool()
    return scores.masked_fill(later, -torch.inf)


def e4m3_bound(x: Tensor) -> Tensor:
    """How far a number may be from its e4m3 one: half a step of 2^-3, or of 2^-9 of the scale."""
    scale = x.double().abs().amax(dim=-1, keepdim=True) / 448
    return torch.maximum(x.double().abs() * 2.0**-4, scale * 2.0**-10) * 1.001


def score_bound(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """float64 `[B, S, T]`: how far the score of rounded q and k may lie from that of q and k."""
    off_q, off_k = e4m3_bound(q), e4m3_bound(k)
    q, k = q.double().abs(), k.double().abs()
    off = torch.einsum("bshd,btd->bsht", q, off_k)
    off += torch.einsum("bshd,btd->bsht", off_q, k + off_k)
    return torch.einsum("bsh,bsht->bst", w.double().abs(), off) + 1e-6
