"""gpt-oss' MXFP4 as transformers itself decodes it: the one tool at hand that reads such files."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from firesteel.formats.base import TensorHeader
from firesteel.formats.registry import format_named


@pytest.mark.host
def test_every_code_and_scale_decodes_as_in_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 4, 16), dtype=torch.uint8, generator=generator)
    # Scales of 2**-27 to 2**28, so that no product leaves bf16's normal numbers.
    scales = torch.randint(100, 156, (2, 6, 4), dtype=torch.uint8, generator=generator)
    # [E, K, N]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    entry = format_named("mxfp4-gpt-oss")
    for expert in range(2):
        stored = {"blocks": blocks[expert], "scales": scales[expert]}
        headers = {name: TensorHeader(tuple(t.shape), t.dtype) for name, t in stored.items()}
        scheme = entry.scheme({"quant_method": "mxfp4"}, "experts.gate_up_proj", headers)
        matrix = entry.unpack(scheme, stored)
        got = matrix.dequantize(scheme, torch.bfloat16)
        assert torch.equal(got, expected[expert].T)
