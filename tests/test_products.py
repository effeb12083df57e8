"""What tests of kernels in Triton's interpreter take for granted of NumPy's products."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.parametrize("k", [16, 32, 64, 128])
def test_equal_rows_have_equal_products(k: int) -> None:
    generator = np.random.default_rng(k)
    row = generator.standard_normal((1, k), dtype=np.float32)
    product = np.tile(row, (64, 1)) @ generator.standard_normal((k, 64), dtype=np.float32)
    assert (product == product[0]).all()
