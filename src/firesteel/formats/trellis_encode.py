"""Numbers to the tiles of a trellis: Viterbi's algorithm, many states and some tiles at once.

Words, with the 3 bits of a symbol for an example:

    place    0 to 255, where in the cyclic stream a weight stands
    group    the 13 bits of the state before a place that are still in the state after it: the new
             state is `group << 3 | symbol`, and the next group is the low 13 bits of that

What came before a group does not matter to what comes after it, so of all the ways to a group only
the cheapest is kept. For each place there is the cost of every group, and the way back is found
from those alone: at each place the state is the cheapest of the 8 that end in the group that is
known. The stream is a ring, so it must end in the group in which it began. Which one that is comes
from a search of its neighbourhood alone, with its ends free; then the whole ring is searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from firesteel.errors import InvalidArgumentError
from firesteel.formats.stored import dtype_name
from firesteel.formats.trellis import (
    BLOCK,
    NUM_STATES,
    STATE_BITS,
    TILE,
    TILE_WEIGHTS,
    TrellisCode,
    codebook_values,
    dequantize,
    hadamard128,
    tile_order,
)

__all__ = ["encode_tiles", "quantize_trellis"]

# Places on either side of the seam of the ring that say in which group it begins. At 3 bits an
# error of 0.01777 with 16 of them, 0.01764 with 32, 0.01746 with 64 and 0.01741 with all 128.
_SEAM = 64
# Tiles whose costs of all states are held at a time: they and the codebook stay in the cache.
_TILES_AT_ONCE = 2
# Tiles that are searched together, with a history of 130 MiB at most, so that small steps pay off.
_MAX_TILES = 32
# From here on an inner axis of symbols is long enough for speed.
_MIN_UNPAIRED_BITS = 4
# At more threads than this Python itself is what they wait for.
_MAX_THREADS = 8
# Scales are normal fp16 numbers.
_MIN_SCALE, _MAX_SCALE = 2.0**-14, 65504.0
# By bits: the size of normal noise that is stored with the least error, by that of the codebook.
_RELATIVE_SIZES = {1: 1.15, 2: 0.97, 3: 0.95, 4: 0.9, 5: 0.85, 6: 0.79, 7: 0.74, 8: 0.7}


def encode_tiles(what: Tensor, code: TrellisCode) -> Tensor:
    """The stored tiles whose numbers are next to `what`, in squared error.

    name     shape                     dtype
    what     [k, n]                    floating point, of the size of the codebook's numbers
    returns  [k/16, n/16, 16 * bits]   int16

    The same bits for each tile, whatever the others are and however many threads there are.

    Raises
        InvalidArgumentError: not a matrix of finite floating-point numbers, or k or n that 16 does
            not divide.
    """
    numbers = _checked("what", what)
    for axis, size in enumerate(numbers.shape):
        if size % TILE:
            raise InvalidArgumentError(
                f"what.shape[{axis}]: got {size}, must be a multiple of {TILE}"
            )
    rows, columns = (size // TILE for size in numbers.shape)
    tiles = numbers.view(rows, TILE, columns, TILE).transpose(1, 2)
    order = tile_order(what.device).argsort()
    states = _nearest_states(tiles.reshape(-1, TILE_WEIGHTS)[:, order], code)
    return _pack(states, code).view(rows, columns, code.tile_words)


def quantize_trellis(weight: Tensor, code: TrellisCode) -> tuple[Tensor, Tensor, Tensor]:
    """`weight`, floating point `[n, k]`, as the tensors of a stored layer: trellis, suh, svh.

    name     shape                     dtype
    trellis  [K/16, N/16, 16 * bits]   int16
    suh      [K]                       fp16
    svh      [N]                       fp16

    K and N are k and n, up to the next multiple of 128; what is past k and n stands for zeros.
    Scales bring every row and column to one size, and have signs drawn with a fixed seed so that
    what is rotated looks like normal noise. Those of outputs then take the values that fit best.

    Raises
        InvalidArgumentError: not a matrix of finite floating-point numbers.
    """
    numbers = _checked("weight", weight)
    n, k = numbers.shape
    matrix = pad(numbers.t(), (0, -n % BLOCK, 0, -k % BLOCK))
    suh, svh = _scales(matrix)
    by_row = matrix / suh.float().unsqueeze(1)
    target = hadamard128(hadamard128(by_row / svh.float(), dim=0), dim=1)
    trellis = encode_tiles(target.mul_(_target_size(code)), code)
    # Least squares over rows of one size, so that no loud one decides alone; of zeros it is 0.
    got = dequantize(trellis, code, torch.ones_like(suh), torch.ones_like(svh))
    energy = got.square().sum(0).clamp_min(torch.finfo(torch.float32).tiny)
    fit = (by_row * got).sum(0) / energy
    return trellis, suh, fit.clamp(-_MAX_SCALE, _MAX_SCALE).half()


def _scales(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """fp16 scales of rows and columns, by which those of fp32 `matrix` are divided to have size 1.

    A size is a root mean square.
    """
    exact = matrix.double()
    sizes = exact.square().mean(1).sqrt()
    # Both sides take the square root of the whole size: fp16 on one side may not hold all of it.
    whole = sizes.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    suh = _stored_scales(sizes / whole.sqrt(), seed=0)
    sizes = (exact / suh.double().unsqueeze(1)).square().mean(0).sqrt()
    return suh, _stored_scales(sizes, seed=1)


def _stored_scales(sizes: Tensor, seed: int) -> Tensor:
    """Sizes as fp16 with pseudo-random signs, never 0."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, sizes.shape, generator=generator).mul_(2).sub_(1)
    return (sizes.clamp(_MIN_SCALE, _MAX_SCALE) * signs.to(sizes.device)).half()


def _target_size(code: TrellisCode) -> float:
    """Size (root mean square) of normal noise that the code stores with the least error."""
    low, high = code.symbol_bits
    relative = (_RELATIVE_SIZES[low] + _RELATIVE_SIZES[high]) / 2
    values = codebook_values(code.codebook).double()
    return relative * float(values.square().mean().sqrt())


def _checked(name: str, matrix: Tensor) -> Tensor:
    """`matrix` as contiguous fp32, outside any graph of gradients."""
    if matrix.ndim != 2 or not matrix.is_floating_point() or matrix.numel() == 0:
        raise InvalidArgumentError(
            f"{name}: got {dtype_name(matrix.dtype)} {list(matrix.shape)}, "
            "must be floating point of two dimensions and not empty"
        )
    numbers = matrix.detach().float().contiguous()
    if not bool(numbers.isfinite().all()):
        index = (~numbers.isfinite()).nonzero()[0].tolist()
        raise InvalidArgumentError(
            f"{name}{index}: got {matrix[tuple(index)].item()}, must be finite"
        )
    return numbers


def _pack(states: Tensor, code: TrellisCode) -> Tensor:
    """States `[tiles, 256]` to stored tiles, int16 `[tiles, 16 * bits]`."""
    device = states.device
    ends = code.ends().to(device)
    # Bit i of the stream is the bit of the first symbol that ends past it.
    bit = torch.arange(code.tile_words * 16, device=device)
    place = torch.searchsorted(ends, bit, right=True)
    bits = (states[:, place] >> (ends[place] - 1 - bit)) & 1
    powers = 1 << torch.arange(15, -1, -1, device=device)
    halves = (bits.unflatten(1, (-1, 16)) * powers).sum(2)
    # A 32-bit word is stored low half first and read high half first.
    return halves.unflatten(1, (-1, 2)).flip(2).flatten(1).to(torch.uint16).view(torch.int16)


def _nearest_states(numbers: Tensor, code: TrellisCode) -> Tensor:
    """States int64 `[tiles, 256]` of fp32 `numbers`, both by place; one search a thread."""
    if numbers.device.type != "cpu":
        return _search(numbers, code)
    threads = torch.get_num_threads()
    shares = numbers.chunk(min(threads, _MAX_THREADS, -(-len(numbers) // _TILES_AT_ONCE)))
    # A step is too small for several threads, so each searches for itself. PyTorch's own number of
    # threads is that of the thread that sets it, and of threads that begin thereafter.
    try:
        with ThreadPoolExecutor(
            len(shares), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            found = list(pool.map(lambda share: _search(share, code), shares))
    finally:
        torch.set_num_threads(threads)
    return torch.cat(found)


def _search(numbers: Tensor, code: TrellisCode) -> Tensor:
    """States int64 `[tiles, 256]` of fp32 `numbers [tiles, 256]`."""
    # One bit more a weight makes the history of a tile half as large.
    most = min(_MAX_TILES, 2 << code.symbol_bits[0])
    search = _Search(code, min(most, len(numbers)), numbers.device)
    return torch.cat([search.ring(some) for some in numbers.split(most)])


class _Views(NamedTuple):
    """Views of one memory for every second step of a search, which are at places of one parity.

    name     shape                   what
    values   [65536]                 the codebook, in the order of costs
    costs    [tiles, 65536]          of states
    by_group any                     the same, with axes that `before` fits
    ways     [tiles, ..., tops, .]   the same, with an axis of what the next symbol drives out
    before   any                     of each step, costs of the groups before it
    after    as `ways` without tops  of each step, costs of the groups after it
    least    as `after`              where `after` is in another order: memory to move it from
    """

    values: Tensor
    costs: Tensor
    by_group: Tensor
    ways: Tensor
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]
    least: Tensor | None


class _Search:
    """Searches of up to `max_tiles` tiles at once, in memory that they share.

    Costs are in the order of states and groups, symbol last, where that axis is long enough for
    speed. Below 4 bits it is not, and places go in pairs. The first, an even one, adds symbol `a`:

        costs at it     [a, group], where group is (top bits, rest)
        groups then     [a, rest], where rest is (top bits, less); not in the order of groups
        costs at next   [a, b, rest]
        groups then     [a, b, less], and moved to [less, a, b], the order of groups
    """

    def __init__(self, code: TrellisCode, max_tiles: int, device: torch.device) -> None:
        self._bits = even, _ = code.symbol_bits
        self._is_paired = code.bits < _MIN_UNPAIRED_BITS
        self._values = codebook_values(code.codebook, device).float()
        first = self._values.view(-1, 1 << even).t().flatten()
        second = self._values.view(-1, 1 << sum(self._bits)).t().flatten()
        self._arranged = (first, second) if self._is_paired else (self._values, self._values)
        groups = NUM_STATES >> even
        self._costs = torch.empty(_TILES_AT_ONCE, NUM_STATES, device=device)
        self._least = torch.empty(_TILES_AT_ONCE, groups, device=device)
        # Of each step, or place that is searched, the costs of the groups before it.
        self._history = torch.empty(TILE_WEIGHTS + 1, max_tiles, groups, device=device)

    def ring(self, numbers: Tensor) -> Tensor:
        """States int64 of `numbers`, both `[tiles, 256]`; the first follows on the last."""
        tiles = len(numbers)
        seam = [place % TILE_WEIGHTS for place in range(-_SEAM, _SEAM)]
        self._history[0, :tiles].zero_()
        self._forward(numbers, seam)
        end = self._history[len(seam), :tiles].argmin(1)
        # A state without its symbol is the group before it.
        group = self._backward(numbers, seam, end)[:, 0] >> self._bits[0]
        ring = range(TILE_WEIGHTS)
        start = self._history[0, :tiles]
        start.fill_(torch.inf).scatter_(1, group.unsqueeze(1), 0.0)
        self._forward(numbers, ring)
        return self._backward(numbers, ring, group)

    def _forward(self, numbers: Tensor, places: Sequence[int]) -> None:
        """Fills the history after its first step; `places` begin at an even one and end at an odd.

        Cost of a next group = min over the states that end in it of
            cost of the state's group + (value of the state - number)**2
        """
        for first in range(0, len(numbers), _TILES_AT_ONCE):
            some = slice(first, min(first + _TILES_AT_ONCE, len(numbers)))
            columns = numbers[some].t().unsqueeze(2).unbind(0)
            history = self._history[: len(places) + 1, some]
            views = self._paired_views(history) if self._is_paired else self._plain_views(history)
            for step, place in enumerate(places):
                view, turn = views[step % 2], step // 2
                torch.sub(view.values, columns[place], out=view.costs)
                torch.addcmul(view.before[turn], view.by_group, view.by_group, out=view.by_group)
                if view.least is None:
                    torch.amin(view.ways, -2, out=view.after[turn])
                else:
                    torch.amin(view.ways, -2, out=view.least)
                    view.after[turn].copy_(view.least)

    def _plain_views(self, history: Tensor) -> tuple[_Views, _Views]:
        """Views for even and for odd places, all in the order of groups."""
        tiles = history.shape[1]
        costs = self._costs[:tiles]

        def views(parity: int) -> _Views:
            bits, next_bits = self._bits[parity], self._bits[1 - parity]
            before = history[parity:-1:2, :, : NUM_STATES >> bits]
            after = history[parity + 1 :: 2, :, : NUM_STATES >> next_bits]
            return _Views(
                values=self._arranged[parity],
                costs=costs,
                by_group=costs.view(tiles, -1, 1 << bits),
                ways=costs.view(tiles, 1 << next_bits, -1),
                before=before.unsqueeze(3).unbind(0),
                after=after.unbind(0),
                least=None,
            )

        return views(0), views(1)

    def _paired_views(self, history: Tensor) -> tuple[_Views, _Views]:
        """Views for the first and for the second place of a pair."""
        tiles = history.shape[1]
        costs = self._costs[:tiles]
        a, b = (1 << bits for bits in self._bits)
        between = history[1::2, :, : NUM_STATES // b].unflatten(2, (a, -1))
        first = _Views(
            values=self._arranged[0],
            costs=costs,
            by_group=costs.view(tiles, a, -1),
            ways=costs.view(tiles, a, b, -1),
            before=history[:-1:2].unsqueeze(2).unbind(0),
            after=between.unbind(0),
            least=None,
        )
        second = _Views(
            values=self._arranged[1],
            costs=costs,
            by_group=costs.view(tiles, a, b, -1),
            ways=costs.view(tiles, a * b, a, -1),
            before=between.unsqueeze(3).unbind(0),
            after=history[2::2].unflatten(2, (-1, a * b)).transpose(2, 3).unbind(0),
            least=self._least[:tiles].view(tiles, a * b, -1),
        )
        return first, second

    def _backward(self, numbers: Tensor, places: Sequence[int], group: Tensor) -> Tensor:
        """States int64 `[tiles, 256]` of the cheapest way to `group [tiles]`, at `places` only."""
        states = torch.empty(numbers.shape, dtype=torch.int64, device=numbers.device)
        # [1, 2**bits]: the top bits of all states that end in group 0
        tops = tuple(
            (torch.arange(1 << bits, device=group.device) << (STATE_BITS - bits)).unsqueeze(0)
            for bits in self._bits
        )
        even, odd = self._bits
        for step in reversed(range(len(places))):
            place = places[step]
            ending = tops[1 - place % 2] + group.unsqueeze(1)
            before = index = ending >> self._bits[place % 2]
            if place % 2 and self._is_paired:
                index = (before & ((1 << even) - 1)) << (STATE_BITS - even - odd) | before >> even
            errors = (self._values[ending] - numbers[:, place, None]).square_()
            costs = self._history[step, : len(numbers)].gather(1, index).add_(errors)
            state = ending.gather(1, costs.argmin(1, keepdim=True)).squeeze(1)
            states[:, place] = state
            group = state >> self._bits[place % 2]
        return states
