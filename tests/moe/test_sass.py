import re
import subprocess

import pytest

from examples.scale_rows.scale_rows import ScaleRows
from firesteel.launch import LaunchKey, plan
from firesteel.launch.binary import compile_all
from tests.moe.compile_budget import budget_text, limits, usage_text
from tests.moe.sass import (
    TOOLS,
    Turn,
    disassemble,
    machine_code,
    main_loop,
    parse,
    waits_of,
    weigh,
    without_stores,
)

# 2048 bytes of 128 threads: half the codes of 64 rows and 128 columns.
LOAD = "LDGSTS.E.BYPASS.128 [R0+0x800], desc[UR14][R4.64], !P0"
MULTIPLY = "HMMA.16816.F32.BF16 R20, R20, R12.reuse, RZ"
STORE = "@P1 STG.E.128 desc[UR22][R16.64], R12"
OTHER = "IMAD.WIDE R2, R3, 0x2, R4"
END = ["EXIT", "BRA {here:#x}"]


def sass(*lines: str) -> str:
    """cuobjdump's text of some instructions; `{3}` is the address of the fourth."""
    places = [f"0x{16 * number:x}" for number in range(len(lines))]
    return "".join(
        f"        /*{16 * number:04x}*/   {line.format(*places, here=16 * number)} ;"
        f"   /* 0x0000000804047981 */\n{' ' * 40}/* 0x001fe8000c1e9900 */\n"
        for number, line in enumerate(lines)
    )


def turn_of(text: str, key: LaunchKey) -> Turn:
    return weigh(parse(text), key)


def names(code) -> list[str]:
    return [each.name for each in code]


def key(kernel: str = "m.down_kernel", num_warps: int = 4, **constants) -> LaunchKey:
    constants = {"BLOCK_N": 64, "BLOCK_M": 8, **constants}
    return LaunchKey(kernel, (), tuple(constants.items()), num_warps=num_warps)


def test_instructions_are_read_without_nop_and_predicates():
    code = parse(sass("LDC R1, c[0x0][0x28]", "NOP", "@!P0 BRA 0x1230", "@UP1 BRA.U UP0, {0}"))
    assert [(each.address, each.name) for each in code] == [(0, "LDC"), (32, "BRA"), (48, "BRA.U")]
    assert [each.target for each in code] == [None, 0x1230, 0]


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("HMMA.16816.F32.BF16", 16 * 8 * 16),
        ("HMMA.1688.F32", 16 * 8 * 8),
        ("QMMA.16832.F32.E4M3.E4M3", 16 * 8 * 32),
        ("HGMMA.64x64x16.F32.BF16", 16 * 64 * 16),
        ("QGMMA.64x8x32.F32.E4M3.E4M3", 16 * 8 * 32),
        ("HFMA2.MMA", 0),
        ("IMAD", 0),
    ],
)
def test_products_of_a_warp(name, products):
    (code,) = parse(sass(f"{name} R24, R56, R4, RZ"))
    assert code.products == products


def test_the_main_loop_is_the_innermost_that_multiplies_and_loads():
    text = sass(
        "S2R R0, SR_TID.X",
        OTHER,  # 1: the outer loop
        LOAD,
        OTHER,  # 3: the main loop
        LOAD,
        OTHER,  # 5: a wait in it
        "@!P0 BRA {5}",
        MULTIPLY,
        "@P1 BRA {3}",
        MULTIPLY,
        "@P2 BRA {1}",
        *END,
    )
    assert [each.address // 16 for each in main_loop(parse(text))] == [3, 4, 5, 6, 7, 8]


def test_branches_to_one_place_are_one_loop():
    text = sass(OTHER, LOAD, MULTIPLY, "@P0 BRA {1}", OTHER, "@P1 BRA {1}", *END)
    assert len(main_loop(parse(text))) == 5


def test_of_several_loops_that_which_multiplies_most_is_the_main_one():
    text = sass(LOAD, MULTIPLY, "@P0 BRA {0}", LOAD, MULTIPLY, MULTIPLY, "@P0 BRA {3}", *END)
    assert [each.address // 16 for each in main_loop(parse(text))] == [3, 4, 5, 6]


def test_code_without_a_loop_counts_as_a_whole():
    text = sass(LOAD, OTHER, "@P0 BRA {1}", MULTIPLY, *END)
    assert len(main_loop(parse(text))) == 6


def test_a_loop_that_loads_nothing_is_refused():
    with pytest.raises(ValueError, match="code: got loops that multiply but do not load"):
        main_loop(parse(sass(LOAD, MULTIPLY, "@P0 BRA {1}", *END)))


def test_what_most_turns_skip_is_left_out():
    text = sass(
        LOAD,
        "@P0 BRA {3}",  # over something that is no store
        OTHER,
        MULTIPLY,
        "@P1 BRA {7}",  # over the stores
        OTHER,
        STORE,
        "@P3 BRA {0}",
        *END,
    )
    left = without_stores(main_loop(parse(text)))
    assert [each.address // 16 for each in left] == [0, 1, 2, 3, 4, 7]


# 64 rows, 128 columns and 8 routes are 32 products of 16 x 8 x 16: 8 a warp.
BLOCK = [LOAD, LOAD, *[MULTIPLY] * 8]


def test_instructions_a_weight():
    turn = turn_of(sass(*BLOCK, OTHER, "NOP", "@P0 BRA {0}", *END), key())
    assert (turn.instructions, turn.blocks) == (12, 1)
    assert turn.instructions_a_weight == 12 * 128 / (64 * 128)


def test_spills_of_a_turn_are_counted_and_those_outside_are_not():
    text = sass("STL [R1], R2", "LDL R2, [R1]", *BLOCK, "LDL.64 R2, [R1]", "@P0 BRA {2}", *END)
    assert turn_of(text, key()).spills == 1
    assert turn_of(sass("STL [R1], R2", *BLOCK, "@P0 BRA {1}", *END), key()).spills == 0


def test_a_turn_of_two_blocks_counts_both():
    turn = turn_of(sass(*BLOCK, *BLOCK, "@P0 BRA {0}", *END), key())
    assert (turn.instructions, turn.blocks) == (21, 2)
    assert turn.instructions_a_weight == 21 * 128 / (2 * 64 * 128)


def test_gate_and_up_rows_are_both_weights():
    text = sass(*BLOCK, *BLOCK, "@P0 BRA {0}", *END)
    gated = turn_of(text, key("m.gate_up_kernel", ACTIVATION="silu"))
    assert (gated.blocks, gated.instructions_a_weight) == (1, 21 * 128 / (128 * 128))
    plain = turn_of(text, key("m.gate_up_kernel", ACTIVATION="relu2"))
    assert (plain.blocks, plain.instructions_a_weight) == (2, 21 * 128 / (2 * 64 * 128))


def test_part_of_a_block_is_refused():
    text = sass(*BLOCK[:-1], "@P0 BRA {0}", *END)
    message = re.escape(f"products: got {7 * 16 * 8 * 16 * 4} of")
    with pytest.raises(ValueError, match=message):
        turn_of(text, key())


def test_products_that_warps_repeat_count_once():
    """64 rows and 8 routes are four tiles of a product: of eight warps, four repeat it."""
    text = sass(*BLOCK, "@P0 BRA {0}", *END)
    turn = turn_of(text, key(num_warps=8))
    assert (turn.blocks, turn.instructions_a_weight) == (1, 11 * 256 / (64 * 128))
    parted = key("m.gate_up_kernel", num_warps=8, ACTIVATION="silu", JOINT=False)
    joint = key("m.gate_up_kernel", num_warps=8, ACTIVATION="silu", JOINT=True)
    both = sass(*BLOCK, *BLOCK, "@P0 BRA {0}", *END)
    assert turn_of(both, parted).blocks == turn_of(text, joint).blocks == 1


def test_of_tiles_of_several_sizes_the_full_one_counts():
    """64 rows, 128 columns and 64 routes are eight products of 64 x 64 x 16 of a warpgroup."""
    small, full = ["HGMMA.64x32x16.F32.BF16 R24"] * 8, ["HGMMA.64x64x16.F32.BF16 R24"] * 8
    text = sass(LOAD, LOAD, *small, "@P0 BRA {0}", LOAD, LOAD, OTHER, *full, "@P0 BRA {11}", *END)
    down = key("m.down_wgmma_kernel", BLOCK_M=64)
    assert turn_of(text, down).instructions == 12
    assert turn_of(text, down).instructions_a_weight == 12 * 128 / (64 * 128)
    with pytest.raises(ValueError, match="products: got"):
        turn_of(text, key("m.down_wgmma_kernel", BLOCK_M=128))


def test_gluon_has_gate_and_up_rows_in_one_operand():
    """128 rows and 8 routes: of eight warps each has 16 rows, and none repeats."""
    text = sass(*BLOCK, "@P0 BRA {0}", *END)
    made = key("m.gate_up_stream_kernel", num_warps=8, ACTIVATION="silu")
    assert turn_of(text, made).blocks == 1
    made = key("m.gate_up_stream_kernel", num_warps=8, ACTIVATION="relu2")
    assert turn_of(text, made).blocks == 1


# Of two warps 7 KiB: 3 bits of 128 rows and 128 columns, and half of x.
TRELLIS_LOADS = [LOAD] * 7


def trellis_key(kernel: str = "stream", num_warps: int = 2, rates: int = 1 << 3, **constants):
    constants = {"RATES": rates, "CODEBOOK": "mcg", "BLOCK_M": 8, "SPAN": 1, **constants}
    return LaunchKey(
        f"m.trellis_{kernel}_kernel", (), tuple(constants.items()), num_warps=num_warps
    )


def test_a_weight_of_exl3_is_two_numbers_or_one():
    """128 rows, 128 columns and 8 routes are 64 products of 16 x 8 x 16, or twice as many."""
    text = sass(*TRELLIS_LOADS, *[MULTIPLY] * 64, OTHER, "@P0 BRA {0}", *END)
    turn = turn_of(text, trellis_key())
    assert (turn.blocks, turn.instructions) == (1, 7 + 64 + 2)
    assert turn.instructions_a_weight == 73 * 64 / (128 * 128)
    once = turn_of(text, trellis_key(CODEBOOK="mul1", num_warps=1, rates=1 << 1))
    assert once.blocks == 1
    assert once.instructions_a_weight == 73 * 32 / (128 * 128)
    with pytest.raises(ValueError, match="products: got"):
        turn_of(text, trellis_key(num_warps=1))
    with pytest.raises(ValueError, match=r"loads: got 7168 bytes of .*, must be 16384 at least"):
        turn_of(text, trellis_key(rates=1 << 8))


def test_of_several_rates_the_lowest_counts():
    text = sass(*TRELLIS_LOADS, *[MULTIPLY] * 64, "@P0 BRA {0}", *END)
    # Of 8 bits alone the loads are too few.
    assert turn_of(text, trellis_key(rates=1 << 8 | 1 << 3)).blocks == 1


def test_a_turn_of_exl3_s_large_tiles_is_half_a_block():
    """128 rows, 64 columns and 64 routes are eight products of 64 x 64 x 16 of a warpgroup."""
    product = "HGMMA.64x64x16.F32 R24"
    text = sass(*TRELLIS_LOADS, *[product] * 8, OTHER, "@P0 BRA {0}", *END)
    turn = turn_of(text, trellis_key("wgmma", num_warps=4, BLOCK_M=64))
    assert (turn.blocks, turn.instructions_a_weight) == (1, 17 * 128 / (128 * 64))


def test_waits_for_products_are_counted():
    product, wait = "HGMMA.64x64x16.F32.BF16 R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    text = sass("WARPGROUP.ARRIVE", product, product, wait, MULTIPLY, "DEPBAR.LE SB0, 0x1", product)
    assert waits_of(parse(text)) == (1, 3)


def test_fewer_codes_than_products_are_refused():
    loads = ["LDGSTS.E.BYPASS.128 [R0], desc[UR14][R4.64]", "LDG.E.U16 R67, desc[UR22][R8.64]"]
    text = sass(*loads, *[MULTIPLY] * 8, "@P0 BRA {0}", *END)
    message = re.escape(f"loads: got {128 * (16 + 2)} bytes of")
    with pytest.raises(ValueError, match=message):
        turn_of(text, key())


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("LDGSTS.E.BYPASS.128", 16),
        ("LDGSTS.E", 4),
        ("LDG.E.64.CONSTANT", 8),
        ("LDG.E.U16", 2),
        ("UTMALDG.2D", float("inf")),
        ("LDGDEPBAR", 0),
        ("LDS.128", 0),
    ],
)
def test_bytes_of_a_load(name, size):
    (code,) = parse(sass(f"{name} R24, [R56]"))
    assert code.loaded_bytes == size


def test_a_budget_leaves_a_little_room():
    usage = {
        "registers": 69,
        "spilled_bytes": 0,
        "shared_bytes": 512,
        "matrix_instructions": 16,
        "turn_instructions": 283,
        "turn_blocks": 1,
        "instructions_a_weight": 2.2109375,
    }
    row = limits(usage)
    assert row == {
        "registers": 80,
        "spilled_bytes": 0,
        "shared_bytes": 512,
        "instructions_a_weight": 2.28,
    }
    assert budget_text({"sm_90": {"a": {"registers": 80}, "b": {}}, "sm_120": {}}) == (
        '{\n "sm_90": {\n  "a": {"registers": 80},\n  "b": {}\n },\n "sm_120": {\n\n }\n}\n'
    )
    head, line = usage_text("sm_90", {"glm 0": usage}).splitlines()
    assert head.split()[:2] == ["sm_90", "registers"]
    assert line.split() == ["glm", "0", "69", "0", "512", "16", "283", "1", "2.21"]


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_code_of_several_cubins_is_that_of_each(target, tmp_path):
    made = plan(ScaleRows(100), 70, flags={"dtype": ["fp16"]})
    images = []
    wanted = [(made.kernels[key.kernel], key) for key in made.keys]
    compile_all(wanted, target, threads=1, done=lambda key, made: images.append(made.image))
    assert len(images) == 2
    start = 0
    for image, code in zip(images, disassemble(images, target, tmp_path), strict=True):
        (tmp_path / "kernel.cubin").write_bytes(image)
        command = [TOOLS / "cuobjdump", "--dump-sass", tmp_path / "kernel.cubin"]
        alone = parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert len(alone) > 10
        assert names(code) == names(alone)
        assert [each.address - start for each in code] == [each.address for each in alone]
        branches = [(each, other) for each, other in zip(code, alone, strict=True) if each.target]
        assert branches
        assert all(each.target - start == other.target for each, other in branches)
        start += len(machine_code(image))
