"""`MoeSpec`: what changes a quantised MoE layer's weights or results, as a value that plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.launch import NUM_TOKENS, Flags, Launch, Operand, Region
from firesteel.launch.binary import (
    check_wgmma,
    has_gluon,
    supports_dependent_launch,
    supports_wgmma,
)
from firesteel.moe.activation import Activation
from firesteel.moe.tuning import LayerTiles, TileTable, layer_tiles, recipe_name
from firesteel.moe.tuning_file import default_table

__all__ = [
    "GEOMETRIES",
    "ID_DTYPES",
    "LAYER_DTYPES",
    "MAX_EXPERTS",
    "ROW_UNIT",
    "WITH_BIAS",
    "MoeSpec",
    "StoredWeights",
    "check_dtype",
    "check_size",
    "check_weights",
    "geometry",
]

ID_DTYPES = ("i32", "i64")
GROUP_SIZES = (32, 64, 128)
BLOCK_K = 128
ROW_UNIT = 8
"""Elements of 16 bytes: how far apart rows of x and out lie is a multiple of it."""
TILE_ROWS = 64
MAX_EXPERTS = 2048
LAYER_DTYPES = ("bf16", "fp16")
"""Of activations and biases."""
_SCALES = ("bf16", "fp16", "fp32")
FP4_FORMATS = {"mxfp4": (32, "e8m0"), "nvfp4": (16, "e4m3")}
"""Elements of E2M1 codes: columns that share a scale, and the type of the scales."""
NAMED_FORMATS = {**FP4_FORMATS, "nf3": (32, "e5m3")}
"""All elements that say that much. Their scales are bytes."""
BITS = {"int4": 4, "int3": 3, "mxfp4": 4, "nvfp4": 4, "nf3": 3}
"""Of a code, by element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """How a stack of matrices of 3 or 4-bit codes is stored.

    Fields
        element          int4 or int3; mxfp4 or nvfp4, whose codes are E2M1; or nf3
        group_size       columns that share a scale: 32, 64, or a multiple of 128 for integers, 32
                         for mxfp4 and nf3, 16 for nvfp4
        scale            their type: bf16, fp16 or fp32 for integers, e8m0 for mxfp4, e4m3 for
                         nvfp4, e5m3 for nf3
        has_zero_points  stored zero points; else int4's is 8 and int3's 4
        has_bias         a bias a row, in the layer's dtype
        global_scale     what the fp32 scale of each nvfp4 matrix is: multiplier or divisor; else
                         none
    """

    element: str = "int4"
    group_size: int = 128
    scale: str = "bf16"
    has_zero_points: bool = False
    has_bias: bool = False
    global_scale: str = "none"

    @classmethod
    def fp4(
        cls, element: str, *, global_scale: str | None = None, has_bias: bool = False
    ) -> StoredWeights:
        """Stored as mxfp4 or nvfp4 is; `global_scale` of nvfp4 is a divisor by default."""
        if element not in FP4_FORMATS:
            raise InvalidArgumentError(
                f"element: got {element!r}, must be one of {', '.join(FP4_FORMATS)}"
            )
        group_size, scale = FP4_FORMATS[element]
        usual = "divisor" if element == "nvfp4" else "none"
        return cls(
            element=element,
            group_size=group_size,
            scale=scale,
            has_bias=has_bias,
            global_scale=global_scale or usual,
        )

    @classmethod
    def nf3(cls, *, has_bias: bool = False) -> StoredWeights:
        """Stored as nf3 is."""
        group_size, scale = NAMED_FORMATS["nf3"]
        return cls(element="nf3", group_size=group_size, scale=scale, has_bias=has_bias)

    @property
    def operand_scale(self) -> str:
        """The type of the scales as kernels are given them: of named formats they are bytes."""
        return "u8" if self.element in NAMED_FORMATS else self.scale

    @property
    def bytes_per_weight(self) -> float:
        """Of codes, scales and zero points in memory, padding left out."""
        scale = {"bf16": 2, "fp16": 2, "fp32": 4}.get(self.scale, 1)
        return BITS[self.element] / 8 + (scale + self.has_zero_points) / self.group_size

    def matrix_bytes(self, n: int, k: int) -> float:
        """Of a matrix `[n, k]` in memory, padding, bias and the scale of all of it left out."""
        return n * k * self.bytes_per_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A W4A16 MoE layer: route, FC1 with its activation, FC2, weighted sum.

    Fields
        hidden_size, intermediate_size  K and N; N of one rank where a layer is sharded
        num_experts        E, the experts held here
        top_k              experts a token
        dtype              of x, out and biases: bf16 or fp16
        w13, w2            how the two stacks are stored
        activation         between FC1 and FC2
        num_global_experts length of `expert_map`, which gives each global id its place here or -1;
                           None where ids name the experts held here
        weight_on_input    the router weight multiplies FC1's product, not FC2's
        batch_invariant    a row has the same bits at every token count
        pdl                launches may start before the one before has ended; needs sm_90 or later
        wgmma              kernels may be those that only sm_90 runs; needs Triton 3.6 or later
        table              tiles by measurement; changes speed, and results by rounding: in the last
                           bits, and more where other than FP4 takes tiles "wgmma" of over 16 routes
                           (`firesteel.moe.tuning`)
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    dtype: str = "bf16"
    w13: StoredWeights = field(default_factory=StoredWeights)
    w2: StoredWeights = field(default_factory=StoredWeights)
    activation: Activation = field(default_factory=Activation)
    num_global_experts: int | None = None
    weight_on_input: bool = False
    batch_invariant: bool = False
    pdl: bool = True
    wgmma: bool = field(default_factory=has_gluon)
    table: TileTable = field(default_factory=default_table)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
            check_size(name, getattr(self, name))
        if self.num_global_experts is not None:
            check_size("num_global_experts", self.num_global_experts)
        ids = self.num_global_experts or self.num_experts
        if self.top_k > ids:
            raise InvalidArgumentError(f"top_k: got {self.top_k}, must be at most {ids} experts")
        if self.num_experts > MAX_EXPERTS:
            raise UnsupportedError(
                f"num_experts: got {self.num_experts}, must be at most {MAX_EXPERTS}: a program "
                "counts all of them"
            )
        table: Any = self.table
        if not isinstance(table, TileTable):
            raise InvalidArgumentError(
                f"table: got {table!r}, must be a TileTable: `find_table` gives one by name or file"
            )
        check_wgmma(self.wgmma)
        check_dtype(self.dtype)
        if self.hidden_size % ROW_UNIT:
            raise UnsupportedError(
                f"hidden_size: got {self.hidden_size}, must be a multiple of 8: rows of x and out "
                "start at multiples of 16 bytes"
            )
        check_weights("w13", self.w13, self.hidden_size)
        check_weights("w2", self.w2, self.intermediate_size)

    @property
    def title(self) -> str:
        """One line for tables and logs."""
        kinds = dict.fromkeys(_kind(stored, self.dtype) for stored in (self.w13, self.w2))
        held = "" if self.num_global_experts is None else f" of {self.num_global_experts}"
        words = [
            f"MoE {'/'.join(kinds)} K={self.hidden_size} N={self.intermediate_size} "
            f"E={self.num_experts}{held} top_k={self.top_k} {self.dtype} {self.activation.title}"
        ]
        words += [name for name in ("weight_on_input", "batch_invariant") if getattr(self, name)]
        if not self.pdl:
            words.append("no pdl")
        if not self.wgmma:
            words.append("no wgmma")
        if self.table != default_table():
            words.append(f"tiles of {self.table.name}")
        return " ".join(words)

    @property
    def num_parts(self) -> int:
        """Matrices that FC1 stacks: 2 (gate, up), or 1 for an activation without a gate."""
        return 2 if self.activation.is_gated else 1

    @property
    def tiles(self) -> LayerTiles:
        """What its table has for it.

        Raises
            UnsupportedError: the table has rows of no recipe that would serve.
        """
        stored = self.w13
        sizes = (self.hidden_size, self.intermediate_size)
        recipe = recipe_name(stored.element, stored.group_size, stored.has_zero_points)
        return layer_tiles(self.table, *sizes, recipe)

    def shard(self, tensor_parallel: int) -> MoeSpec:
        """The layer of one rank of so many, whose outputs are summed.

        Each rank's FC2 adds its `w2.bias`, so that the sum would hold it once a rank: bind the bias
        on one rank and zeros on the others. All ranks then share one plan.

        Raises
            InvalidArgumentError: the intermediate size, or a scale group of it, cannot be split so.
        """
        n = self.intermediate_size
        check_size("tensor_parallel", tensor_parallel)
        if n % tensor_parallel:
            raise InvalidArgumentError(
                f"tensor_parallel: got {tensor_parallel}, must divide intermediate_size {n}"
            )
        group_size = n // tensor_parallel if self.w2.group_size == n else self.w2.group_size
        if (n // tensor_parallel) % group_size:
            raise InvalidArgumentError(
                f"tensor_parallel: got {tensor_parallel}, a rank's {n // tensor_parallel} columns "
                f"must be whole scale groups of {group_size}"
            )
        return replace(
            self,
            intermediate_size=n // tensor_parallel,
            w2=replace(self.w2, group_size=group_size),
        )

    def planned_tokens(self, max_tokens: int) -> int:
        """Tokens that a plan should hold: as many as are asked for."""
        return max_tokens

    def for_target(self, target: str) -> MoeSpec:
        """The same layer with what kernels for a target ("sm_90") may use."""
        return replace(self, pdl=supports_dependent_launch(target), wgmma=supports_wgmma(target))

    def flags(self) -> Mapping[str, tuple[str, ...]]:
        """Callers choose the type of the ids: int32 or int64, read as they are."""
        return {"ids": ID_DTYPES}

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        """The layer's tensors, then those of a call: x, topk_ids, topk_weights, out."""
        k, n = self.hidden_size, self.intermediate_size
        found = [
            *self._weights("w13", self.w13, self.num_parts, n, k),
            *self._weights("w2", self.w2, 1, k, n),
        ]
        if self.num_global_experts is not None:
            shape = (self.num_global_experts,)
            found.append(Operand("expert_map", "i32", shape, is_aligned=False))
        ids = dict(flags)["ids"]
        routes = (NUM_TOKENS, self.top_k)
        return (
            *found,
            Operand("x", self.dtype, (NUM_TOKENS, k), has_stride=True, row_unit=ROW_UNIT),
            Operand("topk_ids", ids, routes, is_aligned=False),
            Operand("topk_weights", "fp32", routes, is_aligned=False),
            Operand(
                "out",
                self.dtype,
                (NUM_TOKENS, k),
                has_stride=True,
                is_written=True,
                row_unit=ROW_UNIT,
            ),
        )

    def _weights(
        self, name: str, stored: StoredWeights, parts: int, n: int, k: int
    ) -> list[Operand]:
        """A stack of `parts` matrices `[n, k]` an expert, as `firesteel.formats.packed` has it."""
        e, rows, groups = self.num_experts, parts * n, k // stored.group_size
        num_tiles, num_blocks = -(-n // TILE_ROWS), -(-k // BLOCK_K)
        # Words of four codes, of a row of a tile; of 3 bits there are three runs of such rows.
        words = (3, TILE_ROWS, 8) if BITS[stored.element] == 3 else (TILE_ROWS, 32)
        found = [
            Operand(f"{name}.codes", "i16", (e, parts, num_tiles, num_blocks, *words)),
            Operand(f"{name}.scales", stored.operand_scale, (e, groups, rows)),
        ]
        if stored.global_scale != "none":
            found.append(Operand(f"{name}.global_scale", "fp32", (e, parts)))
        if stored.has_zero_points:
            found.append(Operand(f"{name}.zero_points", "u8", (e, groups, rows)))
        if stored.has_bias:
            found.append(Operand(f"{name}.bias", self.dtype, (e, rows)))
        return found

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        """Routing tables, FC1's output and FC2's."""
        from firesteel.moe.plan import workspace

        return workspace(self, num_tokens)

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        """The launches of a call; see `firesteel.moe.plan`."""
        from firesteel.moe.plan import select

        return select(self, num_tokens, flags)

    def as_dict(self) -> dict[str, Any]:
        """Every field, for JSON; of the table its name and digest."""
        found: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("w13", "w2", "activation"):
            found[name] = asdict(found[name])
        return {**found, "table": {"name": self.table.name, "digest": self.table.digest}}


def _kind(stored: StoredWeights, dtype: str) -> str:
    """`int4-g128-asym-fp32-bias`; the type of scales only where it is not the layer's.

    Of others `mxfp4`, `nvfp4-divisor` or `nf3`, which give the group and the type of scales.
    """
    if stored.element in NAMED_FORMATS:
        words = [stored.element]
        words += [stored.global_scale] * (stored.global_scale != "none")
    else:
        words = [f"{stored.element}-g{stored.group_size}"]
        words += ["asym"] * stored.has_zero_points
        words += [stored.scale] * (stored.scale != dtype)
    words += ["bias"] * stored.has_bias
    return "-".join(words)


def check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise InvalidArgumentError(f"{name}: got {value!r}, must be a positive integer")


def check_dtype(dtype: str) -> None:
    """Refuse a type that no layer's activations have.

    Raises
        UnsupportedError: it is one.
    """
    if dtype not in LAYER_DTYPES:
        raise UnsupportedError(f"dtype: got {dtype!r}, must be one of {', '.join(LAYER_DTYPES)}")


def check_weights(name: str, stored: StoredWeights, k: int) -> None:
    """The element, group, scales and zero points of a matrix of k columns go together.

    Raises
        UnsupportedError: they do not, or no kernel reads them.
    """
    element = stored.element
    if element not in BITS:
        raise UnsupportedError(f"{name}.element: got {element!r}, must be one of {', '.join(BITS)}")
    allowed = ("multiplier", "divisor") if element == "nvfp4" else ("none",)
    if stored.global_scale not in allowed:
        words = " or ".join(map(repr, allowed))
        raise UnsupportedError(
            f"{name}.global_scale: got {stored.global_scale!r}, must be {words} of {element}"
        )
    if element in NAMED_FORMATS:
        _check_named(name, stored, k)
    else:
        _check_integers(name, stored, k)


def _check_named(name: str, stored: StoredWeights, k: int) -> None:
    group_size, scale = NAMED_FORMATS[stored.element]
    if stored.group_size != group_size or k % group_size:
        raise UnsupportedError(
            f"{name}.group_size: got {stored.group_size} for {k} columns, must be {group_size} of "
            f"{stored.element}, and divide them"
        )
    if stored.scale != scale:
        raise UnsupportedError(
            f"{name}.scale: got {stored.scale!r}, must be {scale} of {stored.element}"
        )
    if stored.has_zero_points:
        raise UnsupportedError(
            f"{name}.has_zero_points: got True, must be False of {stored.element}"
        )


def _check_integers(name: str, stored: StoredWeights, k: int) -> None:
    group_size = stored.group_size
    fits = group_size in GROUP_SIZES or group_size == k or group_size % BLOCK_K == 0
    if group_size <= 0 or not fits or k % group_size:
        fitting = [size for size in GROUP_SIZES if k % size == 0]
        raise UnsupportedError(
            f"{name}.group_size: got {group_size} for {k} columns, must divide them and be 32, 64, "
            f"128, a multiple of 128 or all of them; of the first three {fitting} divide"
        )
    if stored.scale not in _SCALES:
        raise UnsupportedError(
            f"{name}.scale: got {stored.scale!r}, must be one of {', '.join(_SCALES)}"
        )


GEOMETRIES: dict[str, dict[str, Any]] = {
    "glm-5.2": {"hidden_size": 6144, "intermediate_size": 2048, "num_experts": 256, "top_k": 8},
    "deepseek-v3": {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 256, "top_k": 8},
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 768,
        "num_experts": 128,
        "top_k": 8,
    },
    "gpt-oss-120b": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_experts": 128,
        "top_k": 4,
        "activation": Activation(name="swigluoai"),
    },
    "mixtral-8x7b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_experts": 8,
        "top_k": 2,
    },
}
"""Fields of `MoeSpec` by model, from each model's config.json."""

WITH_BIAS = ("gpt-oss-120b",)


@lru_cache(maxsize=64)
def geometry(
    name: str,
    *,
    tensor_parallel: int = 1,
    element: str = "int4",
    group_size: int = 128,
    has_zero_points: bool = False,
) -> MoeSpec:
    """The layer of a model by name: integers with bf16 scales, or mxfp4, nvfp4 or nf3 as they are.

    Args:
        group_size, has_zero_points: of integers; the others have their own.

    Raises
        InvalidArgumentError: no such model, or it cannot be split so.
        UnsupportedError: the group size does not divide the model's sizes.
    """
    if name not in GEOMETRIES:
        raise InvalidArgumentError(f"model: got {name!r}, must be one of {', '.join(GEOMETRIES)}")
    has_bias = name in WITH_BIAS
    if element == "nf3":
        stored = StoredWeights.nf3(has_bias=has_bias)
    elif element in FP4_FORMATS:
        stored = StoredWeights.fp4(element, has_bias=has_bias)
    else:
        stored = StoredWeights(
            element=element,
            group_size=group_size,
            has_zero_points=has_zero_points,
            has_bias=has_bias,
        )
    return MoeSpec(**GEOMETRIES[name], w13=stored, w2=stored).shard(tensor_parallel)
