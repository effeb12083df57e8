"""Mutated checkpoints: each loads what its file says, or raises an error of ours; nothing else.

What loads is loaded again where PyTorch fills new memory with NaN and the largest integers, so that
a buffer that nothing wrote would differ, and its experts are packed back and compared with the
file.
"""

import contextlib
import json
import random
import shutil
import signal
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from firesteel.errors import FiresteelError
from firesteel.integrations.transformers import load_model
from tests.checkpoints import PLAIN, STORAGES, write
from tests.integrations.transformers.compare import assert_same_bits, buffers, files_of

# Four-bit formats only: they leave no spare bits, so that a file comes back bit for bit.
_BASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ct": ("qwen3_moe", "ct-w4-g32-asym", {"linears": True}),
    "gptq": ("mixtral", "gptq-w4-desc_act", {"num_shards": 2}),
    "awq": ("deepseek_v3", "awq-asym", {"num_hidden_layers": 2}),
    "auto-round": ("olmoe", "auto-round-gptq", {}),
    "nvfp4": ("glm_moe_dsa", "nvfp4", {"num_hidden_layers": 2, "indexer_types": ["full"] * 2}),
    "modelopt": ("olmoe", "nvfp4-modelopt", {"num_shards": 2}),
    "gpt-oss": ("gpt_oss", "mxfp4-gpt-oss", {}),
    "plain": ("qwen3_moe", "", {}),
}
_ROUNDS = 12
_SECONDS = 60
_VALUES: tuple[Any, ...] = (
    *(None, -1, 0, 1, 2, 3, 5, 8, 16, 32, 48, 128, 10**6, 2**31, 2**63, 10**30, 1.5),
    *(float("nan"), "", "x", "float32", "gptq", "re:(", "re:.*", [], {}, [[]], ["a"], {"a": 1}),
    *(True, False),
)
_DTYPES = (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {
        name: write(
            root / name, family, STORAGES.get(storage, PLAIN), hidden_size=64, **options
        ).path
        for name, (family, storage, options) in _BASES.items()
    }


def edit_json(path: Path, rng: random.Random) -> str:
    """Take away, rename or change one value of a JSON file, at any depth."""
    file = rng.choice(sorted(path.glob("*.json")))
    content = json.loads(file.read_text())
    where = rng.choice(list(_places(content)))
    parent = content
    for key in where[:-1]:
        parent = parent[key]
    kind = rng.choice(("remove", "rename", "change", "change", "change"))
    value = rng.choice(_VALUES)
    if kind == "remove":
        del parent[where[-1]]
    elif kind == "rename" and isinstance(parent, dict):
        parent[f"{where[-1]}x"] = parent.pop(where[-1])
    else:
        parent[where[-1]] = value
    file.write_text(json.dumps(content))
    return f"{file.name}: {kind} {where} {value!r}"


def _places(content: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value inside."""
    keys = content if isinstance(content, dict) else range(len(content))
    for key in keys if isinstance(content, dict | list) else ():
        yield (*above, key)
        if isinstance(content[key], dict | list):
            yield from _places(content[key], *above, key)


def edit_bytes(path: Path, rng: random.Random) -> str:
    """Cut a file, flip bits of its header, or write over any bytes of it."""
    file = rng.choice(sorted([*path.glob("*.safetensors"), path / "config.json"]))
    data = bytearray(file.read_bytes())
    kind = rng.choice(("cut", "flip", "flip", "write"))
    end = len(data)
    if kind == "flip" and file.suffix == ".safetensors":
        end = 8 + struct.unpack("<Q", data[:8])[0]
    places = [rng.randrange(end) for _ in range(rng.choice((1, 1, 2, 8, 64)))]
    if kind == "cut":
        del data[places[0] :]
    for place in places if kind != "cut" else ():
        data[place] = data[place] ^ 1 << rng.randrange(8) if kind == "flip" else rng.randrange(256)
    file.write_bytes(data)
    return f"{file.name}: {kind} {places}"


def edit_tensor(path: Path, rng: random.Random) -> str:
    """Take away, rename, copy, reshape or retype a tensor, or put odd numbers into it."""
    file = rng.choice(sorted(path.glob("*.safetensors")))
    tensors = load_file(file)
    name, other = rng.choice(sorted(tensors)), rng.choice(sorted(tensors))
    kind = rng.choice(tuple(_TENSOR_EDITS))
    _TENSOR_EDITS[kind](tensors, name, other, rng)
    save_file({key: t.contiguous() for key, t in tensors.items()}, file)
    return f"{file.name}: {kind} {name} {other}"


def _set(change: Callable[[Tensor, random.Random], Tensor]) -> Callable[..., None]:
    def edit(tensors: dict[str, Tensor], name: str, other: str, rng: random.Random) -> None:
        del other
        tensors[name] = change(tensors[name], rng)

    return edit


def _rename(tensors: dict[str, Tensor], name: str, other: str, rng: random.Random) -> None:
    digits = [i for i, letter in enumerate(name) if letter.isdigit()] or [0]
    place = rng.choice(digits)
    new = rng.choice((f"{name[:place]}9{name[place + 1 :]}", f"{name}x", f"x.{name}"))
    tensors[new] = tensors.pop(name)


def _fill(tensor: Tensor, rng: random.Random) -> Tensor:
    if tensor.is_floating_point():
        return torch.full_like(tensor.float(), rng.choice((0.0, -1.0, float("nan"), float("inf"))))
    return torch.full_like(tensor.int(), rng.choice((-1, 0, 1, 2**31 - 1))).to(tensor.dtype)


_TENSOR_EDITS: dict[str, Callable[..., None]] = {
    "remove": lambda tensors, name, other, rng: tensors.pop(name),
    "swap": lambda tensors, name, other, rng: tensors.update({name: tensors[other].clone()}),
    "copy": lambda tensors, name, other, rng: tensors.update({f"{name}2": tensors[name].clone()}),
    "rename": _rename,
    "transpose": _set(lambda tensor, rng: tensor.T if tensor.ndim == 2 else tensor.unsqueeze(0)),
    "flatten": _set(lambda tensor, rng: tensor.flatten()),
    "halve": _set(lambda tensor, rng: tensor[: len(tensor) // 2] if tensor.ndim else tensor),
    "empty": _set(lambda tensor, rng: tensor[:0] if tensor.ndim else tensor.reshape(1)[:0]),
    "scalar": _set(lambda tensor, rng: tensor.flatten()[0]),
    "retype": _set(lambda tensor, rng: tensor.float().nan_to_num().to(rng.choice(_DTYPES))),
    "fill": _set(lambda tensor, rng: _fill(tensor, rng).to(tensor.dtype)),
}
_MUTATORS = (edit_json, edit_bytes, edit_tensor)


@pytest.mark.parametrize("mutate", _MUTATORS)
@pytest.mark.parametrize("base", _BASES)
def test_a_mutated_checkpoint_loads_right_or_raises_ours(tmp_path, bases, base, mutate):
    outcomes = {True: 0, False: 0}
    for index in range(_ROUNDS):
        # The same mutations on every run, of any process.
        rng = random.Random(f"{base} {mutate.__name__} {index}")
        path = tmp_path / str(index)
        shutil.copytree(bases[base], path)
        story = mutate(path, rng)
        try:
            outcomes[_loads_or_raises_ours(path)] += 1
        except Exception as error:
            raise AssertionError(f"{base}, round {index}: {story}") from error
    assert outcomes[False] > 0


def test_the_bases_load(bases):
    """Without a mutation nothing is refused, so that a refusal is of the mutation."""
    assert all(_loads_or_raises_ours(path) for path in bases.values())


def _loads_or_raises_ours(path: Path) -> bool:
    """True if the checkpoint loads, and right; False if firesteel refuses it."""
    with _limited(_SECONDS), warnings.catch_warnings():
        # The host warns of values that it replaces, and of tensors that it does not use.
        warnings.simplefilter("ignore")
        try:
            model = load_model(path)
        except FiresteelError:
            return False
        with _poisoned_memory():
            again = load_model(path)
    assert_same_bits(buffers(again), buffers(model))
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        packed = tuple(f"{name}." for name in quantizer.report.ignored)
        stored = quantizer.get_state_dict_and_metadata(model)[0]
        wanted = _of_experts(files_of(path))
        wanted = {name: t for name, t in wanted.items() if not name.startswith(packed or "?")}
        assert_same_bits(_of_experts(stored), wanted)
    return True


def _of_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".experts." in name}


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN and the largest integers."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        poison = torch.empty(3, dtype=torch.uint8)
        assert (poison == 255).all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Interrupts what hangs, where the system can (POSIX)."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
