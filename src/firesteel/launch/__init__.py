"""Plan, prewarm, bind, run: launches of Triton kernels with nothing left to chance.

    made = plan(spec, max_tokens)         every launch of every token count; needs no GPU
    ready = prewarm(made)                 compiles and loads exactly those
    bound = ready.bind(weights, arena)    checks, takes addresses
    bound.run(x, out)                     looks up, patches, launches

A `Spec` says what an operation launches; `Kernel` wraps a `triton.jit` function.
"""

from firesteel.launch.audit import Replay, replay
from firesteel.launch.bound import Bound
from firesteel.launch.building import build
from firesteel.launch.kernel import Kernel, Launch, Stride
from firesteel.launch.key import LaunchKey
from firesteel.launch.ready import Ready, prewarm
from firesteel.launch.spec import ANY_SIZE, NUM_TOKENS, Flags, Operand, Region, Spec
from firesteel.launch.table import Plan, plan
from firesteel.launch.workspace import Arena

__all__ = [
    "ANY_SIZE",
    "NUM_TOKENS",
    "Arena",
    "Bound",
    "Flags",
    "Kernel",
    "Launch",
    "LaunchKey",
    "Operand",
    "Plan",
    "Ready",
    "Region",
    "Replay",
    "Spec",
    "Stride",
    "build",
    "plan",
    "prewarm",
    "replay",
]
