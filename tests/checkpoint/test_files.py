"""Opening a checkpoint folder: what it finds, and an error of ours for each bad file."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from firesteel.checkpoint.files import Checkpoint, resolve
from firesteel.errors import CheckpointError, InvalidArgumentError
from firesteel.formats.base import TensorHeader
from tests.checkpoints import write_tensors

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.weight": torch.arange(8, dtype=torch.bfloat16).reshape(2, 4),
    "c.qweight": torch.arange(4, dtype=torch.int32),
    "d.scale": torch.ones(2, 2).to(torch.float8_e4m3fn),
    "e.none": torch.zeros(0, 5),
    "f.scalar": torch.tensor(2.5),
}
INDEX = "model.safetensors.index.json"


def folder(path, num_shards=1, config=None):
    """A folder with `TENSORS` and a config."""
    path.mkdir(exist_ok=True)
    write_tensors(path, TENSORS, num_shards)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "mixtral"}))
    return path


def raw(path, header, body=b""):
    """A safetensors file with this header, of any bytes or JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_headers_and_tensors_are_as_written(tmp_path, num_shards):
    checkpoint = Checkpoint.open(folder(tmp_path, num_shards))
    assert list(checkpoint.headers) == sorted(TENSORS)
    assert len(set(checkpoint.files.values())) == num_shards
    with checkpoint.reader() as reader:
        for name, tensor in TENSORS.items():
            assert checkpoint.headers[name] == TensorHeader(tuple(tensor.shape), tensor.dtype)
            assert checkpoint.headers[name].num_bytes == tensor.nbytes
            assert torch.equal(reader.tensor(name).float(), tensor.float())
        assert torch.equal(reader.tensor("b.weight", 1), TENSORS["b.weight"][1])


def test_a_path_may_be_a_string_and_a_lone_file_goes_before_an_index(tmp_path):
    folder(tmp_path, 2)
    save_file({"only.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(Checkpoint.open(str(tmp_path)).headers) == ["only.weight"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe{}", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"a": ' * 100_000, "cannot be read as JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read as JSON"),
        (b"[]", "holds list, must be an object"),
        (b"null", "holds NoneType, must be an object"),
        (b'"text"', "holds str, must be an object"),
        (b"{}", "model_type is None, must be a string"),
        (b'{"model_type": 3}', "model_type is 3, must be a string"),
        (b'{"model_type": "m", "quantization_config": []}', "is list, must be an object"),
        (b'{"model_type": "m", "quantization_config": "gptq"}', "is str, must be an object"),
    ],
)
def test_a_bad_config_is_an_error(tmp_path, content, message):
    (folder(tmp_path) / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}"):
        Checkpoint.open(tmp_path)


def test_a_missing_config_or_folder_is_an_error(tmp_path):
    (folder(tmp_path) / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: not in"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="must be a folder"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="must be a folder"):
        Checkpoint.open(tmp_path / "model.safetensors")


def test_older_tools_put_the_quantisation_beside_config_json(tmp_path):
    folder(tmp_path)
    assert Checkpoint.open(tmp_path).quantization == {}
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    expected = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}
    assert Checkpoint.open(tmp_path).quantization == expected
    (tmp_path / "quantize_config.json").write_text('{"bits": 4}')
    assert Checkpoint.open(tmp_path).quantization == {"quant_method": "gptq", "bits": 4}
    (tmp_path / "quantize_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"quantize_config\.json: holds list"):
        Checkpoint.open(tmp_path)
    own = {"quant_method": "awq"}
    folder(tmp_path, config={"model_type": "mixtral", "quantization_config": own})
    assert Checkpoint.open(tmp_path).quantization == own
    nested = {"model_type": "mixtral", "text_config": {"quantization_config": own}}
    folder(tmp_path, config=nested)
    assert Checkpoint.open(tmp_path).quantization == own


def test_pickles_are_refused_and_named(tmp_path):
    (folder(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"neither {INDEX} nor model.safetensors"):
        Checkpoint.open(tmp_path)
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"):
        (tmp_path / name).write_bytes(b"\x80\x04.")
        with pytest.raises(CheckpointError, match=f"pickled weights .*{name}.* only safetensors"):
            Checkpoint.open(tmp_path)
        (tmp_path / name).unlink()


def test_a_pickle_that_is_called_safetensors_is_never_unpickled(tmp_path):
    folder(tmp_path)
    # Unpickling this would make a file.
    mark = tmp_path / "mark"
    code = f"cposix\nsystem\n(S'touch {mark}'\ntR."
    (tmp_path / "model.safetensors").write_bytes(code.encode())
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors"):
        Checkpoint.open(tmp_path)
    assert not mark.exists()


def test_a_file_cut_anywhere_is_an_error(tmp_path):
    file = folder(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    edges = {0, 1, 7, 8, 9, 8 + length - 1, 8 + length, 8 + length + 1, len(whole) - 1}
    for size in sorted(edges | set(range(0, len(whole), 17))):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="not a readable safetensors file"):
            Checkpoint.open(tmp_path)
    file.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**31, 2**32, 2**62, 2**63, 2**64 - 1])
def test_a_wrong_header_length_is_an_error(tmp_path, length):
    file = folder(tmp_path) / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xff",
        b'{"a":' * 2000,
        {"a": 1},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": entry(dtype="F33")},
        {"a": entry(dtype=7)},
        {"a": entry(shape=(3,))},
        {"a": entry(shape=(-2,))},
        {"a": entry(shape=(2**40, 2**40))},
        {"a": entry(shape=(0.5,))},
        {"a": entry(offsets=(8, 0))},
        {"a": entry(offsets=(0, 2**63))},
        {"a": entry(offsets=(4, 12))},
        {"a": entry(), "b": entry()},
        {"a": entry(), "b": entry(offsets=(4, 12))},
        {"a": entry(shape=(1,), offsets=(0, 4)), "b": entry(shape=(1,), offsets=(8, 12))},
    ],
    ids=str,
)
def test_a_bad_header_is_an_error(tmp_path, header):
    raw(folder(tmp_path) / "model.safetensors", header, bytes(16))
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        Checkpoint.open(tmp_path)


def test_a_dtype_that_torch_lacks_is_an_error(tmp_path):
    header = {"a": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}
    raw(folder(tmp_path) / "model.safetensors", header, bytes(2))
    with pytest.raises(CheckpointError, match=r"a in model\.safetensors: dtype F4 is"):
        Checkpoint.open(tmp_path)


def test_a_file_that_is_a_folder_is_an_error(tmp_path):
    (folder(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read as JSON"),
        ([], "holds list"),
        ({}, "weight_map is missing"),
        ({"weight_map": {}}, "weight_map is missing, empty"),
        ({"weight_map": {"a.weight": "x.safetensors"}, "metadata": 7}, "metadata is 7, must be"),
        ({"weight_map": {"a.weight": "x.safetensors"}, "metadata": None}, "metadata is None"),
        ({"weight_map": ["a"]}, "not an object"),
        ({"weight_map": {"a.weight": 1}}, "a.weight is in 1, must be a .safetensors"),
        ({"weight_map": {"a.weight": "model.bin"}}, "is in 'model.bin', must be a .safetensors"),
        ({"weight_map": {"a.weight": None}}, "is in None"),
        ({"weight_map": {"a.weight": "../x.safetensors"}}, "must be a plain file name"),
        ({"weight_map": {"a.weight": "/etc/x.safetensors"}}, "must be a plain file name"),
        ({"weight_map": {"a.weight": "s/x.safetensors"}}, "must be a plain file name"),
        ({"weight_map": {"a.weight": "a\0.safetensors"}}, "which is not in"),
        ({"weight_map": {"a.weight": "lost.safetensors"}}, "names lost.safetensors, which is not"),
    ],
    ids=str,
)
def test_a_bad_index_is_an_error(tmp_path, index, message):
    folder(tmp_path, 2)
    (tmp_path / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_an_index_that_disagrees_with_its_shards_is_an_error(tmp_path):
    folder(tmp_path, 2)
    whole = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    first, second = sorted(set(whole.values()))
    name = next(key for key, shard in whole.items() if shard == first)
    for weight_map, message in (
        ({**whole, name: second}, f"says that {name} is in {second}; it is in {first}"),
        ({**whole, "z.weight": first}, "z.weight is in .*; it is in no file"),
        ({k: v for k, v in whole.items() if k != name}, f"does not name {name}"),
    ):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": whole}))
    save_file({name: torch.ones(1)}, tmp_path / second)
    with pytest.raises(CheckpointError, match=f"tensor {name}: in both"):
        Checkpoint.open(tmp_path)


def test_a_file_that_changes_after_opening_is_an_error(tmp_path):
    checkpoint = Checkpoint.open(folder(tmp_path))
    file = tmp_path / "model.safetensors"
    save_file({"b.weight": torch.zeros(3, 2)}, file)
    with checkpoint.reader() as reader:
        with pytest.raises(CheckpointError, match=r"b\.weight .* changed while it was read"):
            reader.tensor("b.weight")
        with pytest.raises(CheckpointError, match=r"a\.weight in model\.safetensors"):
            reader.tensor("a.weight")
    file.unlink()
    with checkpoint.reader() as reader, pytest.raises(CheckpointError, match=r"b\.weight"):
        reader.tensor("b.weight")


def test_a_checkpoint_is_a_folder_or_a_name_of_the_hub(tmp_path, monkeypatch):
    assert resolve(folder(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~") == tmp_path
    for bad in ("", "one", "a/b/c", "a b/c", "/nowhere", "x" * 5000, "~no_such_user/x", "a\0/b"):
        with pytest.raises(InvalidArgumentError, match="checkpoint: "):
            resolve(bad)
    with pytest.raises(InvalidArgumentError, match="must be a folder or a hub name"):
        resolve(tmp_path / "model.safetensors")


def test_a_name_that_the_hub_does_not_give_is_an_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="no folder here, and the hub did not give it"):
        resolve("firesteel-tests/no-such-repository")


@pytest.mark.parametrize(
    ("key", "method", "expected"),
    [
        ("quantization_config", "GPTQ", "gptq"),
        ("quantization_config", "compressed_tensors", "compressed-tensors"),
        ("compression_config", "compressed-tensors", "compressed-tensors"),
        ("quantization_config", 4, 4),
    ],
)
def test_a_method_may_be_spelt_as_hosts_take_it(tmp_path, key, method, expected):
    folder(tmp_path, config={"model_type": "mixtral", key: {"quant_method": method, "bits": 4}})
    assert Checkpoint.open(tmp_path).quantization == {"quant_method": expected, "bits": 4}


def test_a_compression_config_is_an_object_too(tmp_path):
    folder(tmp_path, config={"model_type": "mixtral", "compression_config": []})
    with pytest.raises(CheckpointError, match="compression_config is list, must be an object"):
        Checkpoint.open(tmp_path)
