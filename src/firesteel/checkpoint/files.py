"""Opens a checkpoint folder: config, safetensors headers, tensors. Never reads a pickle.

Opening reads headers only. `Reader` maps a shard when the first tensor of it is asked for and lets
go of it when closed, so that the resident part of a file is what one `with` block touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from firesteel.errors import CheckpointError, InvalidArgumentError
from firesteel.formats.base import TensorHeader

__all__ = ["INDEX", "PICKLES", "Checkpoint", "Reader", "read_headers", "read_index", "resolve"]

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]

# safetensors' own names of dtypes.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's config and the header of each of its tensors.

    Fields
        path          its folder
        config        `config.json`
        quantization  the quantization_config, from `config.json` or the file where older tools
                      put it (`quantize_config.json`, `hf_quant_config.json`); {} for a plain one
        headers       tensor name to shape and dtype, sorted by name
        files         tensor name to file name
    """

    path: Path
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]
    files: Mapping[str, str]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the config and all headers of the checkpoint in folder `path`.

        Raises
            CheckpointError: a file is missing, corrupt or not safetensors.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"checkpoint: got {str(path)!r}, must be a folder")
        config = _read_json(path / "config.json")
        if not isinstance(config.get("model_type"), str):
            raise CheckpointError(
                f"config.json: model_type is {config.get('model_type')!r}, must be a string"
            )
        headers: dict[str, TensorHeader] = {}
        files: dict[str, str] = {}
        weight_map = _weight_map(path)
        shards = [_SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        for shard in shards:
            for name, header in read_headers(path / shard).items():
                if name in files:
                    raise CheckpointError(f"tensor {name}: in both {files[name]} and {shard}")
                headers[name], files[name] = header, shard
        if weight_map is not None:
            _check_index(weight_map, files)
        return cls(
            path=path,
            config=config,
            quantization=_quantization(path, config),
            headers=dict(sorted(headers.items())),
            files=files,
        )

    def reader(self) -> Reader:
        """A context manager that reads tensors."""
        return Reader(self)


class Reader:
    """Reads tensors of one checkpoint; use as a context manager.

    Tensors may share memory with the mapped file: copy what outlives the `with` block.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stack = ExitStack()
        self._shards: dict[str, Any] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._shards.clear()
        self._stack.close()

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """The tensor `name`, or its slice `[index]` along the first axis.

        Raises
            CheckpointError: the file cannot be read, or no longer has the header seen at opening.
        """
        shard = self._checkpoint.files[name]
        try:
            if shard not in self._shards:
                file = safe_open(self._checkpoint.path / shard, framework="pt")
                self._shards[shard] = self._stack.enter_context(file)
            file = self._shards[shard]
            if index is None:
                tensor = cast(Tensor, file.get_tensor(name))
            else:
                tensor = cast(Tensor, file.get_slice(name)[index])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {name} in {shard}: {error}") from error
        header = self._checkpoint.headers[name]
        shape = header.shape if index is None else header.shape[1:]
        if tuple(tensor.shape) != shape or tensor.dtype != header.dtype:
            raise CheckpointError(f"tensor {name} in {shard}: the file changed while it was read")
        return tensor


def resolve(checkpoint: str | Path, **hub: Any) -> Path:
    """The folder of `checkpoint`: itself, or a download of the hub repository of that name.

    Args:
        checkpoint: a folder, or owner/name on the hub.
        hub: what `snapshot_download` is to know: `revision`, `token`, `cache_dir`,
            `local_files_only`.

    Raises
        InvalidArgumentError: it is neither a folder nor a name of the form owner/name; or it is a
            folder, which has no revision, and one is given.
        CheckpointError: the hub does not give it (no network, no such repository, no access).
    """
    try:
        path = Path(checkpoint).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    # A name too long for the system, or the home of an unknown user.
    except (OSError, RuntimeError) as error:
        raise InvalidArgumentError(f"checkpoint: {error}") from error
    # "" would be the folder that the process happens to be in.
    if is_folder and str(checkpoint):
        if hub.get("revision") is not None:
            raise InvalidArgumentError(
                f"revision: got {hub['revision']!r}, must be None for the folder {path}"
            )
        return path
    if exists or not _HUB_NAME.fullmatch(str(checkpoint)):
        raise InvalidArgumentError(
            f"checkpoint: got {str(checkpoint)!r}, must be a folder or a hub name (owner/name)"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"checkpoint: {str(checkpoint)!r} is no folder, and to read it from the hub "
            "huggingface_hub must be installed: pip install 'firesteel[transformers]'"
        ) from error
    try:
        return Path(
            snapshot_download(
                str(checkpoint), allow_patterns=_HUB_FILES, ignore_patterns=["*/*"], **hub
            )
        )
    # The hub client raises types of its own, of requests' and of httpx'.
    except Exception as error:
        raise CheckpointError(
            f"checkpoint: {str(checkpoint)!r} is no folder here, and the hub did not give it: "
            f"{type(error).__name__}: {error}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name}: not in {path.parent}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name}: holds {type(content).__name__}, must be an object")
    return cast(dict[str, Any], content)


def _weight_map(path: Path) -> dict[str, str] | None:
    """Tensor to shard of a sharded checkpoint; None for a single file."""
    # A folder may hold both; hosts read the single file then.
    if (path / _SINGLE).is_file():
        return None
    index = path / INDEX
    if not index.exists():
        pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"checkpoint: {path} holds pickled weights ({', '.join(pickles[:3])}), which can "
                "run code when read; only safetensors are read: convert it first"
            )
        raise CheckpointError(f"checkpoint: neither {INDEX} nor {_SINGLE} in {path}")
    return read_index(path)


def read_index(path: Path) -> dict[str, str]:
    """Tensor to shard, as the index in folder `path` says.

    Raises
        CheckpointError: there is none, or it is no index of files in `path`.
    """
    content = _read_json(path / INDEX)
    # Hosts add to it.
    if not isinstance(content.get("metadata", {}), dict):
        raise CheckpointError(f"{INDEX}: metadata is {content['metadata']!r}, must be an object")
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX}: weight_map is missing, empty or not an object")
    entries = cast(dict[str, Any], weight_map)
    for name, shard in entries.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{INDEX}: {name} is in {shard!r}, must be a .safetensors file of the checkpoint"
            )
        if Path(shard).name != shard:
            raise CheckpointError(f"{INDEX}: {name} is in {shard!r}, must be a plain file name")
    missing = sorted(shard for shard in set(entries.values()) if not (path / shard).is_file())
    if missing:
        raise CheckpointError(f"{INDEX}: names {missing[0]}, which is not in {path}")
    return cast(dict[str, str], entries)


def _check_index(weight_map: Mapping[str, str], files: Mapping[str, str]) -> None:
    for name, shard in weight_map.items():
        if files.get(name) != shard:
            raise CheckpointError(
                f"{INDEX}: says that {name} is in {shard}; it is in {files.get(name, 'no file')}"
            )
    extra = sorted(set(files) - set(weight_map))
    if extra:
        raise CheckpointError(f"{INDEX}: does not name {extra[0]}, which is in {files[extra[0]]}")


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """The header of each tensor of one safetensors file.

    Raises
        CheckpointError: it is no such file.
    """
    headers: dict[str, TensorHeader] = {}
    try:
        with safe_open(path, framework="pt") as file:
            # An open file has keys() and is no mapping.
            for name in file.keys():  # noqa: SIM118
                entry = file.get_slice(name)
                dtype = _DTYPES.get(str(entry.get_dtype()))
                if dtype is None:
                    raise CheckpointError(
                        f"tensor {name} in {path.name}: dtype {entry.get_dtype()} is not known"
                    )
                headers[name] = TensorHeader(tuple(entry.get_shape()), dtype)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name}: not a readable safetensors file: {error}") from error
    return headers


def _quantization(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's quantization_config, wherever its tool wrote it; its method in our spelling.

    Hosts take capitals and "compressed_tensors" for the same, and older compressed-tensors wrote
    compression_config.
    """
    found = _stored_quantization(path, config)
    method = found.get("quant_method")
    if not isinstance(method, str):
        return found
    method = method.lower().replace("compressed_tensors", "compressed-tensors")
    return {**found, "quant_method": method}


def _stored_quantization(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = cast(Mapping[str, Any], part).get(key)
            if found is None:
                continue
            if not isinstance(found, dict):
                raise CheckpointError(
                    f"config.json: {key} is {type(found).__name__}, must be an object"
                )
            return cast(dict[str, Any], found)
    # AutoGPTQ before transformers knew GPTQ.
    if (path / "quantize_config.json").exists():
        return {"quant_method": "gptq", **_read_json(path / "quantize_config.json")}
    if (path / "hf_quant_config.json").exists():
        return {"quant_method": "modelopt", **_read_json(path / "hf_quant_config.json")}
    return {}
