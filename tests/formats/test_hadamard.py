"""The rotation of EXL3's frame against its matrix."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError
from firesteel.formats.hadamard import hadamard128

SIGNS = torch.tensor(
    [[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
).double()


def product(x: torch.Tensor, dim: int, matrix: torch.Tensor) -> torch.Tensor:
    """`x` times `matrix [128, 128]` along `dim`, block by block, in float64."""
    blocks = x.double().movedim(dim, -1).unflatten(-1, (-1, 128))
    return torch.einsum("...i,ij->...j", blocks, matrix.double()).flatten(-2).movedim(-1, dim)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """A tensor of whole numbers and the axis to rotate, strided or not."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, 128 * draw(st.integers(0, 3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randint(-1000, 1001, shape, generator=generator)
    x = x.to(draw(st.sampled_from([torch.float16, torch.float32, torch.float64])))
    if draw(st.booleans()):
        x = torch.stack((x, x), -1)[..., 1]
    return x, draw(st.sampled_from([dim, dim - x.ndim]))


@given(cases())
def test_sums_are_exact_where_they_can_be_and_the_product_is_rounded_once(case):
    x, dim = case
    got = hadamard128(x, dim)
    assert got.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    assert got.is_contiguous()
    assert torch.equal(got, product(x, dim, SIGNS).to(got.dtype) * 128**-0.5)


@pytest.mark.parametrize("shape", [(128,), (3, 256), (2, 128, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_any_numbers_are_within_the_bound_of_their_sums(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    dim = next(axis for axis, size in enumerate(shape) if size % 128 == 0)
    got = hadamard128(x, dim)
    # Seven sums and one product, by a number that is rounded.
    bound = 9 * torch.finfo(got.dtype).eps * product(x.abs(), dim, SIGNS.abs() / 128**0.5).amax()
    assert (got.double() - product(x, dim, SIGNS / 128**0.5)).abs().max() <= bound
    assert (hadamard128(got, dim).double() - x.double()).abs().max() <= 2 * 12 * bound


@pytest.mark.parametrize(
    ("shape", "dim"), [((3000, 256), 1), ((256, 3000), 0), ((2, 128, 1500), 1)]
)
def test_a_row_has_the_same_bits_alone_and_among_more_than_are_rotated_at_a_time(shape, dim):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = hadamard128(x, dim)
    axis = 2 if len(shape) == 3 else 1 - dim
    for place in (0, 1023, 1024, shape[axis] - 1):
        alone = hadamard128(x.narrow(axis, place, 1), dim)
        assert torch.equal(whole.narrow(axis, place, 1), alone)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_gradient_is_rotated_too(dim):
    x = torch.randn(128, 128, dtype=torch.float64, requires_grad=True)
    given = torch.randn(128, 128, dtype=torch.float64)
    (hadamard128(x, dim) * given).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, hadamard128(given, dim))
    half = x.detach().half().requires_grad_()
    hadamard128(half, dim).sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.float16


def test_sizes_that_128_does_not_divide():
    message = r"x\.shape\[-1\]: got 576, must be a multiple of 128"
    with pytest.raises(InvalidArgumentError, match=message):
        hadamard128(torch.ones(2, 576))


@pytest.fixture
def tf32():
    """Products of fp32 rounded to TF32; not by monkeypatch, which cannot undo it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dim", [0, 1])
def test_a_gpu_gives_the_bits_of_a_cpu_whatever_its_products_are_set_to(dim):
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    assert torch.equal(hadamard128(x.cuda(), dim).cpu(), hadamard128(x, dim))
