"""What ranks hold of a layer's experts makes up the whole layer, in every format."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from firesteel.checkpoint import Checkpoint, scan
from firesteel.checkpoint.layers import ExpertLayer
from firesteel.checkpoint.shards import expert_map, shard_layer
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.moe.experts import DenseWeights, MoeWeights
from firesteel.moe.torch_backend import run_experts
from tests.checkpoints import STORAGES, Storage, write

CASES = [
    (name, "gpt_oss" if name in ("mxfp4-gpt-oss", "nf3") else "qwen3_moe", 2 + place % 2)
    for place, name in enumerate(STORAGES)
]
# Halves of it are no multiple of a group of 128, nor of the 64 rows that 3 bits have in a file.
N = 640


def layer_of(path, family: str, storage: Storage, n: int = N, **overrides) -> ExpertLayer:
    name = "intermediate_size" if family == "gpt_oss" else "moe_intermediate_size"
    if family == "qwen3_moe":
        overrides |= {"num_hidden_layers": 2, "hidden_size": 128}
    written = write(path, family, storage, **{name: n, **overrides})
    contents = scan(Checkpoint.open(written.path))
    return contents.experts[-1]


def weights_of(layer: ExpertLayer, path) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Matrices and biases, [3][E] each, in float64."""
    found: list[list[Tensor]] = []
    with Checkpoint.open(path).reader() as reader:
        for sources in layer.sources:
            found.append([s.read(reader).dequantize(s.scheme).double() for s in sources])
            for source, matrix in zip(sources, found[-1], strict=True):
                assert matrix.shape == (source.scheme.n, source.scheme.k)
        biases = [[b.read(reader).double().clone() for b in part] for part in layer.biases]
    return found, biases


def run(parts, biases, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    def activation(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, dim=-1)
        return torch.sigmoid(gate) * up

    gate, up, down = parts
    weights = MoeWeights(
        w13=DenseWeights(torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])),
        w2=DenseWeights(torch.stack(down)),
        activation=activation,
        bias13=torch.stack([torch.cat(p) for p in zip(*biases[:2], strict=True)])
        if biases
        else None,
        bias2=torch.stack(biases[2]) if biases else None,
    )
    return run_experts(weights, x, ids, gates)


@pytest.mark.parametrize(("name", "family", "count"), CASES)
def test_ranks_make_up_the_whole_and_their_outputs_add_up(tmp_path, name, family, count):
    layer = layer_of(tmp_path / "it", family, STORAGES[name])
    whole, biases = weights_of(layer, tmp_path / "it")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, whole[0][0].shape[1], generator=generator, dtype=torch.float64)
    ids = torch.randint(-1, len(whole[0]), (9, 2), generator=generator)
    gates = torch.rand(9, 2, generator=generator)
    wanted = run(whole, biases, x, ids, gates)
    ranks = [shard_layer(layer, rank=rank, count=count) for rank in range(count)]
    parts = [weights_of(part, tmp_path / "it") for part in ranks]
    total = sum(run(matrices, own, x, ids, gates) for matrices, own in parts)
    assert torch.allclose(total, wanted, rtol=1e-6, atol=1e-6 * wanted.abs().max().item())
    for expert in range(len(whole[0])):
        gate, up = (torch.cat([m[p][expert] for m, _ in parts]) for p in (0, 1))
        down = torch.cat([m[2][expert] for m, _ in parts], dim=1)
        # Act-order gives each rank other columns than a run of them.
        order = torch.arange(N)
        if STORAGES[name].has_act_order:
            assert not torch.equal(gate, whole[0][expert])
            order = (gate[:, None] == whole[0][expert]).all(dim=2).int().argmax(dim=1)
            assert order.sort().values.tolist() == list(range(N))
        assert torch.equal(gate, whole[0][expert][order])
        assert torch.equal(up, whole[1][expert][order])
        assert torch.equal(down, whole[2][expert][:, order])


@pytest.fixture
def layer(tmp_path) -> ExpertLayer:
    return layer_of(tmp_path / "it", "qwen3_moe", STORAGES["ct-w4-g32"], 64)


def test_parts_are_even_where_they_can_be_and_of_whole_units_else(tmp_path):
    int4 = layer_of(
        tmp_path / "a", "qwen3_moe", Storage("compressed-tensors", "int4-g128", "stream")
    )
    schemes = [shard_layer(int4, rank=rank, count=2).scheme(2) for rank in range(2)]
    # A group of 128 is cut: what is left of it, and so all, are groups of 64.
    assert [(s.k, s.group_size) for s in schemes] == [(320, 64), (320, 64)]
    assert [shard_layer(int4, rank=r, count=3).scheme(2).k for r in range(3)] == [224, 224, 192]
    exl3 = layer_of(tmp_path / "b", "qwen3_moe", STORAGES["exl3-mixed"])
    assert [shard_layer(exl3, rank=r, count=3).scheme(0).n for r in range(3)] == [256, 256, 128]
    # Each of them, not only the one that would have none.
    for rank in range(6):
        with pytest.raises(UnsupportedError, match=r"6 ranks, 640 columns of 128 .* most 5 parts"):
            shard_layer(exl3, rank=rank, count=6)


def test_experts_that_do_not_divide_evenly(layer, tmp_path):
    whole, _ = weights_of(layer, tmp_path / "it")
    for held in ([0, 2, 3], [1], [3, 0]):
        part = shard_layer(layer, held=held)
        matrices, _ = weights_of(part, tmp_path / "it")
        for got, of_part in zip(matrices, whole, strict=True):
            assert len(got) == len(held)
            assert all(torch.equal(m, of_part[e]) for m, e in zip(got, held, strict=True))
        places = expert_map(4, held)
        assert places.dtype == torch.int32
        assert [places[e].item() for e in held] == list(range(len(held)))
        assert (places == -1).sum() == 4 - len(held)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rank": 2, "count": 2}, "rank: got 2, must be 0 to 1"),
        ({"held": [0, 4]}, r"held: got \[0, 4\], must be different experts of 0 to 3"),
        ({"held": [1, 1]}, r"held: got \[1, 1\], must be different"),
    ],
)
def test_what_is_not_there_is_refused(layer, asked, message):
    with pytest.raises(InvalidArgumentError, match=message):
        shard_layer(layer, **asked)


def _rank_main(rank: int, store: str, paths: list[Path]) -> None:
    """What a rank of two does with each: expert 0 whole on rank 0, and of the rest half of each."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    for path in paths:
        layer = scan(Checkpoint.open(path)).experts[-1]
        x, ids, gates = torch.load(path / "call.pt")
        shared = shard_layer(layer, held=[1, 2, 3], rank=rank, count=2)
        total = run(*weights_of(shared, path), x, expert_map(4, [1, 2, 3])[ids], gates)
        if rank == 0:
            own = shard_layer(layer, held=[0])
            total += run(*weights_of(own, path), x, expert_map(4, [0])[ids], gates)
        torch.distributed.all_reduce(total)
        if rank == 1:
            torch.save(total, path / "total.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_add_up_to_the_whole_in_every_format(tmp_path):
    generator = torch.Generator().manual_seed(0)
    wanted = {}
    for name, family, _ in CASES:
        path = tmp_path / name
        layer = layer_of(path, family, STORAGES[name], 192)
        whole, biases = weights_of(layer, path)
        x = torch.randn(5, whole[0][0].shape[1], generator=generator, dtype=torch.float64)
        ids = torch.randint(0, 4, (5, 2), generator=generator)
        gates = torch.rand(5, 2, generator=generator)
        torch.save((x, ids, gates), path / "call.pt")
        wanted[path] = run(whole, biases, x, ids, gates)
    torch.multiprocessing.spawn(_rank_main, (str(tmp_path / "store"), list(wanted)), nprocs=2)
    for path, output in wanted.items():
        total = torch.load(path / "total.pt")
        atol = 1e-6 * output.abs().max().item()
        assert torch.allclose(total, output, rtol=1e-6, atol=atol), path.name
