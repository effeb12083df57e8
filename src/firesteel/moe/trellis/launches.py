"""The launches that EXL3 layers and linears are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from firesteel.launch.kernel import Argument, Kernel, Launch, Stride
from firesteel.launch.key import Constexpr
from firesteel.moe.activation import Activation
from firesteel.moe.products import TABLES
from firesteel.moe.trellis.act import act_kernel
from firesteel.moe.trellis.finish import finish_kernel
from firesteel.moe.trellis.product import trellis_stream_kernel
from firesteel.moe.trellis.product_wgmma import trellis_wgmma_kernel
from firesteel.moe.trellis.rotate import rotate_kernel
from firesteel.moe.trellis.spec import StoredTrellis
from firesteel.moe.trellis.tiles import Cut

__all__ = ["TRELLIS_KERNELS", "Experts", "Matrices", "act", "finish", "product", "rotate"]

ROTATE = Kernel(rotate_kernel)
STREAM = Kernel(trellis_stream_kernel)
WGMMA = Kernel(trellis_wgmma_kernel, target="sm_90")
ACT = Kernel(act_kernel)
FINISH = Kernel(finish_kernel)
TRELLIS_KERNELS = (ROTATE, STREAM, WGMMA, ACT, FINISH)

# Parameters that the kernel of large tiles has not.
_STREAM_ONLY = frozenset(
    ("topk_ids_ptr", "expert_map_ptr", "partials_ptr", "E", "NUM_GLOBAL", "SPLIT_K")
)

ROTATE_WARPS = 1
ACT_WARPS = 1

T = TypeVar("T")
Types = dict[str, str | None]
Arguments = dict[str, Argument]


class Experts(NamedTuple):
    """Who a row's matrix is asked of.

    Fields
        ids         type of the ids: "i32" or "i64"; None where every row has matrix 0
        num         E, the matrices held here
        num_global  length of the map of experts; None without one
        top_k       rows of a token
    """

    ids: str | None
    num: int = 1
    num_global: int | None = None
    top_k: int = 1

    @property
    def types(self) -> Types:
        """Of the pointers to ids and map."""
        has_map = self.ids is not None and self.num_global is not None
        return {
            "topk_ids_ptr": None if self.ids is None else f"*{self.ids}",
            "expert_map_ptr": "*i32" if has_map else None,
        }

    @property
    def arguments(self) -> Arguments:
        """Their tensors."""
        found: Arguments = {} if self.ids is None else {"topk_ids_ptr": "topk_ids"}
        if self.types["expert_map_ptr"] is not None:
            found["expert_map_ptr"] = "expert_map"
        return found

    @property
    def constants(self) -> dict[str, Constexpr]:
        """What code that reads ids depends on."""
        if self.ids is None:
            return {"E": None, "NUM_GLOBAL": None}
        return {"E": self.num, "NUM_GLOBAL": self.num_global}


class Matrices(NamedTuple):
    """The matrices of a product: P of `[n, k]` for each expert, padded to multiples of 128."""

    name: str
    stored: StoredTrellis
    parts: int
    n: int
    k: int


def rotate(
    experts: Experts,
    matrices: Matrices,
    *,
    dtype: str,
    size: int,
    rows: int,
    to: str,
    pdl: bool,
) -> Launch:
    """Rotate x of so many columns for each of so many rows of region `to`."""
    types: Types = {
        "x_ptr": f"*{dtype}",
        "suh_ptr": "*fp16",
        **experts.types,
        "rotated_ptr": "*fp16",
        "stride_x": "i64",
        "R": "i64",
    }
    constants: dict[str, Constexpr] = {
        "K": size,
        **experts.constants,
        "TOP_K": experts.top_k,
        "PARTS": matrices.parts,
        "WARPS": ROTATE_WARPS,
        "PDL": pdl,
    }
    arguments: Arguments = {
        "x_ptr": "x",
        "suh_ptr": f"{matrices.name}.suh",
        **experts.arguments,
        "rotated_ptr": to,
        "stride_x": Stride("x"),
        "R": rows,
    }
    key = ROTATE.key(types, constants, num_warps=ROTATE_WARPS, pdl=pdl)
    return ROTATE.launch(key, (rows, -(-size // (1024 * ROTATE_WARPS)), 1), arguments)


def product(
    experts: Experts | None,
    matrices: Matrices,
    cut: Cut,
    *,
    x: str,
    y: str,
    rows: int,
    tiles: int,
    pdl: bool,
) -> Launch:
    """Multiply so many rows of region `x`: tiles of the tables where `experts` is None."""
    stored, is_split = matrices.stored, cut.split_k > 1
    tables: Types = {f"{name}_ptr": "*i32" if experts is None else None for name in TABLES}
    direct = Experts(None) if experts is None else experts
    types: Types = {
        "x_ptr": "*fp16",
        "words_ptr": "*i32",
        "matrices_ptr": "*i32",
        **direct.types,
        **tables,
        "y_ptr": None if is_split else "*fp16",
        "partials_ptr": "*fp32" if is_split else None,
        "R": "i64",
    }
    constants: dict[str, Constexpr] = {
        "K": matrices.k,
        "N": matrices.n,
        **direct.constants,
        "PARTS": matrices.parts,
        "RATES": stored.mask,
        "CODEBOOK": stored.codebook,
        "BLOCK_M": cut.rows,
        "SPAN": cut.span,
        "SPLIT_K": cut.split_k,
        "STAGES": cut.stages,
        "WARPS": cut.warps,
        "PDL": pdl,
    }
    arguments: Arguments = {
        "x_ptr": x,
        "words_ptr": f"{matrices.name}.words",
        "matrices_ptr": f"{matrices.name}.matrices",
        **direct.arguments,
        **({f"{name}_ptr": name for name in TABLES} if experts is None else {}),
        **({"partials_ptr": "partials"} if is_split else {"y_ptr": y}),
        "R": rows,
    }
    kernel = STREAM
    if cut.is_wgmma:
        kernel = WGMMA
        types, constants = _without(types, _STREAM_ONLY), _without(constants, _STREAM_ONLY)
    key = kernel.key(types, constants, num_warps=cut.warps, pdl=pdl)
    grid = (matrices.parts * matrices.n // (128 * cut.span), tiles, cut.split_k)
    return kernel.launch(key, grid, arguments)


def _without(found: Mapping[str, T], names: frozenset[str]) -> dict[str, T]:
    return {name: value for name, value in found.items() if name not in names}


def act(
    experts: Experts,
    activation: Activation,
    *,
    size: int,
    rows: int,
    split_k: int,
    bias: str | None,
    pdl: bool,
) -> Launch:
    """From FC1's products to FC2's rows, of so many columns."""
    is_swiglu = activation.name == "swigluoai"
    types: Types = {
        "products_ptr": "*fp16" if split_k == 1 else None,
        "partials_ptr": "*fp32" if split_k > 1 else None,
        "svh_ptr": "*fp16",
        "bias_ptr": None if bias is None else f"*{bias}",
        "suh_ptr": "*fp16",
        **experts.types,
        "hidden_ptr": "*fp16",
        "R": "i64",
    }
    constants: dict[str, Constexpr] = {
        "N": size,
        **experts.constants,
        "ACTIVATION": activation.name,
        "LIMIT": activation.clamp_limit,
        "ALPHA": activation.alpha if is_swiglu else None,
        "BETA": activation.beta if is_swiglu else None,
        "SPLIT_K": split_k,
        "WARPS": ACT_WARPS,
        "PDL": pdl,
    }
    arguments: Arguments = {
        **({"products_ptr": "products"} if split_k == 1 else {"partials_ptr": "partials"}),
        "svh_ptr": "w13.svh",
        **({} if bias is None else {"bias_ptr": "w13.bias"}),
        "suh_ptr": "w2.suh",
        **experts.arguments,
        "hidden_ptr": "hidden",
        "R": rows,
    }
    key = ACT.key(types, constants, num_warps=ACT_WARPS, pdl=pdl)
    columns = 512 if activation.is_gated else 1024
    return ACT.launch(key, (-(-rows // ACT_WARPS), -(-size // columns), 1), arguments)


def finish(
    experts: Experts,
    matrices: Matrices,
    *,
    dtype: str,
    size: int,
    num_tokens: int,
    products: str,
    split_k: int,
    has_weights: bool,
    pdl: bool,
) -> Launch:
    """From the last products, a region, to out, of so many columns."""
    warps = min(8, 1 << (experts.top_k - 1).bit_length())
    types: Types = {
        "products_ptr": "*fp16" if split_k == 1 else None,
        "partials_ptr": "*fp32" if split_k > 1 else None,
        "svh_ptr": "*fp16",
        "bias_ptr": f"*{dtype}" if matrices.stored.has_bias else None,
        **experts.types,
        "topk_weights_ptr": "*fp32" if has_weights else None,
        "out_ptr": f"*{dtype}",
        "stride_out": "i64",
        "M": "i64",
    }
    constants: dict[str, Constexpr] = {
        "N": size,
        **experts.constants,
        "TOP_K": experts.top_k,
        "SPLIT_K": split_k,
        "WARPS": warps,
        "PDL": pdl,
    }
    arguments: Arguments = {
        **({"products_ptr": products} if split_k == 1 else {"partials_ptr": "partials"}),
        "svh_ptr": f"{matrices.name}.svh",
        **({"bias_ptr": f"{matrices.name}.bias"} if matrices.stored.has_bias else {}),
        **experts.arguments,
        **({"topk_weights_ptr": "topk_weights"} if has_weights else {}),
        "out_ptr": "out",
        "stride_out": Stride("out"),
        "M": num_tokens,
    }
    key = FINISH.key(types, constants, num_warps=warps, pdl=pdl)
    return FINISH.launch(key, (num_tokens, -(-size // 1024), 1), arguments)
