"""What a matrix kernel's main loop costs, read from its SASS: instructions a weight.

A loop is what a backward branch spans. The main one is the innermost that both multiplies and
loads from global memory; its multiplications say how many weights one turn takes, however far the
compiler has unrolled it. Where it has unrolled all of it, the whole kernel counts as one turn.

Hopper's own kernels multiply a tile as 32, 64, 96 or 128 routes and have a loop of each: counted is
that of a full tile, which multiplies most.
"""

import math
import re
import struct
import subprocess
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import triton

from firesteel.launch import LaunchKey
from firesteel.moe.spec import BITS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Columns of a block of packed weights, the least that a turn takes.
BLOCK_COLUMNS = 128

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
# Of a warp, and of four that multiply together.
_WARP_PRODUCT = re.compile(r"[HQ]MMA\.(?:\w+\.)*?(16)(8)(8|16|32)\b")
_GROUP_PRODUCT = re.compile(r"[HQ]GMMA\.(\d+)x(\d+)x(\d+)\b")
_BULK_LOADS = ("UTMALDG", "UBLKCP")
# A part of a load's name to its bytes; 4 without one.
_SIZES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        """Where a branch goes; None of anything else."""
        found = _TARGET.search(self.operands) if self.name.startswith("BRA") else None
        return None if found is None else int(found[1], 16)

    @property
    def is_global_load(self) -> bool:
        return self.name.partition(".")[0] in ("LDG", "LDGSTS", *_BULK_LOADS)

    @property
    def loaded_bytes(self) -> float:
        """What a thread loads; without end for copies that a descriptor describes."""
        if not self.is_global_load:
            return 0
        if self.name.startswith(_BULK_LOADS):
            return math.inf
        return next((size for part, size in _SIZES.items() if part in self.name.split(".")), 4)

    @property
    def products(self) -> int:
        """Multiplications that one warp's share of it does."""
        for pattern, warps in ((_WARP_PRODUCT, 1), (_GROUP_PRODUCT, 4)):
            if found := pattern.match(self.name):
                return int(found[1]) * int(found[2]) * int(found[3]) // warps
        return 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a kernel's main loop.

    Fields
        instructions           those that every turn runs, without NOP
        blocks                 blocks of weights, 128 columns of all its rows, that it takes
        spills                 of the instructions those that store or load spilled registers
        instructions_a_weight  by all threads of a program together
    """

    instructions: int
    blocks: int
    spills: int
    instructions_a_weight: float


def disassemble(images: Sequence[bytes], target: str, folder: Path) -> list[list[Instruction]]:
    """The instructions of each cubin for a target; addresses go on from one to the next.

    nvdisasm takes half a second to start, and so is given the code of all of them as one.
    """
    parts = [machine_code(image) for image in images]
    path = folder / "code.bin"
    path.write_bytes(b"".join(parts))
    command = [TOOLS / "nvdisasm", "--binary", f"SM{target.removeprefix('sm_')}a", path]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ends = list(accumulate(map(len, parts)))
    found: list[list[Instruction]] = [[] for _ in parts]
    for each in parse(text):
        found[bisect_right(ends, each.address)].append(each)
    return found


def machine_code(image: bytes) -> bytes:
    """The code of a cubin, which is an ELF file, of one function."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    # Name, its place among names; type; flags; address; place and size of what it holds.
    sections = [struct.unpack_from("<IIQQQQ", image, table + at * size) for at in range(count)]
    found = [
        image[place : place + length]
        for name, _, _, _, place, length in sections
        if image.startswith(b".text.", sections[names][4] + name)
    ]
    assert len(found) == 1
    return found[0]


def parse(text: str) -> list[Instruction]:
    """The instructions in what nvdisasm or cuobjdump prints."""
    return [
        Instruction(int(found[1], 16), found[2], found[3].strip())
        for found in _LINE.finditer(text)
        if found[2] != "NOP"
    ]


def main_loop(code: Sequence[Instruction]) -> list[Instruction]:
    """The innermost loop that multiplies and loads; of several, the one that multiplies most.

    All of the code if no loop multiplies.

    Raises
        ValueError: no loop that multiplies also loads.
    """
    ends: dict[int, int] = {}
    for each in code:
        if each.target is not None and each.target <= each.address:
            # All branches back to one place are turns of one loop.
            ends[each.target] = max(each.address, ends.get(each.target, 0))
    loops = [_within(code, start, end) for start, end in ends.items()]
    multiplying = [loop for loop in loops if _products(loop)]
    if not multiplying:
        return list(code)
    loading = [loop for loop in multiplying if any(each.is_global_load for each in loop)]
    innermost = [
        loop
        for loop in loading
        if not any(other is not loop and set(other) < set(loop) for other in loading)
    ]
    if not innermost:
        raise ValueError("code: got loops that multiply but do not load, must have one with both")
    return max(innermost, key=_products)


def without_stores(loop: Sequence[Instruction]) -> list[Instruction]:
    """The loop without what a forward branch leaves out and stores: most turns store nothing."""
    skipped: set[int] = set()
    for branch in loop:
        if branch.target is None or not branch.address < branch.target <= loop[-1].address:
            continue
        part = [each for each in loop if branch.address < each.address < branch.target]
        if not _products(part) and any(each.name.startswith("STG") for each in part):
            skipped.update(each.address for each in part)
    return [each for each in loop if each.address not in skipped]


def waits_of(code: Sequence[Instruction]) -> tuple[int, int]:
    """Waits for `wgmma`, and how many of those there are.

    Where ptxas cannot let them run on (a branch among them, registers used too soon), it makes each
    wait for itself, and says so in a warning that nobody reads: then there are as many waits.
    """
    waits = sum(each.name.startswith("WARPGROUP.DEPBAR") for each in code)
    return waits, sum("GMMA" in each.name for each in code)


def weigh(code: Sequence[Instruction], key: LaunchKey) -> Turn:
    """A turn of a compiled key of FC1, FC2 or a linear.

    Raises
        ValueError: it does not multiply whole blocks, or loads less than their codes.
    """
    operand, weights, numbers, bits = _block_of(key)
    routes = dict(key.constexprs)["BLOCK_M"]
    assert isinstance(routes, int)
    # Warps that are more than the operand's tiles of 16 x 8 repeat others' work.
    repeats = max(1, key.num_warps * 16 * 8 // (operand * routes))
    turn = without_stores(main_loop(code))
    products = _products(turn) * key.num_warps // repeats
    block = weights * numbers * routes
    blocks, rest = divmod(products, block)
    if rest or not blocks:
        raise ValueError(f"products: got {products} of {key}, must be a multiple of {block}")
    threads, weights = 32 * key.num_warps, blocks * weights
    loaded = sum(each.loaded_bytes for each in turn) * threads
    codes = weights * bits // 8
    if loaded < codes:
        raise ValueError(
            f"loads: got {loaded:g} bytes of {key}, must be {codes} at least "
            f"(the codes of {blocks} blocks)"
        )
    spills = sum(each.name.startswith(("STL", "LDL")) for each in turn)
    return Turn(len(turn), blocks, spills, len(turn) * threads / weights)


def _block_of(key: LaunchKey) -> tuple[int, int, int, int]:
    """Of a block of weights: rows of the operand of one product, weights, numbers that each is
    multiplied as, and bits of each.

    An operand in Gluon always has gate and up rows.
    """
    constants = dict(key.constexprs)
    if "RATES" in constants:
        # EXL3: of several rates the lowest, which stands first and is the one that counts.
        rates = constants["RATES"]
        assert isinstance(rates, int)
        bits = (rates & -rates).bit_length() - 1
        if key.name.endswith("_wgmma_kernel"):
            return 128, 128 * BLOCK_COLUMNS // 2, 1, bits
        return 128, 128 * BLOCK_COLUMNS, 1 if constants["CODEBOOK"] == "mul1" else 2, bits
    rows = constants["BLOCK_N"]
    assert isinstance(rows, int)
    is_gate_up = key.name.startswith("gate_up")
    parts = 2 if is_gate_up and constants["ACTIVATION"] != "relu2" else 1
    operand = rows * (parts if constants.get("JOINT", True) else 1)
    bits = BITS[str(constants.get("ELEMENT", "int4"))]
    return operand, parts * rows * BLOCK_COLUMNS, 1, bits


def _products(code: Sequence[Instruction]) -> int:
    return sum(each.products for each in code)


def _within(code: Sequence[Instruction], start: int, end: int) -> list[Instruction]:
    return [each for each in code if start <= each.address <= end]
