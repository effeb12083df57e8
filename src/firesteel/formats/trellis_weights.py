"""A stack of EXL3 matrices in memory, each of a rate of its own.

name    shape         dtype  holds
words   [words]       int32  the matrices, one after the other
suh     [E, P, k128]  int16  bits of the fp16 scales of inputs; k padded to a multiple of 128
svh     [E, P, n128]  int16  the same of outputs

E is the number of matrices of the stack, P that of parts, as in `packed`.

Matrices of a whole number of bits a weight have their words in the order in which kernels read
them. A tile has 8 groups of `bits` words, group g for rows g and g + 8 of its rows of W. Blocks of
128 rows (n) and 128 columns (k) follow each other, those of one block of rows first; in a block is
word 0 of all groups, then word 1, and so on: `[n/128, k/128, bits, 2, 8, 8, 4]`, of which the last
four are the half of the columns, the tile along n, its group, and the tile along k. Words
themselves are as stored. Other matrices are tiles as stored: no kernel reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from firesteel.formats.base import Matrix
from firesteel.formats.packed import WeightStack
from firesteel.formats.trellis import TrellisCode, decode_tiles, hadamard128
from firesteel.formats.trellis_matrix import TrellisMatrix, TrellisScheme, padded

__all__ = ["MATRIX_UNIT", "TrellisWeights", "tiles_of_words", "words_of_tiles"]


MATRIX_UNIT = 2048
"""Bytes of which the size of every matrix of whole bits is a multiple: 128 x 128 of one bit."""


def words_of_tiles(trellis: Tensor, code: TrellisCode) -> Tensor:
    """Tiles as stored, int16 `[k/16, n/16, 16 * bits]`, as words int32 in the order of a stack."""
    words = trellis.contiguous().view(torch.int32)
    if not _is_whole(code):
        return words
    rows, columns = words.shape[0] // 8, words.shape[1] // 8
    groups = words.view(rows, 2, 4, columns, 8, 8, int(code.bits))
    return groups.permute(3, 0, 6, 1, 4, 5, 2).contiguous()


def tiles_of_words(words: Tensor, scheme: TrellisScheme) -> Tensor:
    """The inverse of `words_of_tiles`, in memory of its own."""
    if not _is_whole(scheme.code):
        return words.clone().view(torch.int16).view(scheme.tiles)
    rows, columns = scheme.tiles[0] // 8, scheme.tiles[1] // 8
    groups = words.view(columns, rows, int(scheme.code.bits), 2, 8, 8, 4)
    tiles = groups.permute(1, 3, 6, 0, 4, 5, 2).contiguous()
    return tiles.view(torch.int16).view(scheme.tiles)


def _is_whole(code: TrellisCode) -> bool:
    return code.bits == int(code.bits)


class TrellisWeights(WeightStack):
    """A stack of EXL3 matrices; buffers as in the module's text.

    Args:
        schemes: of each part of each matrix, parts of a matrix together; of one shape.
        num_matrices: E.
        num_parts: P.
    """

    words: Tensor
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
        self.register_buffer("words", torch.empty(self._starts[-1] // 2, dtype=torch.int32))
        for name, size in (("suh", self.scheme.k), ("svh", self.scheme.n)):
            self.register_buffer(name, torch.empty(*scales, padded(size), dtype=torch.int16))

    def scheme_of(self, index: int, part: int) -> TrellisScheme:
        """How one matrix is stored."""
        return self.schemes[index * self.num_parts + part]

    @torch.no_grad()
    def write(self, index: int, part: int, matrix: Matrix) -> None:
        """Put one matrix into its place. The rest of the stack is not touched."""
        assert isinstance(matrix, TrellisMatrix)
        scheme = self.scheme_of(index, part)
        trellis = matrix.trellis.to(self.words.device)
        self._words(index, part).copy_(words_of_tiles(trellis, scheme.code).view(-1))
        self.suh[index, part] = matrix.suh.view(torch.int16).to(self.suh.device)
        self.svh[index, part] = matrix.svh.view(torch.int16).to(self.svh.device)

    @torch.no_grad()
    def read(self, index: int, part: int) -> TrellisMatrix:
        """The numbers of one matrix, exactly as `write` was given them."""
        return TrellisMatrix(
            trellis=self._tiles(index, part),
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

    @property
    def matrices(self) -> Tensor:
        """Where each matrix begins in `words`, in units of 2048 bytes, and its bits a weight.

        int32 `[E, P, 2]` on the device of `words`; of matrices of whole bits only.
        """
        rows = [
            (start * 2 // MATRIX_UNIT, int(scheme.code.bits))
            for start, scheme in zip(self._starts, self.schemes, strict=False)
        ]
        table = torch.tensor(rows, dtype=torch.int32, device=self.words.device)
        return table.view(self.num_matrices, self.num_parts, 2)

    def _words(self, index: int, part: int) -> Tensor:
        place = index * self.num_parts + part
        return self.words[self._starts[place] // 2 : self._starts[place + 1] // 2]

    def _tiles(self, index: int, part: int) -> Tensor:
        """The tiles of a matrix as stored, in memory of their own."""
        scheme = self.scheme_of(index, part)
        return tiles_of_words(self._words(index, part), scheme)

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        elements = dict.fromkeys(scheme.element for scheme in self.schemes)
        return f"{self.scheme.format} {', '.join(elements)}, {list(self.shape)}"
