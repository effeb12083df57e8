"""How Hopper's own kernels may cut a layer: every way is one that they can run."""

from dataclasses import replace

import pytest

from firesteel.cli.tune.wgmma import ROWS, downs_of, gate_ups_of, rows_of
from firesteel.moe.activation import Activation
from firesteel.moe.products import STREAM_ROWS
from firesteel.moe.spec import MoeSpec, StoredWeights, geometry

GLM = geometry("glm-5.2", tensor_parallel=4)
RELU2 = replace(GLM, activation=Activation(name="relu2"))
ASYM = replace(GLM, w13=StoredWeights(group_size=32, has_zero_points=True))
SHARED = 227 * 1024


@pytest.mark.parametrize("routes", ROWS)
@pytest.mark.parametrize("spec", [GLM, RELU2, ASYM], ids=["gated", "ungated", "asym"])
def test_warps_share_the_sums_and_the_buffers_fit(spec: MoeSpec, routes: int) -> None:
    row_bytes = 64 + 4 * (2 + 1) if spec is ASYM else 66
    gate_ups = gate_ups_of(spec, routes, SHARED)
    cuts = [(spec.num_parts * cut.columns, cut.warps, cut.stages, row_bytes, 0) for cut in gate_ups]
    downs = downs_of(spec, routes, SHARED)
    cuts += [(cut.rows, cut.warps, cut.stages, 66, 2 * routes * cut.rows) for cut in downs]
    assert gate_ups
    assert downs
    for rows, warps, stages, each, turned in cuts:
        assert stages >= 3
        assert warps % 4 == 0 or routes <= STREAM_ROWS
        assert rows % (16 * warps) == 0
        assert routes * rows / (32 * warps) <= 128
        assert stages * (256 * routes + each * rows) + turned <= SHARED


def test_each_way_that_fits_is_there() -> None:
    assert [len(gate_ups_of(GLM, routes, SHARED)) for routes in ROWS] == [6, 6, 8, 8, 6]
    assert [len(downs_of(GLM, routes, SHARED)) for routes in ROWS] == [20, 20, 30, 30, 20]
    # Those that need more than any GPU has are only Hopper's: 227 KiB, not 99.
    assert max(cut.stages for cut in gate_ups_of(GLM, 128, SHARED)) == 4
    assert not downs_of(GLM, 128, 99 * 1024)


def test_a_matrix_is_not_cut_wider_than_it_is() -> None:
    narrow = replace(GLM, intermediate_size=64, hidden_size=512, w2=StoredWeights(group_size=64))
    assert {cut.columns for cut in gate_ups_of(narrow, 32, SHARED)} == {64}
    assert max(cut.rows * cut.span for cut in downs_of(narrow, 32, SHARED)) == 512


@pytest.mark.parametrize(
    ("each", "rows"),
    [(0.03, (8,)), (2, (8,)), (4, (8, 16)), (8, (16, 8)), (12, (16, 32)), (16, (32, 16)),
     (32, (64, 32)), (64, (128, 64)), (96, (128, 64)), (256, (128,)), (4096, (128,))],
)  # fmt: skip
def test_rows_are_about_those_of_an_expert(each: float, rows: tuple[int, ...]) -> None:
    assert rows_of(each) == rows
