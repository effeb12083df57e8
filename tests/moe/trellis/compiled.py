"""Which keys of EXL3 layers and linears are compiled within the budget."""

from __future__ import annotations

from dataclasses import replace

from firesteel.formats.trellis import TrellisCode
from firesteel.launch import Kernel, Launch, LaunchKey
from firesteel.moe.trellis.launches import STREAM, TRELLIS_KERNELS, WGMMA
from firesteel.moe.trellis.linear import TrellisLinearSpec
from firesteel.moe.trellis.spec import StoredTrellis, TrellisMoeSpec, trellis_geometry

__all__ = ["GLM", "PRODUCTS", "trellis_keys"]

GLM = trellis_geometry("glm-5.2", TrellisCode(3.0, "mcg"), tensor_parallel=4)
_GPT = trellis_geometry("gpt-oss-120b", TrellisCode(4.0, "3inst"))
_MIXED = StoredTrellis(rates=(2, 3, 4))
_MUL1 = StoredTrellis(codebook="mul1")

PRODUCTS = {STREAM.name, WGMMA.name}
"""Kernels whose instructions a weight are counted."""

# Token counts that take each tile and some of the splits, and the layer that takes them.
_WHOLE: dict[str, tuple[TrellisMoeSpec, tuple[int, ...]]] = {
    "glm-5.2": (GLM, (1, 32, 128, 256, 512, 1024, 8192)),
    # With all else that changes code: biases, fp16, a map, an activation that has constants.
    "gpt-oss-120b": (replace(_GPT, dtype="fp16", num_global_experts=256), (1,)),
}
# Of code for several rates at once, and of another codebook, FC1 alone.
_FIRST = {
    "glm-5.2 2,3,4": (replace(GLM, w13=_MIXED), (32, 8192)),
    "glm-5.2 mul1": (replace(GLM, w13=_MUL1), (32, 1024)),
}
_LINEAR = TrellisLinearSpec(in_features=6144, out_features=2048)


def trellis_keys(target: str) -> dict[str, tuple[Kernel, LaunchKey]]:
    """What is compiled for a target, by its name in the budget; no key twice."""
    calls: list[tuple[str, tuple[Launch, ...]]] = []
    for layers, kernels in ((_WHOLE, TRELLIS_KERNELS), (_FIRST, (STREAM, WGMMA))):
        for name, (spec, counts) in layers.items():
            for count in counts:
                launches = spec.for_target(target).select(count, (("ids", "i64"),))
                chosen = [launch for launch in launches if launch.kernel in kernels]
                chosen = chosen[:1] if layers is _FIRST else chosen
                calls.append((f"exl3 {name} M={count}", tuple(chosen)))
    for count in (8, 300):
        calls.append((f"exl3 linear M={count}", _LINEAR.for_target(target).select(count, ())))
    found: dict[str, tuple[Kernel, LaunchKey]] = {}
    known: set[LaunchKey] = set()
    for title, launches in calls:
        for number, launch in enumerate(launches):
            if launch.key not in known:
                found[f"{title} {number} {launch.key.name}"] = (launch.kernel, launch.key)
                known.add(launch.key)
    return found
