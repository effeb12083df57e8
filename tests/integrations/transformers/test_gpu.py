"""The PyTorch path on a GPU: the same numbers as on the CPU, and it says that it is that path."""

from pathlib import Path

import pytest
import torch

from firesteel.formats.packed import PackedWeights
from firesteel.formats.quantize import parse_recipe, quantize_matrix
from firesteel.integrations.transformers import PackedExperts, load_model, load_report

pytestmark = pytest.mark.gpu

CHECKPOINTS = sorted((Path(__file__).parents[2] / "data" / "checkpoints").iterdir())
RECIPES = ("int3-g32", "int4-g128", "int4-g32-asym", "int8-g64", "mxfp4", "nvfp4", "nf3")


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda path: path.name)
def test_a_checkpoint_gives_what_it_gives_on_the_cpu(folder: Path) -> None:
    there = load_model(folder, device="cuda", dtype=torch.float32)
    here = load_model(folder, device="cpu", dtype=torch.float32)
    report = load_report(there)
    assert (report.backend, report.device) == ("torch", "cuda:0")
    experts = [module for module in there.modules() if isinstance(module, PackedExperts)]
    assert experts
    assert all(buffer.is_cuda for module in experts for buffer in module.buffers())
    ids = torch.arange(1, 13).view(2, 6)
    with torch.no_grad():
        got, expected = there(ids.cuda()).logits.cpu(), here(ids).logits
    # Sums of a few hundred fp32 products in another order, through two layers.
    assert (got - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_expanded_numbers_are_the_cpus_bit_for_bit(recipe: str, dtype: torch.dtype) -> None:
    n, k = 128 if recipe == "nf3" else 96, 320 if "128" not in recipe else 384
    weight = torch.randn(n, k, dtype=torch.bfloat16)
    scheme, matrix = quantize_matrix(weight, parse_recipe(recipe))
    packed = PackedWeights(scheme, num_matrices=1)
    packed.write(0, 0, matrix)
    expected = packed._expand(0, dtype)
    got = packed.cuda()._expand(0, dtype).cpu()
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))
