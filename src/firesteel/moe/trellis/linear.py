"""`TrellisLinearSpec`: an EXL3 linear as a value that plans: attention, shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from firesteel.errors import UnsupportedError
from firesteel.formats.trellis_matrix import padded
from firesteel.launch import NUM_TOKENS, Flags, Launch, Operand, Region
from firesteel.launch.binary import supports_dependent_launch, supports_wgmma
from firesteel.moe.spec import ROW_UNIT, check_dtype, check_size
from firesteel.moe.trellis.spec import (
    LayerSpec,
    StoredTrellis,
    check_gluon,
    check_kind,
    check_matrix,
    trellis_operands,
)

__all__ = ["PlannedSpec", "TrellisLinearSpec"]

MOST_NUMBERS = 1 << 25
"""Numbers of rows of x and products that the calls of one plan may have between launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisLinearSpec:
    """y = x @ W.T + bias of an EXL3 matrix: rotate, multiply, rotate.

    Fields
        in_features, out_features  of W `[out, in]`
        dtype                      of x, y and bias: bf16 or fp16
        stored                     its rate, codebook, and whether it has a bias
        pdl, wgmma                 as `TrellisMoeSpec`'s

    Raises
        InvalidArgumentError, UnsupportedError: a field that no kernel takes; or Triton is too old.
    """

    in_features: int
    out_features: int
    dtype: str = "bf16"
    stored: StoredTrellis = field(default_factory=StoredTrellis)
    pdl: bool = True
    wgmma: bool = True

    def __post_init__(self) -> None:
        check_gluon()
        check_kind("stored", self.stored, StoredTrellis)
        for name in ("in_features", "out_features"):
            value = getattr(self, name)
            check_size(name, value)
            if value % ROW_UNIT:
                raise UnsupportedError(f"{name}: got {value}, must be a multiple of {ROW_UNIT}")
        check_matrix(padded(self.in_features), padded(self.out_features))
        check_dtype(self.dtype)

    @property
    def title(self) -> str:
        """One line for tables and logs."""
        sizes = f"K={self.in_features} N={self.out_features}"
        words = [f"linear {self.stored.title} {sizes} {self.dtype}"]
        words += ["no pdl"] * (not self.pdl) + ["no wgmma"] * (not self.wgmma)
        return " ".join(words)

    def planned_tokens(self, max_tokens: int) -> int:
        """Rows that a plan should hold: fewer than asked for where they are wide (lm_head).

        A longer call runs in slices. Operand and products of a slice of more than 64 rows take at
        most 64 MiB of the arena, which layers share; sums of a split K come on top.
        """
        width = padded(self.in_features) + padded(self.out_features)
        return min(max_tokens, max(64, MOST_NUMBERS // width))

    def for_target(self, target: str) -> TrellisLinearSpec:
        """The same linear with what kernels for a target ("sm_90") may use."""
        return replace(self, pdl=supports_dependent_launch(target), wgmma=supports_wgmma(target))

    def flags(self) -> Mapping[str, tuple[str, ...]]:
        """Callers vary nothing but the number of rows."""
        return {}

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        """The matrix, then x and out of a call."""
        del flags
        k, n = self.in_features, self.out_features
        return (
            *trellis_operands("w", self.stored, self.dtype, (1, 1, n, k)),
            Operand("x", self.dtype, (NUM_TOKENS, k), has_stride=True, row_unit=ROW_UNIT),
            Operand(
                "out",
                self.dtype,
                (NUM_TOKENS, n),
                has_stride=True,
                is_written=True,
                row_unit=ROW_UNIT,
            ),
        )

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        """Rotated rows of x, products, and sums of spans."""
        from firesteel.moe.trellis.linear_plan import workspace

        return workspace(self, num_tokens)

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        """The launches of a call; see `firesteel.moe.trellis.linear_plan`."""
        del flags
        from firesteel.moe.trellis.linear_plan import select

        return select(self, num_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Every field, for JSON."""
        found: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**found, "stored": asdict(self.stored)}


PlannedSpec = LayerSpec | TrellisLinearSpec
"""What can be planned of a checkpoint."""
