"""One checkpoint as vLLM's modules ask for it: by their names, which may differ from the file's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from firesteel.checkpoint.families import FAMILIES
from firesteel.checkpoint.files import INDEX, Checkpoint, read_index, resolve
from firesteel.checkpoint.layers import CACHE_SCALES, Contents, ExpertLayer, scan
from firesteel.checkpoint.sources import QuantizedSource
from firesteel.device import free_bytes
from firesteel.errors import CheckpointError, FiresteelError
from firesteel.formats.registry import formats_for
from firesteel.integrations.transformers.load import skeleton_of, without_zero_biases
from firesteel.integrations.transformers.plan import (
    check_shapes,
    lacking,
    patterns_of,
    plan_load,
    unplaced,
)
from firesteel.integrations.vllm.limits import check_workspace
from firesteel.modules.activation import stored_activation
from firesteel.modules.fill import check_zero_biases
from firesteel.modules.kernels import KernelReport
from firesteel.modules.packed import PackedExperts
from firesteel.moe.activation import Activation

__all__ = ["Model", "why_not"]

# What the engine makes one module of, where its model does not say so in time.
_MERGED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
}
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")


@dataclass(slots=True)
class Model:
    """What firesteel reads of a checkpoint, and which of it the engine has asked for.

    Fields
        checkpoint  where it is
        contents    what the scan found
        rename      the engine's name of a name in the file; None where it drops it
        unfilled    expert layers that were made and not read yet, by prefix
        filled      those that were read
        kernels     which of them run on kernels; None until the last one is read
        read        modules that have read their weights
        max_tokens  that kernels will be planned for; 0 without any
        workspace_bytes  of the workspace that kernels of the layers made so far will take
    """

    checkpoint: Checkpoint
    contents: Contents
    rename: Callable[[str], str | None] = str
    unfilled: dict[str, PackedExperts] = field(default_factory=dict)
    filled: dict[str, PackedExperts] = field(default_factory=dict)
    kernels: KernelReport | None = None
    read: list[nn.Module] = field(default_factory=list)
    max_tokens: int = 0
    workspace_bytes: int = 0
    _has_room: bool = False
    _asked: set[str] = field(default_factory=set)
    _taken: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, name: str, revision: str | None = None) -> Model:
        """Read the headers of a checkpoint: a folder, or a hub name and what of it.

        Raises
            CheckpointError, UnsupportedError: it cannot be read exactly, its head is quantised and
                the engine would take the embedding in its place, or the engine would read other
                files of the folder.
        """
        is_folder = Path(name).expanduser().is_dir()
        checkpoint = Checkpoint.open(resolve(name, revision=None if is_folder else revision))
        _check_files(checkpoint)
        contents = scan(checkpoint)
        model = cls(checkpoint, contents)
        model.check_head(is_tied=bool(checkpoint.config.get("tie_word_embeddings")))
        return model

    def check_head(self, *, is_tied: bool) -> None:
        """Refuse a quantised head in whose place the engine would take the embedding.

        Args:
            is_tied: what a config says, the checkpoint's or the engine's.

        Raises
            CheckpointError: it would.
        """
        heads = [s.layer for s in self.contents.dense if s.layer.rpartition(".")[2] == "lm_head"]
        if heads and is_tied:
            raise CheckpointError(
                f"{heads[0]}: quantised, but the config says tie_word_embeddings: true, so that "
                "its weight is that of the embedding"
            )

    @property
    def activation(self) -> Activation:
        """Of the experts, as the checkpoint's config says it."""
        return stored_activation(self.contents.family, self.checkpoint.config)

    def check_room(self) -> None:
        """Once, when all modules are made and none is read: refuse a workspace without room.

        Raises
            UnsupportedError: it would not fit.
        """
        if self._has_room or not self.workspace_bytes:
            return
        device = next(next(iter(self.unfilled.values())).buffers()).device
        check_workspace(self.workspace_bytes, free_bytes(device), self.max_tokens)
        self._has_room = True

    @property
    def after_last(self) -> list[str]:
        """Quantised matrices of layers after the model's last."""
        last = self.contents.geometry.num_layers - 1
        return [name for name in self._quantised if int(_layer_of(name) or 0) > last]

    @property
    def _quantised(self) -> list[str]:
        """Expert layers and linears that firesteel reads."""
        layers = (layer.prefix for layer in self.contents.experts if layer.is_packed)
        return [*layers, *(source.layer for source in self.contents.dense)]

    @property
    def is_dropped(self) -> bool:
        """Whether the engine has dropped what was read, to read it again."""
        tensors = (t for module in self.read for t in (*module.parameters(), *module.buffers()))
        return any(tensor.is_meta for tensor in tensors)

    @property
    def is_quantized(self) -> bool:
        """Whether firesteel reads any of it."""
        return bool(self._quantised)

    def experts(self, prefix: str) -> ExpertLayer | None:
        """The layer of an experts module; None where its experts are plain."""
        self._ask(prefix)
        for layer in self.contents.experts:
            if layer.is_packed and self.rename(layer.prefix) == prefix:
                self._taken.add(layer.prefix)
                return layer
        return None

    def linears(
        self, prefix: str, packed_modules: Mapping[str, Sequence[str]]
    ) -> tuple[QuantizedSource | None, ...]:
        """The matrices of a linear, in order; None for one that is stored plain.

        Args:
            prefix: the module.
            packed_modules: what the engine makes one module of: its name to the names in the file.
        """
        self._ask(prefix)
        parent, dot, name = prefix.rpartition(".")
        own = packed_modules.get(name) or _MERGED.get(name) or (name,)
        names = [f"{parent}{dot}{each}" for each in own]
        sources = {self.rename(source.layer): source for source in self.contents.dense}
        found = tuple(map(sources.get, names))
        self._taken.update(source.layer for source in found if source is not None)
        return found

    def _ask(self, prefix: str) -> None:
        self._asked.add(_layer_of(prefix))

    def check_complete(self) -> None:
        """Refuse a checkpoint that is not exactly the model's tensors, as `load_model` does.

        The engine itself fills what a quantised checkpoint lacks with what memory held, and passes
        over some of what does not fit. Builds transformers' model of the config, without memory.

        Raises
            CheckpointError: transformers cannot make the model, or a tensor is missing, of another
                shape, or of no place in the model and no bias of zeros.
        """
        model = skeleton_of(self.checkpoint)
        plan = plan_load(model, self.contents)
        check_shapes(model, plan)
        unexpected = without_zero_biases(self.checkpoint, unplaced(model, plan))
        if unexpected:
            raise CheckpointError(
                f"checkpoint: {self.checkpoint.path} has {len(unexpected)} tensor(s) that the "
                f"model has no place for, first {unexpected[0]}"
            )
        with self.checkpoint.reader() as reader:
            for layer in self.contents.experts:
                check_zero_biases(layer, reader)
        missing = lacking(model, plan)
        if missing:
            raise CheckpointError(
                f"checkpoint: {self.checkpoint.path} lacks {len(missing)} tensor(s) of the model, "
                f"first {missing[0]}"
            )

    def check_taken(self, *, has_head: bool) -> None:
        """Refuse quantised matrices that no module of the engine has taken.

        Those of whole layers that the engine has not built belong to other ranks, or to a draft
        model.

        Args:
            has_head: whether this rank has what is outside of layers (`lm_head`).

        Raises
            CheckpointError: one of a layer that it has built, or of none.
        """
        asked = {*self._asked, *([""] if has_head else [])}
        for name in self._quantised:
            if name not in self._taken and _layer_of(name) in asked:
                raise CheckpointError(
                    f"{name}: quantised in the checkpoint, the engine's model has no such module"
                )

    @property
    def cache_scales(self) -> list[str]:
        """Tensors of the file that are scales of a KV cache."""
        return [n for n in self.checkpoint.headers if n.rpartition(".")[2] in CACHE_SCALES]

    @property
    def patterns(self) -> list[re.Pattern[str]]:
        """What the names match of tensors that firesteel reads, and the engine must not."""
        packed = (layer for layer in self.contents.experts if layer.is_packed)
        dense = [name for source in self.contents.dense for name in source.tensors.values()]
        exact = patterns_of([*dense, *self.contents.dense_extras])
        prefixes = [rf"{re.escape(layer.prefix)}\." for layer in packed]
        return [re.compile(rf"^{pattern}") for pattern in (*exact, *prefixes)]

    @property
    def outline(self) -> str:
        """What is read of the modules that this rank has."""
        layers = [e for e in self.contents.experts if e.prefix in self._taken]
        return (
            f"{len(layers)} layers of experts, which stay packed, and {self._num_linears} linears, "
            "which are expanded"
        )

    @property
    def _num_linears(self) -> int:
        return len([s for s in self.contents.dense if s.layer in self._taken])

    def summary(self) -> str:
        """One line for the engine's log."""
        kernels = self.kernels
        assert kernels is not None
        num_bytes = sum(experts.num_bytes for experts in self.filled.values())
        words = [
            f"experts of {len(self.filled)} layers packed in {num_bytes:,} bytes",
            f"{kernels.num_layers} of them on kernels",
            *(str(ready.audit.prewarmed) for ready in kernels.ready),
            *(
                f"a workspace of {arenas['bytes']:,} bytes"
                for arenas in kernels.as_dict()["arenas"]
            ),
            *(f"{count} on the PyTorch path: {why}" for why, count in kernels.refused.items()),
        ]
        return "; ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """What was packed and what runs it, for JSON."""
        return {
            "layers": len(self.filled),
            "bytes": sum(experts.num_bytes for experts in self.filled.values()),
            "expanded_linears": self._num_linears,
            "kernels": None if self.kernels is None else self.kernels.as_dict(),
        }


def _check_files(checkpoint: Checkpoint) -> None:
    """Refuse a folder of which the engine would read other files than firesteel.

    The engine reads those that an index names, also beside a single file; without one it reads
    every file.
    """
    path = checkpoint.path
    own = set(checkpoint.files.values())
    if (path / INDEX).exists():
        theirs = set(read_index(path).values())
    else:
        theirs = {f.name for f in path.glob("*.safetensors") if not f.name.startswith(".")}
    if own == theirs:
        return
    alone = (
        f"{reader} {', '.join(sorted(names)[:3])}"
        for reader, names in (("firesteel", own - theirs), ("vLLM", theirs - own))
        if names
    )
    raise CheckpointError(
        f"checkpoint: got files in {path} that one reader alone would take ({'; '.join(alone)}), "
        "must be those of one checkpoint; remove the others"
    )


def _layer_of(name: str) -> str:
    """The number of the layer that a module or matrix is in; "" of none."""
    match = _LAYER.match(name)
    return match[1] if match else ""


def why_not(
    name: str, config: Mapping[str, Any], model_type: str | None, revision: str | None = None
) -> str | None:
    """Why firesteel does not claim a checkpoint of its own accord; None where it does.

    Headers are read only of a checkpoint whose config says a format and a family that it reads.

    Args:
        name, revision: as `Model.open` has them.
        config: its quantization_config.
        model_type: of its config.
    """
    if model_type not in FAMILIES:
        return f"model_type: got {model_type!r}, supported families are {', '.join(FAMILIES)}"
    try:
        formats_for(config)
        model = Model.open(name, revision)
    except FiresteelError as error:
        return str(error)
    if not any(layer.is_packed for layer in model.contents.experts):
        return "experts: none is quantised"
    return None
