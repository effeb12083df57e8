"""`TrellisMoeSpec`: what changes an EXL3 MoE layer's weights or results, as a value that plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.formats.trellis import BLOCK, TrellisCode
from firesteel.formats.trellis_matrix import padded
from firesteel.launch import ANY_SIZE, NUM_TOKENS, Flags, Launch, Operand, Region
from firesteel.launch.binary import has_gluon, supports_dependent_launch, supports_wgmma
from firesteel.moe.activation import Activation
from firesteel.moe.spec import (
    GEOMETRIES,
    ID_DTYPES,
    MAX_EXPERTS,
    ROW_UNIT,
    WITH_BIAS,
    MoeSpec,
    check_dtype,
    check_size,
)

__all__ = [
    "CODEBOOKS",
    "RATES",
    "LayerSpec",
    "StoredTrellis",
    "TrellisMoeSpec",
    "check_gluon",
    "check_kind",
    "check_matrix",
    "trellis_geometry",
    "trellis_operands",
]

RATES = range(1, 9)
"""Bits a weight that kernels read."""
CODEBOOKS = ("mcg", "3inst", "mul1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrellis:
    """How a stack of EXL3 matrices is stored.

    Fields
        rates     bits a weight that matrices may have, ascending; a kernel has code for each
        codebook  "mcg", "3inst" or "mul1"
        has_bias  a bias a row, in the layer's dtype

    Raises
        UnsupportedError: other rates, or another codebook.
    """

    rates: tuple[int, ...] = (3,)
    codebook: str = "mcg"
    has_bias: bool = False

    def __post_init__(self) -> None:
        if not _are_rates(self.rates):
            raise UnsupportedError(
                f"rates: got {self.rates}, must be some of 1 to 8, whole, each once, ascending, "
                "in a tuple"
            )
        if self.codebook not in CODEBOOKS:
            raise UnsupportedError(
                f"codebook: got {self.codebook!r}, must be one of {', '.join(CODEBOOKS)}"
            )

    @property
    def mask(self) -> int:
        """Bit b is set where matrices may have b bits."""
        return sum(1 << rate for rate in self.rates)

    @property
    def bytes_per_weight(self) -> float:
        """Of the words in memory; the mean of the rates."""
        return sum(self.rates) / len(self.rates) / 8

    def matrix_bytes(self, n: int, k: int) -> float:
        """Of a matrix `[n, k]` in memory, its words, `suh` and `svh`; padding and bias left out."""
        return n * k * self.bytes_per_weight + 2 * (n + k)

    @property
    def title(self) -> str:
        """`exl3-3-mcg`, or `exl3-2,3-mcg-bias`."""
        rates = ",".join(map(str, self.rates))
        return f"exl3-{rates}-{self.codebook}{'-bias' * self.has_bias}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisMoeSpec:
    """An EXL3 MoE layer: route, rotate, FC1, rotate and activate, FC2, rotate and sum.

    Fields are those of `MoeSpec`; `wgmma` says whether large tiles may take the kernel that only
    sm_90 runs. Activations are fp16 between the kernels, whatever `dtype` is.

    Raises
        InvalidArgumentError, UnsupportedError: a field that no kernel takes; or Triton is too old.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    dtype: str = "bf16"
    w13: StoredTrellis = field(default_factory=StoredTrellis)
    w2: StoredTrellis = field(default_factory=StoredTrellis)
    activation: Activation = field(default_factory=Activation)
    num_global_experts: int | None = None
    batch_invariant: bool = False
    pdl: bool = True
    wgmma: bool = True

    def __post_init__(self) -> None:
        check_gluon()
        for name, kind in (
            ("w13", StoredTrellis),
            ("w2", StoredTrellis),
            ("activation", Activation),
        ):
            check_kind(name, getattr(self, name), kind)
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
            check_size(name, getattr(self, name))
        if self.num_global_experts is not None:
            check_size("num_global_experts", self.num_global_experts)
        ids = self.num_global_experts or self.num_experts
        if self.top_k > ids:
            raise InvalidArgumentError(f"top_k: got {self.top_k}, must be at most {ids} experts")
        if self.num_experts > MAX_EXPERTS:
            raise UnsupportedError(
                f"num_experts: got {self.num_experts}, must be at most {MAX_EXPERTS}"
            )
        check_dtype(self.dtype)
        if self.hidden_size % ROW_UNIT:
            raise UnsupportedError(
                f"hidden_size: got {self.hidden_size}, must be a multiple of {ROW_UNIT}"
            )
        check_matrix(self.padded_hidden, self.padded_intermediate)

    @property
    def title(self) -> str:
        """One line for tables and logs."""
        kinds = dict.fromkeys((self.w13.title, self.w2.title))
        held = "" if self.num_global_experts is None else f" of {self.num_global_experts}"
        words = [
            f"MoE {'/'.join(kinds)} K={self.hidden_size} N={self.intermediate_size} "
            f"E={self.num_experts}{held} top_k={self.top_k} {self.dtype} {self.activation.title}"
        ]
        words += ["batch_invariant"] * self.batch_invariant
        words += ["no pdl"] * (not self.pdl) + ["no wgmma"] * (not self.wgmma)
        return " ".join(words)

    @property
    def num_parts(self) -> int:
        """Matrices that FC1 stacks: 2 (gate, up), or 1 for an activation without a gate."""
        return 2 if self.activation.is_gated else 1

    @property
    def padded_hidden(self) -> int:
        """The hidden size, rounded up to whole rotations."""
        return padded(self.hidden_size)

    @property
    def padded_intermediate(self) -> int:
        """The intermediate size, rounded up to whole rotations."""
        return padded(self.intermediate_size)

    def shard(self, tensor_parallel: int) -> TrellisMoeSpec:
        """The layer of one rank of so many, whose outputs are summed; biases as `MoeSpec.shard`.

        Raises
            InvalidArgumentError: the intermediate size cannot be split into whole rotations.
        """
        n = self.intermediate_size
        check_size("tensor_parallel", tensor_parallel)
        if tensor_parallel > 1 and n % (tensor_parallel * BLOCK):
            raise InvalidArgumentError(
                f"tensor_parallel: got {tensor_parallel}, each rank must have whole blocks of "
                f"{BLOCK} of the {n} columns that are rotated together"
            )
        return replace(self, intermediate_size=n // tensor_parallel)

    def planned_tokens(self, max_tokens: int) -> int:
        """Tokens that a plan should hold: as many as are asked for."""
        return max_tokens

    def for_target(self, target: str) -> TrellisMoeSpec:
        """The same layer with what kernels for a target ("sm_90") may use."""
        return replace(self, pdl=supports_dependent_launch(target), wgmma=supports_wgmma(target))

    def flags(self) -> Mapping[str, tuple[str, ...]]:
        """Callers choose the type of the ids: int32 or int64, read as they are."""
        return {"ids": ID_DTYPES}

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        """The layer's tensors, then those of a call: x, topk_ids, topk_weights, out."""
        k, n, e = self.hidden_size, self.intermediate_size, self.num_experts
        found = [
            *trellis_operands("w13", self.w13, self.dtype, (e, self.num_parts, n, k)),
            *trellis_operands("w2", self.w2, self.dtype, (e, 1, k, n)),
        ]
        if self.num_global_experts is not None:
            shape = (self.num_global_experts,)
            found.append(Operand("expert_map", "i32", shape, is_aligned=False))
        ids = dict(flags)["ids"]
        routes = (NUM_TOKENS, self.top_k)
        rows = (NUM_TOKENS, k)
        return (
            *found,
            Operand("x", self.dtype, rows, has_stride=True, row_unit=ROW_UNIT),
            Operand("topk_ids", ids, routes, is_aligned=False),
            Operand("topk_weights", "fp32", routes, is_aligned=False),
            Operand("out", self.dtype, rows, has_stride=True, is_written=True, row_unit=ROW_UNIT),
        )

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        """Routing tables, and what the launches of a call leave to each other."""
        from firesteel.moe.trellis.plan import workspace

        return workspace(self, num_tokens)

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        """The launches of a call; see `firesteel.moe.trellis.plan`."""
        from firesteel.moe.trellis.plan import select

        return select(self, num_tokens, flags)

    def as_dict(self) -> dict[str, Any]:
        """Every field, for JSON."""
        found: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("w13", "w2", "activation"):
            found[name] = asdict(found[name])
        return found


LayerSpec = MoeSpec | TrellisMoeSpec
"""What can be planned of a layer of experts."""


def trellis_geometry(name: str, code: TrellisCode, *, tensor_parallel: int = 1) -> TrellisMoeSpec:
    """The layer of a model by name, all matrices of one code.

    Raises
        InvalidArgumentError: no such model, or it cannot be split so.
        UnsupportedError: no kernel reads the code.
    """
    if name not in GEOMETRIES:
        raise InvalidArgumentError(f"model: got {name!r}, must be one of {', '.join(GEOMETRIES)}")
    if code.bits % 1:
        raise UnsupportedError(f"bits: got {code.bits}, kernels read whole numbers of bits")
    stored = StoredTrellis(
        rates=(int(code.bits),), codebook=code.codebook, has_bias=name in WITH_BIAS
    )
    return TrellisMoeSpec(**GEOMETRIES[name], w13=stored, w2=stored).shard(tensor_parallel)


def check_gluon() -> None:
    """Refuse a Triton that has not what the kernels are written in."""
    if not has_gluon():
        raise UnsupportedError("kernels for EXL3 need Triton 3.6 or later")


def _are_rates(rates: object) -> bool:
    """Whether it is a tuple of some of `RATES`, each once, ascending."""
    if not isinstance(rates, tuple) or not rates:
        return False
    return all(type(rate) is int and rate in RATES for rate in rates) and rates == tuple(
        sorted(set(rates))
    )


def check_kind(name: str, value: object, kind: type) -> None:
    """Refuse what is no value of a class."""
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{name}: got {value!r}, must be of class {kind.__name__}")


def check_matrix(k: int, n: int) -> None:
    """Refuse a matrix in which a kernel's offsets, which are int32 there, would not reach."""
    if k * n // 4 >= 1 << 31:
        raise UnsupportedError(
            f"matrix: got {k} x {n} padded, must have less than 2**33 weights: offsets are int32"
        )


def trellis_operands(
    name: str, stored: StoredTrellis, dtype: str, shape: tuple[int, int, int, int]
) -> list[Operand]:
    """A stack `[E, P, n, k]` as `firesteel.formats.trellis_weights` has it."""
    e, parts, n, k = shape
    found = [
        Operand(f"{name}.words", "i32", (ANY_SIZE,)),
        Operand(f"{name}.matrices", "i32", (e, parts, 2)),
        Operand(f"{name}.suh", "fp16", (e, parts, padded(k))),
        Operand(f"{name}.svh", "fp16", (e, parts, padded(n))),
    ]
    if stored.has_bias:
        found.append(Operand(f"{name}.bias", dtype, (e, parts * n)))
    return found
