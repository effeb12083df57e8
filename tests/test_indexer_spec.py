"""What the indexer's specs refuse, and the names that `firesteel.indexer` has."""

from __future__ import annotations

from typing import Any

import pytest

import firesteel.indexer
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.indexer import DecodeSpec, PageWriterSpec, PrefillSpec

DECODE = {"num_heads": 8, "top_k": 512, "width": 4}
ROWS = {"num_heads": 8, "top_k": 512, "num_keys": 300}


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (
            DecodeSpec,
            {**DECODE, "top_k": 512.0},
            "top_k: got 512.0, must be one of 512, 1024, 2048",
        ),
        (DecodeSpec, {**DECODE, "num_heads": 8.0}, "num_heads: got 8.0, must be an integer"),
        (DecodeSpec, {**DECODE, "page_stride": 8448.0}, "page_stride: got 8448.0, must be a multi"),
        (DecodeSpec, {**DECODE, "page_stride": "8448"}, "page_stride: got '8448', must be a multi"),
        (
            DecodeSpec,
            {**DECODE, "page_stride": False},
            "page_stride: got False, must be a multiple",
        ),
        (DecodeSpec, {**DECODE, "is_filtered": "no"}, "is_filtered: got 'no', must be None, True"),
        (DecodeSpec, {**DECODE, "has_slots": 1}, "has_slots: got 1, must be True or False"),
        (DecodeSpec, {**DECODE, "cache_dtype": ["e4m3"]}, "cache_dtype: got ['e4m3'], must be one"),
        (PageWriterSpec, {"power_of_two": "yes"}, "power_of_two: got 'yes', must be True or False"),
        (PrefillSpec, {**ROWS, "pdl": None}, "pdl: got None, must be True or False"),
        (PrefillSpec, {**ROWS, "num_requests": 4}, "num_requests: got 4, must be left out of cont"),
        (
            PrefillSpec,
            {**ROWS, "page_stride": 16896},
            "page_stride: got 16896, must be left out of",
        ),
    ],
)
def test_fields_are_checked_by_name(kind: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedError)) as caught:
        kind(**given)
    assert str(caught.value).startswith(message)


def test_specs_for_a_target_are_specs_again() -> None:
    for spec in (PageWriterSpec(), DecodeSpec(**DECODE), PrefillSpec(**ROWS)):
        assert spec.for_target("sm_90") == spec
        assert not spec.for_target("sm_80").pdl


def test_all_is_what_there_is() -> None:
    assert all(hasattr(firesteel.indexer, name) for name in firesteel.indexer.__all__)
