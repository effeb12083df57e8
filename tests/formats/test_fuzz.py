"""Damaged configs, headers and bytes: one of our errors, or a result; never anything else."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import FiresteelError
from firesteel.formats.base import Scheme, TensorHeader
from firesteel.formats.registry import detect, format_named
from tests.strategies import (
    bits_of,
    headers_of,
    random_bits,
    schemes,
    stored_layers,
    stored_trellises,
)

LAYER = "model.layers.0.mlp.experts.3.gate_proj"
DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float8_e4m3fn)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "int", "gptq", "gptq_v2", "gemm", "auto_round", "NVFP4", "re:(", LAYER]),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.sampled_from(["+:(", ".*", LAYER, "weights"]), st.none(), max_size=2),
)
EXTRA = (
    "dynamic",
    "extra_config",
    "backend",
    "checkpoint_format",
    "format",
    "version",
    "quantization",
    "quantized_layers",
    "config_groups",
    "group_size",
    "quant_algo",
)


@st.composite
def files(draw: st.DrawFn) -> tuple[Scheme, dict[str, torch.Tensor]]:
    if draw(st.integers(0, 8)) == 0:
        return draw(stored_trellises(max_size=140))
    scheme = draw(schemes(max_n=32, max_groups=2))
    return scheme, draw(stored_layers(scheme))


def containers(node: Any) -> list[Any]:
    """Every dict and list in a config, the config first."""
    children = node.values() if isinstance(node, dict) else node
    nested = [containers(child) for child in children if isinstance(child, dict | list)]
    return [node, *(found for group in nested for found in group)]


def outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """What a call gives, or the message of the error of ours that it raises."""
    try:
        return call(), ""
    except FiresteelError as error:
        return None, str(error)


@given(files(), st.data())
def test_damaged_configs(case, data):
    scheme, stored = case
    entry = format_named(scheme.format)
    config = copy.deepcopy(entry.config(scheme, ignore=["lm_head"]))
    for _ in range(data.draw(st.integers(1, 2))):
        node = data.draw(st.sampled_from([node for node in containers(config) if node]))
        keys = [*node, *EXTRA] if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(keys))
        if isinstance(node, dict) and data.draw(st.booleans()):
            node.pop(key, None)
        else:
            node[key] = data.draw(JUNK)
    found, message = outcome(lambda: detect(config, stored))
    if found is entry:
        got, message = outcome(lambda: entry.scheme(config, LAYER, headers_of(stored)))
        assert got is None or headers_of(stored) == entry.tensors(got)
    assert found is not None or len(message) > 20


@given(files(), st.data())
def test_damaged_headers(case, data):
    scheme, stored = case
    entry = format_named(scheme.format)
    headers = headers_of(stored)
    suffix = data.draw(st.sampled_from(sorted(headers)))
    shape = data.draw(st.lists(st.integers(0, 70), max_size=4).map(tuple))
    dtype = data.draw(st.sampled_from((headers[suffix].dtype, *DTYPES)))
    headers[suffix] = TensorHeader(shape, dtype)
    got, message = outcome(lambda: entry.scheme(entry.config(scheme), LAYER, headers))
    if got is not None:
        assert headers == entry.tensors(got)
    else:
        assert any(word in message for word in (LAYER, "group_size", "version"))


@given(files(), st.data())
def test_damaged_bytes(case, data):
    scheme, stored = case
    entry = format_named(scheme.format)
    suffix = data.draw(st.sampled_from(sorted(stored)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    damaged = random_bits(tuple(stored[suffix].shape), stored[suffix].dtype, generator)
    stored = {**stored, suffix: damaged}
    matrix, message = outcome(lambda: entry.unpack(scheme, stored))
    if matrix is None:
        assert suffix in message or "packed codes" in message
        return
    again = entry.pack(scheme, matrix)
    for key, tensor in stored.items():
        assert torch.equal(bits_of(again[key]), bits_of(tensor))
