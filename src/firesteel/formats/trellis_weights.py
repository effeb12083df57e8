"""A stack of EXL3 matrices in memory, each of a rate of its own.

name    shape         dtype  holds
tiles   [words]       int16  tiles of the matrices, one after the other, as stored
suh     [E, P, k128]  int16  bits of the fp16 scales of inputs; k padded to a multiple of 128
svh     [E, P, n128]  int16  the same of outputs

E is the number of matrices of the stack, P that of parts, as in `packed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from firesteel.formats.base import Matrix
from firesteel.formats.packed import WeightStack
from firesteel.formats.trellis import decode_tiles, hadamard128
from firesteel.formats.trellis_matrix import TrellisMatrix, TrellisScheme, padded

__all__ = ["TrellisWeights"]


class TrellisWeights(WeightStack):
    """A stack of EXL3 matrices; buffers as in the module's text.

    Args:
        schemes: of each part of each matrix, parts of a matrix together; of one shape.
        num_matrices: E.
        num_parts: P.
    """

    tiles: Tensor
    suh: Tensor
    svh: Tensor

    def __init__(
        self, schemes: Sequence[TrellisScheme], num_matrices: int, num_parts: int = 1
    ) -> None:
        assert len(schemes) == num_matrices * num_parts
        super().__init__(schemes[0], num_matrices, num_parts)
        self.schemes = tuple(schemes)
        sizes = [torch.Size(scheme.tiles).numel() for scheme in schemes]
        self._starts = (0, *accumulate(sizes))
        scales = (num_matrices, num_parts)
        self.register_buffer("tiles", torch.empty(self._starts[-1], dtype=torch.int16))
        for name, size in (("suh", self.scheme.k), ("svh", self.scheme.n)):
            self.register_buffer(name, torch.empty(*scales, padded(size), dtype=torch.int16))

    def scheme_of(self, index: int, part: int) -> TrellisScheme:
        """How one matrix is stored."""
        return self.schemes[index * self.num_parts + part]

    @torch.no_grad()
    def write(self, index: int, part: int, matrix: Matrix) -> None:
        """Put one matrix into its place. The rest of the stack is not touched."""
        assert isinstance(matrix, TrellisMatrix)
        self._tiles(index, part).copy_(matrix.trellis)
        self.suh[index, part] = matrix.suh.view(torch.int16).to(self.suh.device)
        self.svh[index, part] = matrix.svh.view(torch.int16).to(self.svh.device)

    @torch.no_grad()
    def read(self, index: int, part: int) -> TrellisMatrix:
        """The numbers of one matrix, exactly as `write` was given them."""
        return TrellisMatrix(
            trellis=self._tiles(index, part).clone(),
            suh=self.suh[index, part].clone().view(torch.float16),
            svh=self.svh[index, part].clone().view(torch.float16),
        )

    def linear(self, index: int, x: Tensor) -> Tensor:
        """`x @ W.T` with matrix `index`: `[M, P*n]` from `[M, k]`, in x's dtype.

        x is scaled and turned, not the weights: y = H(H(x * suh) What) * svh. Sums are fp32, or
        float64 of float64, and rounded once. The numbers of a part live for this call only.
        """
        wide = x if x.dtype == torch.float64 else x.float()
        missing = padded(self.scheme.k) - self.scheme.k
        if missing:
            wide = functional.pad(wide, (0, missing))
        parts = [self._product(index, part, wide) for part in range(self.num_parts)]
        return torch.cat(parts, dim=-1).to(x.dtype)

    def _product(self, index: int, part: int, x: Tensor) -> Tensor:
        suh = self.suh[index, part].view(torch.float16)
        svh = self.svh[index, part].view(torch.float16)
        code = self.scheme_of(index, part).code
        numbers = decode_tiles(self._tiles(index, part), code).to(x.dtype)
        y = hadamard128(hadamard128(x * suh) @ numbers) * svh
        return y[:, : self.scheme.n]

    def _tiles(self, index: int, part: int) -> Tensor:
        place = index * self.num_parts + part
        tiles = self.tiles[self._starts[place] : self._starts[place + 1]]
        return tiles.view(self.schemes[place].tiles)

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        elements = dict.fromkeys(scheme.element for scheme in self.schemes)
        return f"{self.scheme.format} {', '.join(elements)}, {list(self.shape)}"
