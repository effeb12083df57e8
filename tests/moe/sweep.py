"""A sweep of small layers on a GPU, for tools that watch every access.

    compute-sanitizer --tool memcheck python -m tests.moe.sweep
    compute-sanitizer --tool racecheck python -m tests.moe.sweep mxfp4 exl3-mixed

Each kind of kernel and of tile runs at sizes that do not fit its tiles, with ids that are none, and
every result is compared with the float64 oracle.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from firesteel.device import device_target
from firesteel.launch import plan, prewarm
from firesteel.moe.layer import MoeLayer
from tests.moe.layers import random_layer
from tests.moe.test_layer_gpu import CASES
from tests.moe.trellis import test_layer_gpu as trellis
from tests.moe.trellis.layers import random_trellis_layer

NAMES = (
    *("g128", "g32-asym", "ragged", "biased-swiglu", "expert-map", "no-wgmma"),
    *("mxfp4", "nvfp4", "nf3-ragged", "int3-g32-asym"),
    *("exl3-mixed", "exl3-mul1-biased", "exl3-3inst-ragged", "exl3-expert-map"),
)
SIZES = (1, 3, 40, 200, 700)
EXL3 = "exl3-"
"""What names of EXL3's cases begin with here."""


def main(names: Sequence[str]) -> int:
    """Run as a command, on the layers that are named, or on all."""
    names = names or NAMES
    worst = 0.0
    for name in names:
        if name.startswith(EXL3):
            layer = random_trellis_layer(trellis.CASES[name.removeprefix(EXL3)])
        else:
            layer = random_layer(CASES[name])
        most = layer.spec.for_target(device_target(torch.device("cuda", 0)))
        spec = replace(most, wgmma=most.wgmma and layer.spec.wgmma)
        ready = prewarm(plan(spec, max(SIZES), flags={"ids": ["i64"]}))
        made = MoeLayer(ready, layer.tensors("cuda"), ready.arena())
        dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float16
        generator = torch.Generator().manual_seed(len(name))
        for size in SIZES:
            x = torch.randn(size, spec.hidden_size, generator=generator).to(dtype)
            experts = spec.num_global_experts or spec.num_experts
            ids = torch.rand(size, experts, generator=generator).topk(spec.top_k).indices
            ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
            weights = torch.rand(ids.shape, generator=generator)
            out = torch.full_like(x, torch.nan, device="cuda")
            made.run(x.cuda(), ids.cuda(), weights.cuda(), out)
            expected = layer.reference(x, ids, weights)
            worst = max(worst, float((out.cpu().double() - expected).norm() / expected.norm()))
    sys.stdout.write(
        f"{len(names)} layers at {len(SIZES)} sizes, largest relative error {worst:.4f}\n"
    )
    return int(not worst < 2 * torch.finfo(torch.bfloat16).eps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
