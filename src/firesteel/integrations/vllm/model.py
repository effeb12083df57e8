"""One checkpoint as vLLM's modules ask for it: by their names, which may differ from the file's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from firesteel.checkpoint.files import Checkpoint, resolve
from firesteel.checkpoint.layers import Contents, ExpertLayer, scan
from firesteel.checkpoint.sources import QuantizedSource
from firesteel.errors import CheckpointError
from firesteel.integrations.transformers.plan import patterns_of

__all__ = ["Model"]

_LAYER = re.compile(r"(?:.*\.)?layers\.\d+\.")


@dataclass(slots=True)
class Model:
    """What firesteel reads of a checkpoint, and which of it the engine has asked for.

    Fields
        checkpoint  where it is
        contents    what the scan found
        rename      the engine's name of a name in the file; None where it drops it
    """

    checkpoint: Checkpoint
    contents: Contents
    rename: Callable[[str], str | None] = str
    _asked: set[str] = field(default_factory=set)
    _taken: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, name: str) -> Model:
        """Read the headers of a checkpoint: a folder, or a hub name.

        Raises
            CheckpointError, UnsupportedError: it cannot be read exactly.
        """
        checkpoint = Checkpoint.open(resolve(name))
        return cls(checkpoint, scan(checkpoint))

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
        names = [f"{parent}{dot}{own}" for own in packed_modules.get(name, (name,))]
        sources = {self.rename(source.layer): source for source in self.contents.dense}
        found = tuple(sources.get(own) for own in names)
        self._taken.update(source.layer for source in found if source is not None)
        return found

    def _ask(self, prefix: str) -> None:
        match = _LAYER.match(prefix)
        self._asked.add(match[0] if match else "")

    def check_taken(self) -> None:
        """Refuse quantised matrices that no module of the engine has taken.

        Those of whole layers that the engine has not built belong to other ranks, or to a draft
        model.

        Raises
            CheckpointError: one of a layer that it has built, or of none.
        """
        layers = [layer.prefix for layer in self.contents.experts if layer.is_packed]
        for name in (*layers, *(source.layer for source in self.contents.dense)):
            match = _LAYER.match(self.rename(name) or name)
            if name not in self._taken and (match[0] if match else "") in self._asked:
                raise CheckpointError(
                    f"{name}: quantised in the checkpoint, the engine's model has no such module"
                )

    @property
    def patterns(self) -> list[re.Pattern[str]]:
        """What the names match of tensors that firesteel reads, and the engine must not."""
        packed = (layer for layer in self.contents.experts if layer.is_packed)
        dense = [name for source in self.contents.dense for name in source.tensors.values()]
        exact = patterns_of([*dense, *self.contents.dense_extras])
        prefixes = [rf"{re.escape(layer.prefix)}\." for layer in packed]
        return [re.compile(rf"^{pattern}") for pattern in (*exact, *prefixes)]
