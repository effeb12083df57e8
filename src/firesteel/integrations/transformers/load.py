"""Loads a checkpoint into transformers: one call, or transformers' own `from_pretrained`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from firesteel.checkpoint.families import Geometry, family_of
from firesteel.checkpoint.files import Checkpoint, resolve
from firesteel.checkpoint.layers import scan
from firesteel.device import checked_device, default_device
from firesteel.errors import CheckpointError, InvalidArgumentError
from firesteel.formats.quantize import parse_recipe
from firesteel.integrations.transformers.plan import plan_load
from firesteel.integrations.transformers.quantizer import METHOD
from firesteel.integrations.transformers.report import LoadReport, plain_report
from firesteel.modules.packed import IMPLEMENTATION

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")
_MISMATCH = ("ignore_mismatched_sizes", "key_mapping")

__all__ = ["firesteel_config", "load_model", "load_report", "skeleton_of", "without_zero_biases"]


def firesteel_config(checkpoint: str | Path, *, quantize: str | None = None) -> Any:
    """The checkpoint's config, changed in memory so that `from_pretrained` asks firesteel to load.

    Use as `AutoModelForCausalLM.from_pretrained(path, config=firesteel_config(path))`. The
    checkpoint on disk stays as it is. `load_model` does the same and also refuses a checkpoint that
    lacks a tensor of the host's own, which `from_pretrained` would initialise at random.

    Args:
        checkpoint: a folder, or a hub name.
        quantize: recipe for the experts of a plain checkpoint, for instance "int4-g128".

    Raises
        CheckpointError, UnsupportedError, InvalidArgumentError: as `load_model`.
    """
    path = resolve(checkpoint)
    opened = Checkpoint.open(path)
    scan(opened, None if quantize is None else parse_recipe(quantize))
    return _config(opened, quantize)


def load_model(
    checkpoint: str | Path,
    *,
    quantize: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str = "auto",
    allow_unexpected: bool = False,
    **kwargs: Any,
) -> Any:
    """A transformers model of the checkpoint, its experts packed in memory.

    Args:
        checkpoint: a folder, or a hub name (owner/name) where the machine has a network.
        quantize: recipe for the experts of a plain 16-bit checkpoint ("int4-g128"); None to keep
            them as they are.
        device: where to put the model; None for the GPU if there is one, else the CPU. A
            `device_map` in `kwargs` goes before it.
        dtype: of everything that is not quantised and of activations; "auto" for the checkpoint's.
        allow_unexpected: accept tensors outside the experts that the model has no place for; they
            are ignored. Without it such a checkpoint is refused: it is of another model.
        kwargs: passed on to `AutoModelForCausalLM.from_pretrained`; of them `revision`, `token`,
            `cache_dir` and `local_files_only` serve a hub name.

    Returns the model in eval mode; `load_report(model)` says what is packed.

    Raises
        InvalidArgumentError: `checkpoint` is neither a folder nor a hub name, or `quantize` is no
            recipe or is given for a checkpoint that is quantised already.
        UnsupportedError: a family, format, bit width or group size that firesteel does not read.
        CheckpointError: a file or tensor is missing, unexpected, corrupt or of a wrong shape.
    """
    _check_options(kwargs)
    if "torch_dtype" in kwargs:
        # transformers' older name.
        dtype = kwargs.pop("torch_dtype")
    dtype = _checked_dtype(dtype)
    if "device_map" not in kwargs:
        device = default_device() if device is None else checked_device(device)
        # transformers puts a model on the CPU without one, and needs accelerate with one.
        if device.type != "cpu":
            kwargs["device_map"] = {"": device}
    path = resolve(checkpoint, **{key: kwargs[key] for key in _HUB_OPTIONS if key in kwargs})
    opened = Checkpoint.open(path)
    contents = scan(opened, None if quantize is None else parse_recipe(quantize))
    is_plain = not opened.quantization and quantize is None
    config = _config(opened, quantize)
    _check_skeleton(config)
    _check_generation_config(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            experts_implementation=IMPLEMENTATION,
            output_loading_info=True,
            # `_require_complete` refuses them, and names them.
            ignore_mismatched_sizes=True,
            **kwargs,
        )
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"checkpoint: transformers cannot load {path}: {error}") from error
    model, info = loaded
    _require_complete(opened, info, allow_unexpected)
    if is_plain:
        model.firesteel_report = plain_report(plan_load(model, contents), model)
    return model


def load_report(model: Any) -> LoadReport:
    """What is packed in a model that `load_model` or `from_pretrained` loaded.

    Raises
        TypeError: the model was not loaded by firesteel.
    """
    report = getattr(model, "firesteel_report", None)
    if report is None:
        report = getattr(getattr(model, "hf_quantizer", None), "report", None)
    if not isinstance(report, LoadReport):
        raise TypeError(f"model: got {type(model).__name__}, must be one that firesteel loaded")
    return report


def _check_options(options: dict[str, Any]) -> None:
    for name in ("config", "experts_implementation", "output_loading_info", *_MISMATCH):
        if name in options:
            raise InvalidArgumentError(
                f"{name}: got {options[name]!r}, load_model sets it; "
                "use from_pretrained with firesteel_config to choose it"
            )


def _checked_dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and found not in _DTYPES:
        raise InvalidArgumentError(
            f"dtype: got {dtype!r}, must be auto, bfloat16, float16 or float32"
        )
    return dtype if isinstance(dtype, str) and dtype == "auto" else cast(torch.dtype, found)


def _config(opened: Checkpoint, quantize: str | None) -> Any:
    family_of(opened.config)
    config = _host_config(opened)
    if not opened.quantization and quantize is None:
        config._experts_implementation = IMPLEMENTATION
        return config
    if hasattr(config, "compression_config"):
        # Older compressed-tensors' name of the same; a copy that is saved has it once.
        del config.compression_config
    config.quantization_config = {
        "quant_method": METHOD,
        "checkpoint": dict(opened.quantization),
        "recipe": quantize,
    }
    return config


def skeleton_of(opened: Checkpoint) -> Any:
    """transformers' model of a checkpoint's config, on the meta device.

    Raises
        CheckpointError: transformers cannot make a model of the config.
    """
    config = _host_config(opened)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return _check_skeleton(config)


def _host_config(opened: Checkpoint) -> Any:
    try:
        config = AutoConfig.from_pretrained(opened.path)
    # A field of a wrong class or value raises whatever the host's code for that field raises.
    except Exception as error:
        raise _config_error(error) from error
    num_experts = Geometry.of(family_of(opened.config), opened.config).num_experts
    top_k = getattr(config, "num_experts_per_tok", None)
    if not isinstance(top_k, int) or not 0 < top_k <= num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {top_k!r}, must be from 1 to the "
            f"{num_experts} experts"
        )
    return config


def _check_skeleton(config: Any) -> Any:
    """The model without memory; made to tell a bad config from what may fail later.

    Raises
        CheckpointError: transformers cannot make a model of the config.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    # As in `_host_config`: a division by zero, a missing key, a string where a number must be.
    except Exception as error:
        raise _config_error(error) from error


def _check_generation_config(path: Path) -> None:
    """Read it once: transformers reads it last, and passes over some errors and not others."""
    if not (path / "generation_config.json").exists():
        return
    try:
        GenerationConfig.from_pretrained(path)
    # As in `_host_config`.
    except Exception as error:
        raise CheckpointError(
            f"generation_config.json: transformers cannot read it: {type(error).__name__}: {error}"
        ) from error


def _config_error(error: Exception) -> CheckpointError:
    return CheckpointError(
        f"config.json: transformers cannot make a model of it: {type(error).__name__}: {error}"
    )


def _require_complete(opened: Checkpoint, info: dict[str, Any], allow_unexpected: bool) -> None:
    """Refuse a model of which transformers initialised something at random or left out."""
    path = opened.path
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"checkpoint: {path} lacks {len(missing)} tensor(s) of the model, first {missing[0]}"
        )
    mismatched = sorted(str(key) for key in info["mismatched_keys"])
    if mismatched:
        raise CheckpointError(f"checkpoint: {path}: shape differs from the config: {mismatched[0]}")
    unexpected = without_zero_biases(opened, sorted(info["unexpected_keys"]))
    if unexpected and not allow_unexpected:
        raise CheckpointError(
            f"checkpoint: {path} has {len(unexpected)} tensor(s) that the model has no place for, "
            f"first {unexpected[0]}; allow_unexpected=True ignores them"
        )


def without_zero_biases(opened: Checkpoint, names: Sequence[str]) -> list[str]:
    """The same without biases of zeros, which AutoGPTQ wrote where the model has none."""
    with opened.reader() as reader:
        return [
            name
            for name in names
            if not (
                name.endswith(".bias")
                and name in opened.files
                and not bool(reader.tensor(name).any())
            )
        ]
