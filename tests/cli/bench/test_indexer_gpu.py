"""`firesteel bench indexer` on a GPU, end to end, of the smallest cases."""

import json

import pytest

from tests.cli.command import invoke

pytestmark = pytest.mark.gpu

# More keys than a span of 16,384 has; and a prefill.
OWN = [
    ("--requests", 2, "--rows", 3, "--heads", 16, "--context", 20_000, "--top-k", 512),
    ("--mode", "prefill", "--rows", 70, "--heads", 16, "--context", 20_000, "--top-k", 512),
]


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        (("--case", "one-8k"), ["decode_scores", "select"]),
        (OWN[0], ["decode_scores", "filter"]),
        (OWN[1], ["range_scores", "range_select"]),
        (
            (*OWN[0], "--cache-dtype", "bf16", "--route", "tiled"),
            ["decode_scores", "select", "select"],
        ),
        ((*OWN[1], "--cache-dtype", "fp16"), ["range_scores", "range_select"]),
    ],
    ids=["one-8k", "decode", "prefill", "decode-bf16", "prefill-fp16"],
)
def test_a_case_is_exact_and_timed(tmp_path, options: tuple, kernels: list[str]):
    out = tmp_path / "indexer.jsonl"
    result = invoke("bench", "indexer", *options, "--json", "--out", out)
    assert result.exit_code == 0, result.output
    row = json.loads(out.read_text())
    assert row["exact"]
    assert row["differs"] is None
    assert row["tied_rows"] > 0
    assert 0 < row["score_error"] <= row["dot_rounding"]
    # Or Hopper's own.
    assert [each["kernel"].removesuffix("_wgmma") for each in row["launches"]] == kernels
    assert all(each["us"] > 0 for each in row["launches"])
    assert 0 < row["us_p20"] <= row["us"] <= row["us_p80"]
    assert row["us"] > row["floor_us"] > 0
    assert row["torch_bf16_reason"] is row["torch_bf16_differs"] is None
    assert row["torch_bf16_us"] > 0
    assert row["machine"]["name"]
