"""Which layers of a checkpoint are quantised, and where each matrix of each expert is.

`scan` reads headers only. It accounts for every tensor under an `experts` module: one that is
missing or that nothing claims is an error, so no expert can be left at random values.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from firesteel.checkpoint.families import (
    ANY_EXPERT_TENSOR,
    EXPERT_TENSOR,
    FUSED_TENSOR,
    PARTS,
    Family,
    Geometry,
    family_of,
    predictors_of,
)
from firesteel.checkpoint.files import Checkpoint
from firesteel.checkpoint.sources import (
    BiasSource,
    PlainSource,
    QuantizedSource,
    RoundedSource,
    Source,
    StoredBias,
)
from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.formats.base import Format, Scheme, TensorHeader
from firesteel.formats.quantize import Recipe
from firesteel.formats.registry import detect, formats_for

__all__ = ["CACHE_SCALES", "Contents", "ExpertLayer", "scan"]

_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PART_NAMES = ("gate", "up", "down")
# Scales of a quantised KV cache, which tools hang on the projections; kept, not read.
CACHE_SCALES = frozenset({"k_scale", "kv_scale", "q_scale", "v_scale"})
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_BESIDE = CACHE_SCALES | {"bias", "e_score_correction_bias"}


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one layer.

    Fields
        prefix   the module of the experts, as the checkpoint names it
        layer    its number
        sources  [3][E]: gate, up and down of each expert; empty where the layer is stored plain and
                 no recipe was given
        biases   [3][E], empty where the family has none
        extras   tensors that the format's tools add and nothing here reads
        zero_biases  biases where the family has none, which AutoGPTQ wrote: they must hold zeros
    """

    prefix: str
    layer: int
    sources: tuple[tuple[Source, ...], ...]
    biases: tuple[tuple[BiasSource, ...], ...] = ()
    extras: tuple[str, ...] = ()
    zero_biases: tuple[str, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether firesteel reads this layer; else it is plain and the host's own."""
        return bool(self.sources)

    def scheme(self, part: int) -> Scheme:
        """The scheme of the first expert's projection `part`: 0 gate, 1 up, 2 down.

        Of others it may differ where matrices of several schemes can be in one stack (EXL3).
        """
        return self.sources[part][0].scheme

    def schemes(self, *parts: int) -> tuple[Scheme, ...]:
        """The schemes of these projections of every expert, those of an expert together."""
        experts = zip(*(self.sources[part] for part in parts), strict=True)
        return tuple(source.scheme for expert in experts for source in expert)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds.

    Fields
        dense         quantised linears, and what else is quantised
        dense_extras  tensors of their formats that nothing reads
        predictors    layers after the model's last that its config says predict further tokens
    """

    checkpoint: Checkpoint
    family: Family
    geometry: Geometry
    experts: tuple[ExpertLayer, ...]
    dense: tuple[QuantizedSource, ...]
    dense_extras: tuple[str, ...] = ()
    predictors: range = range(0)


@dataclass(slots=True)
class _Layer:
    """Tensors of the experts of one layer, by where they were found."""

    prefix: str
    # (expert, part) -> suffix -> tensor name
    single: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    # part 0 (gate_up) or 2 (down) -> suffix ("" for a plain tensor) -> tensor name
    fused: dict[int, dict[str, str]] = field(default_factory=dict)


@dataclass(slots=True)
class _Found:
    """Sources of one layer, by part."""

    sources: tuple[list[Source], ...] = field(default_factory=lambda: ([], [], []))
    biases: tuple[list[BiasSource], ...] = field(default_factory=lambda: ([], [], []))
    extras: list[str] = field(default_factory=list)
    zero_biases: list[str] = field(default_factory=list)


def scan(checkpoint: Checkpoint, recipe: Recipe | None = None) -> Contents:
    """Find every quantised matrix; with a `recipe`, every plain expert matrix too.

    Raises
        UnsupportedError: the family, the format or an option of it is not supported.
        CheckpointError: an expert tensor is missing, unexpected, or of a wrong shape or dtype.
        InvalidArgumentError: a recipe for a checkpoint whose experts are quantised already.
    """
    family = family_of(checkpoint.config)
    geometry = Geometry.of(family, checkpoint.config)
    if recipe is not None and checkpoint.quantization:
        raise InvalidArgumentError(
            f"quantize: got {recipe.name!r}, the checkpoint is quantised already; "
            "only a plain one can be"
        )
    return _Scanner(checkpoint, family, geometry, recipe).contents()


class _Scanner:
    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        geometry: Geometry,
        recipe: Recipe | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.family = family
        self.geometry = geometry
        self.recipe = recipe
        # Layers of a kind store the same suffixes, and a large model has 60,000 of them.
        self._detected: dict[frozenset[str], Format[Any] | None] = {}

    def contents(self) -> Contents:
        self._check_layers()
        if self.checkpoint.quantization:
            # One error of the config, rather than one of its first layer.
            formats_for(self.checkpoint.quantization)
        self._check_names()
        layers: dict[int, _Layer] = {}
        others: dict[str, dict[str, str]] = defaultdict(dict)
        for name in self.checkpoint.headers:
            found = ANY_EXPERT_TENSOR.fullmatch(name)
            if found is None:
                layer, _, suffix = name.rpartition(".")
                others[layer][suffix] = name
            else:
                number = int(found["layer"])
                layer = layers.setdefault(number, _Layer(found["prefix"]))
                self._place(layer, name)
        dense, dense_extras = self._dense(others)
        if not layers:
            raise CheckpointError(
                f"checkpoint: {self.checkpoint.path} has no expert tensors "
                "(…layers.L.mlp.experts.…), which every supported family has"
            )
        return Contents(
            checkpoint=self.checkpoint,
            family=self.family,
            geometry=self.geometry,
            experts=tuple(self._experts(number, layers[number]) for number in sorted(layers)),
            dense=tuple(dense),
            dense_extras=tuple(dense_extras),
            predictors=predictors_of(self.checkpoint.config, self.geometry.num_layers),
        )

    def _check_names(self) -> None:
        """Refuse names that a host takes for one tensor: with and without the model's prefix."""
        headers = self.checkpoint.headers
        for name in headers:
            if f"model.{name}" in headers:
                raise CheckpointError(f"tensor {name}: unexpected beside model.{name}")

    def _check_layers(self) -> None:
        """Refuse a config of more layers than there are, before a host builds them."""
        found = {int(match[1]) for name in self.checkpoint.headers if (match := _LAYER.match(name))}
        for layer in range(self.geometry.num_layers):
            if layer not in found:
                raise CheckpointError(
                    f"config.json: num_hidden_layers is {self.geometry.num_layers}, "
                    f"the checkpoint has no tensor of layer {layer}"
                )

    def _place(self, layer: _Layer, name: str) -> None:
        single = EXPERT_TENSOR.fullmatch(name)
        if single is not None:
            key = (int(single["expert"]), PARTS[single["projection"]])
            if layer.prefix != single["prefix"]:
                raise CheckpointError(f"tensor {name}: unexpected beside {layer.prefix}")
            tensors = layer.single.setdefault(key, {})
            if single["suffix"] in tensors:
                raise CheckpointError(
                    f"tensor {name}: the same matrix as {tensors[single['suffix']]}"
                )
            tensors[single["suffix"]] = name
            return
        fused = FUSED_TENSOR.fullmatch(name)
        if fused is None:
            raise CheckpointError(f"tensor {name}: unexpected among the experts of a layer")
        part = 2 if fused["projection"] == "down_proj" else 0
        if layer.prefix != fused["prefix"]:
            raise CheckpointError(f"tensor {name}: unexpected beside {layer.prefix}")
        layer.fused.setdefault(part, {})[fused["suffix"] or ""] = name

    def _experts(self, number: int, layer: _Layer) -> ExpertLayer:
        if layer.single and layer.fused:
            some = next(iter(next(iter(layer.fused.values())).values()))
            raise CheckpointError(f"tensor {some}: unexpected in a layer with a tensor an expert")
        found = self._fused(layer) if layer.fused else self._single(layer)
        counts = {len(sources) for sources in found.sources}
        if counts not in ({0}, {self.geometry.num_experts}):
            raise CheckpointError(f"{layer.prefix}: some experts are quantised and some are plain")
        for parts in ((0, 1), (2,)):
            schemes = {source.scheme for part in parts for source in found.sources[part]}
            if len({scheme.stack_key for scheme in schemes}) > 1:
                raise UnsupportedError(
                    f"{layer.prefix}: matrices that are used together must be stored alike, "
                    f"got {' and '.join(map(str, schemes))}"
                )
        return ExpertLayer(
            prefix=layer.prefix,
            layer=number,
            sources=tuple(map(tuple, found.sources)) if counts != {0} else (),
            biases=tuple(map(tuple, found.biases)) if self.family.has_bias else (),
            extras=tuple(found.extras),
            zero_biases=tuple(found.zero_biases),
        )

    def _single(self, layer: _Layer) -> _Found:
        """Experts with tensors of their own."""
        num_experts = self.geometry.num_experts
        for (expert, _), tensors in layer.single.items():
            if expert >= num_experts:
                raise CheckpointError(
                    f"tensor {next(iter(tensors.values()))}: unexpected, the config has "
                    f"{num_experts} experts"
                )
        found = _Found()
        for part in range(3):
            for expert in range(num_experts):
                tensors = dict(layer.single.get((expert, part), {}))
                if not tensors:
                    raise CheckpointError(
                        f"{layer.prefix}.{expert} {_PART_NAMES[part]}: missing, "
                        "no tensor of it is in the checkpoint"
                    )
                # The name in the file, by which a config chooses how a layer is stored.
                where = next(iter(tensors.values())).rpartition(".")[0]
                if self.family.has_bias:
                    if "bias" not in tensors:
                        raise CheckpointError(f"{where}: its bias is missing")
                    name = tensors.pop("bias")
                    self._check(name, (self.geometry.shape(part)[0],))
                    found.biases[part].append(StoredBias(name))
                form = self._format(where, {s: n for s, n in tensors.items() if s != "bias"})
                if form is None:
                    source = self._plain(where, tensors, part)
                else:
                    if "bias" in tensors:
                        name = tensors.pop("bias")
                        self._check(name, (self.geometry.shape(part)[0],))
                        found.zero_biases.append(name)
                    source, extras = self._quantized(form, where, tensors)
                    source = replace(source, scheme=self._fitted(where, source.scheme, part))
                    found.extras.extend(extras)
                if source is not None:
                    found.sources[part].append(source)
        return found

    def _fused(self, layer: _Layer) -> _Found:
        """Experts that are slices of one tensor a projection."""
        found = _Found()
        for part in (0, 2):
            where = f"{layer.prefix}.{'down_proj' if part == 2 else 'gate_up_proj'}"
            tensors = dict(layer.fused.get(part, {}))
            if not tensors:
                raise CheckpointError(f"{where}: missing, no tensor of it is in the checkpoint")
            parts = (2,) if part == 2 else (0, 1)
            if self.family.has_bias:
                if "bias" not in tensors:
                    raise CheckpointError(f"{where}_bias: missing")
                name = tensors.pop("bias")
                self._check(name, (self.geometry.num_experts, self._fused_rows(part)))
                for p in parts:
                    found.biases[p].extend(
                        StoredBias(name, expert, self._rows(p))
                        for expert in range(self.geometry.num_experts)
                    )
            headers = {
                suffix: _slice_header(self.checkpoint.headers[name], len(parts))
                for suffix, name in tensors.items()
            }
            form = None if "" in tensors else self._format(where, tensors)
            for p in parts:
                if form is None:
                    sources = self._fused_plain(where, tensors, p)
                else:
                    sources = self._fused_quantized(form, where, tensors, headers, p)
                found.sources[p].extend(sources)
        return found

    def _fused_rows(self, part: int) -> int:
        return self.geometry.shape(part)[0] * (1 if part == 2 else 2)

    def _rows(self, part: int) -> slice:
        """Rows of a fused slice that are projection `part`."""
        if part == 2:
            return slice(None)
        if self.family.is_interleaved:
            return slice(part, None, 2)
        n = self.geometry.intermediate_size
        return slice(part * n, (part + 1) * n)

    def _fused_quantized(
        self,
        form: Format[Any],
        where: str,
        tensors: Mapping[str, str],
        headers: Mapping[str, TensorHeader],
        part: int,
    ) -> Iterator[QuantizedSource]:
        if not form.has_rows:
            raise UnsupportedError(
                f"{where}: got all experts in one tensor, {form.title} must have one an expert"
            )
        for name in tensors.values():
            if self.checkpoint.headers[name].shape[:1] != (self.geometry.num_experts,):
                raise CheckpointError(
                    f"tensor {name}: shape {list(self.checkpoint.headers[name].shape)}, "
                    f"must have {self.geometry.num_experts} experts first"
                )
        scheme = form.scheme(self.checkpoint.quantization, where, headers)
        scheme = self._fitted(where, scheme, part)
        needed = form.tensors(scheme)
        self._check_suffixes(where, tensors, set(needed))
        for expert in range(self.geometry.num_experts):
            yield QuantizedSource(where, scheme, tensors, expert, self._rows(part))

    def _fused_plain(
        self, where: str, tensors: Mapping[str, str], part: int
    ) -> Iterator[RoundedSource]:
        self._check_suffixes(where, tensors, {""})
        n, k = self._fused_rows(part), self.geometry.shape(part)[1]
        matrix = (k, n) if self.family.is_transposed else (n, k)
        self._check(tensors[""], (self.geometry.num_experts, *matrix))
        for expert in range(self.geometry.num_experts):
            plain = PlainSource(
                where, tensors[""], expert, self._rows(part), self.family.is_transposed
            )
            if self.recipe is not None:
                yield self._rounded(plain, part)

    def _quantized(
        self, form: Format[Any], layer: str, tensors: Mapping[str, str]
    ) -> tuple[QuantizedSource, list[str]]:
        """The source of one matrix and the names of tensors kept but not read."""
        headers = {suffix: self.checkpoint.headers[name] for suffix, name in tensors.items()}
        try:
            scheme = form.scheme(self.checkpoint.quantization, layer, headers)
        except CheckpointError as error:
            raise error if layer in str(error) else CheckpointError(f"{layer}: {error}") from error
        needed = set(form.tensors(scheme))
        self._check_suffixes(layer, tensors, needed, form.optional())
        extras = [name for suffix, name in tensors.items() if suffix not in needed]
        needed_tensors = {suffix: tensors[suffix] for suffix in sorted(needed)}
        return QuantizedSource(layer, scheme, needed_tensors), extras

    def _plain(self, layer: str, tensors: Mapping[str, str], part: int) -> RoundedSource | None:
        self._check_suffixes(layer, tensors, {"weight"})
        self._check(tensors["weight"], self.geometry.shape(part))
        if self.recipe is None:
            return None
        return self._rounded(PlainSource(layer, tensors["weight"]), part)

    def _rounded(self, plain: PlainSource, part: int) -> RoundedSource:
        assert self.recipe is not None
        dtype = self.checkpoint.headers[plain.tensor].dtype
        n, k = self.geometry.shape(part)
        return RoundedSource(plain, self.recipe, self.recipe.scheme(n, k, dtype))

    def _dense(
        self, others: Mapping[str, Mapping[str, str]]
    ) -> tuple[list[QuantizedSource], list[str]]:
        """Quantised layers that are not experts, and the names of their unread tensors."""
        found: list[QuantizedSource] = []
        extras: list[str] = []
        for layer, tensors in others.items():
            own = {suffix: name for suffix, name in tensors.items() if suffix not in _BESIDE}
            form = self._format(layer, own)
            if form is not None:
                source, added = self._quantized(form, layer, own)
                found.append(source)
                extras.extend(added)
                extras.extend(tensors[suffix] for suffix in sorted(CACHE_SCALES & set(tensors)))
            elif "weight" in own and not self._is_beyond(layer):
                self._check(own["weight"], self.checkpoint.headers[own["weight"]].shape)
        return found, extras

    def _is_beyond(self, layer: str) -> bool:
        """Whether `layer` is in a block that the config does not count (token prediction)."""
        found = _LAYER.match(layer + ".")
        return found is not None and int(found[1]) >= self.geometry.num_layers

    def _format(self, layer: str, tensors: Mapping[str, str]) -> Format[Any] | None:
        suffixes = frozenset(tensors)
        if suffixes not in self._detected:
            try:
                self._detected[suffixes] = detect(self.checkpoint.quantization, suffixes)
            except (CheckpointError, UnsupportedError) as error:
                message = str(error).removeprefix("layer: ")
                raise type(error)(f"{layer}: {message}") from error
        return self._detected[suffixes]

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        header = self.checkpoint.headers[name]
        if header.dtype not in _PLAIN_DTYPES:
            raise CheckpointError(
                f"tensor {name}: dtype {header.dtype} is of no format that the config names, "
                f"must be one of {[str(dtype) for dtype in _PLAIN_DTYPES]}"
            )
        if header.shape != shape:
            raise CheckpointError(
                f"tensor {name}: shape {list(header.shape)}, the config gives {list(shape)}"
            )

    def _fitted(self, where: str, scheme: Scheme, part: int) -> Scheme:
        """The scheme of a projection, whose size the config gives."""
        fitted = scheme.fitted(*self.geometry.shape(part))
        if fitted is None:
            raise CheckpointError(
                f"{where}: stored as [{scheme.n}, {scheme.k}], "
                f"the config gives {list(self.geometry.shape(part))}"
            )
        return fitted

    def _check_suffixes(
        self,
        where: str,
        tensors: Mapping[str, str],
        needed: Set[str],
        optional: Set[str] = frozenset(),
    ) -> None:
        missing = sorted(needed - set(tensors))
        if missing:
            raise CheckpointError(f"{where}: its {missing[0] or 'weight'} is missing")
        unexpected = sorted(set(tensors) - needed - optional)
        if unexpected:
            raise CheckpointError(
                f"tensor {tensors[unexpected[0]]}: unexpected, must be one of "
                f"{sorted(needed | optional)}"
            )


def _slice_header(header: TensorHeader, num_parts: int) -> TensorHeader:
    """Header of one projection of one expert in a fused tensor."""
    if len(header.shape) < 2:
        return header
    return TensorHeader((header.shape[1] // num_parts, *header.shape[2:]), header.dtype)
