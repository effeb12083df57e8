"""`firesteel plan`: every launch of a MoE layer, by a model's name or from a checkpoint's headers.

Nothing here needs a GPU. A checkpoint whose layers differ gives one plan a kind of layer.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Group

from firesteel.checkpoint.files import Checkpoint
from firesteel.checkpoint.layers import Contents, ExpertLayer, scan
from firesteel.cli.console import format_bytes, print_json, stderr, stdout, table
from firesteel.cli.keys import key_cells, spans
from firesteel.cli.ranks import (
    Place,
    check_ranks,
    named_ranks,
    places_by,
    stored_ranks,
    where,
)
from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.formats.quantize import parse_recipe
from firesteel.formats.trellis_matrix import TrellisScheme
from firesteel.launch import Plan, plan
from firesteel.launch.binary import triton_version
from firesteel.modules.activation import stored_activation
from firesteel.moe.spec import GROUP_SIZES, NAMED_FORMATS, MoeSpec, geometry
from firesteel.moe.supports import RECIPES, moe_spec_of
from firesteel.moe.trellis.linear import PlannedSpec, TrellisLinearSpec
from firesteel.moe.trellis.spec import LayerSpec, TrellisMoeSpec, trellis_geometry
from firesteel.moe.trellis.supports import trellis_linear_spec_of, trellis_moe_spec_of, united
from firesteel.moe.tuning import TileTable
from firesteel.moe.tuning_file import default_table, find_table
from firesteel.settings import Settings

__all__ = [
    "PlanChoice",
    "make_all_specs",
    "make_plans",
    "make_specs",
    "make_table_specs",
    "run",
    "shape_choice",
]

_SHAPE = re.compile(r"(?P<model>.*?)(?:-tp(?P<tp>\d+))?", re.DOTALL)
_IDS = {"int32": "i32", "int64": "i64"}
_DEFAULT_RECIPE = "int4-g128"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """Which plan is meant.

    Fields
        model            a name of `firesteel.moe.spec.GEOMETRIES`; or
        checkpoint       a folder, of which the headers are read
        tp, ep           ranks that share each expert, or that share out the experts; not both
        recipe           how the experts are stored: of a model by name, "int4-g128" by default;
                         of a plain checkpoint, as `--quantize` takes it
        max_tokens       largest token count; `Settings.max_tokens` by default
        ids              types of the expert ids that callers pass, with commas between
        batch_invariant  a row has the same bits at every token count
        table            tiles by measurement: a file, or the name of a table that ships
        is_even          ranks are alike, or refused: there is one layer; of a model by name
    """

    model: str | None = None
    checkpoint: Path | None = None
    tp: int = 1
    ep: int = 1
    recipe: str | None = None
    max_tokens: int | None = None
    ids: str = "int32,int64"
    batch_invariant: bool = False
    table: str | None = None
    is_even: bool = False


def shape_choice(shape: str, recipe: str) -> PlanChoice:
    """The choice of a model's layer by "glm-5.2-tp4", which is one of four ranks'."""
    found = _SHAPE.fullmatch(shape)
    assert found is not None
    tp = int(found["tp"] or 1)
    return PlanChoice(model=found["model"], tp=tp, recipe=recipe, is_even=True)


def run(choice: PlanChoice, *, as_json: bool) -> None:
    """Print the plan; with JSON, one object for each kind of layer."""
    specs = make_all_specs(choice)
    for number, spec in enumerate(specs):
        start = time.perf_counter()
        (made,) = make_plans(choice, (spec,))
        seconds = time.perf_counter() - start
        if as_json:
            print_json(made.as_dict())
            continue
        if number:
            stdout().print()
        stdout().print(_tables(made, seconds))


def make_plans(choice: PlanChoice, specs: Sequence[PlannedSpec]) -> tuple[Plan, ...]:
    """A plan of each spec.

    Raises
        InvalidArgumentError: `max_tokens` or a type of ids is not allowed.
        UnsupportedError: Triton, which reads the kernels' parameters, is not installed.
    """
    triton_version()
    max_tokens = choice.max_tokens
    if max_tokens is None:
        max_tokens = Settings.from_env().max_tokens
    names = [name.strip() for name in choice.ids.split(",")]
    if not set(names) <= set(_IDS):
        raise InvalidArgumentError(
            f"ids: got {choice.ids!r}, must be {' or '.join(_IDS)}, or both with a comma between"
        )
    ids = [_IDS[name] for name in dict.fromkeys(names)]
    return tuple(
        # Linears have no ids.
        plan(spec, spec.planned_tokens(max_tokens), flags=dict.fromkeys(spec.flags(), ids))
        for spec in specs
    )


def make_all_specs(choice: PlanChoice) -> tuple[PlannedSpec, ...]:
    """As `make_specs`, and after them each kind of EXL3 linear of a checkpoint.

    Sizes are those of the files, which pad to 128: a linear of other sizes is planned at load.
    stderr says which linears are left out: those without kernels, and with ranks all of them.
    """
    contents = _contents(choice)
    layers = _layers(choice, None, contents)
    return layers if contents is None else (*layers, *_linears(choice, contents))


def make_specs(choice: PlanChoice, table: TileTable | None = None) -> tuple[LayerSpec, ...]:
    """The layer that is meant, or each kind of layer of the checkpoint and of ranks.

    stderr says which layers and ranks have which, where they differ.

    Args:
        choice: what is meant.
        table: of tiles, where the choice has none; else the default one.

    Raises
        InvalidArgumentError: not exactly one of model and checkpoint, or no such model, recipe or
            table; or numbers of ranks that vLLM would not have.
        CheckpointError: the checkpoint cannot be read.
        UnsupportedError: no kernel exists for it.
    """
    return _layers(choice, table, _contents(choice))


def _contents(choice: PlanChoice) -> Contents | None:
    """What the checkpoint holds, its experts as the recipe would store them; None of a name."""
    if (choice.model is None) == (choice.checkpoint is None):
        given = "neither" if choice.model is None else "both"
        raise InvalidArgumentError(f"--model, --checkpoint: got {given}, must be exactly one")
    if choice.checkpoint is None:
        return None
    recipe = None if choice.recipe is None else parse_recipe(choice.recipe)
    return scan(Checkpoint.open(choice.checkpoint), recipe)


def _layers(
    choice: PlanChoice, table: TileTable | None, contents: Contents | None
) -> tuple[LayerSpec, ...]:
    if choice.table is not None:
        table = find_table(choice.table)
    if contents is None:
        assert choice.model is not None
        is_even = choice.is_even
        specs = (_named(choice.model, choice),) if is_even else _ranks(choice.model, choice)
    else:
        specs = _stored(contents, choice)
    if choice.table is not None and any(isinstance(spec, TrellisMoeSpec) for spec in specs):
        raise UnsupportedError(
            f"--table: got {choice.table!r}, no table of tiles cuts EXL3's kernels"
        )
    changes = {"batch_invariant": choice.batch_invariant, "table": table or default_table()}
    return tuple(
        replace(spec, **changes)
        if isinstance(spec, MoeSpec)
        else replace(spec, batch_invariant=choice.batch_invariant)
        for spec in specs
    )


def make_table_specs(choice: PlanChoice, table: TileTable | None = None) -> tuple[MoeSpec, ...]:
    """As `make_specs`, of layers whose tiles come from a table.

    Raises
        UnsupportedError: the kernels of a layer are not cut by a table.
    """
    found: list[MoeSpec] = []
    for spec in make_specs(choice, table):
        if not isinstance(spec, MoeSpec):
            raise UnsupportedError(
                f"recipe: {spec.title}, must be of integers, FP4 or NF3: no table "
                "of tiles cuts EXL3's kernels"
            )
        found.append(spec)
    return tuple(found)


def _ranks(model: str, choice: PlanChoice) -> tuple[LayerSpec, ...]:
    """Each kind of rank of a model's layer; stderr says which ranks are which."""
    whole = _named(model, replace(choice, tp=1))
    check_ranks(choice.tp, choice.ep, whole.num_experts)
    recipe = parse_recipe(choice.recipe or _DEFAULT_RECIPE)
    ranks = named_ranks(whole, recipe, tp=choice.tp, ep=choice.ep)
    even = _even(whole, choice.tp)
    if choice.tp > 1 and even is not None and set(ranks) != {even}:
        # Groups of 16 (NVFP4) can be dealt out evenly where units of 32 cannot.
        sizes = ", ".join(str(spec.intermediate_size) for spec in dict.fromkeys(ranks))
        stderr().print(
            f"--tp: each rank has {even.intermediate_size} columns here, those of vLLM have "
            f"{sizes}: --checkpoint plans them",
            highlight=False,
        )
        return (even,)
    specs = places_by({(0, rank): spec for rank, spec in enumerate(ranks)})
    _print_kinds(specs, len(ranks))
    return tuple(specs)


def _even(whole: LayerSpec, tp: int) -> LayerSpec | None:
    """A rank's layer where ranks have whole scale groups and equally many."""
    try:
        return whole.shard(tp)
    except (InvalidArgumentError, UnsupportedError):
        return None


def _print_kinds(specs: Mapping[LayerSpec, Sequence[Place]], ranks: int) -> None:
    """Say which layers and ranks have which spec, where they differ."""
    if len(specs) == 1:
        return
    layers = {layer for places in specs.values() for layer, _ in places}
    for spec, places in specs.items():
        told = where(places, ranks=ranks, layers=layers)
        stderr().print(f"{told}: {spec.title}", highlight=False)


def _named(model: str, choice: PlanChoice) -> LayerSpec:
    """One of ranks that are alike."""
    name = choice.recipe or _DEFAULT_RECIPE
    recipe = parse_recipe(name)
    if recipe.code is not None:
        return trellis_geometry(model, recipe.code, tensor_parallel=choice.tp)
    if name in NAMED_FORMATS:
        return geometry(model, tensor_parallel=choice.tp, element=name)
    if recipe.element not in ("int3", "int4") or recipe.group_size not in GROUP_SIZES:
        raise UnsupportedError(f"recipe: got {name!r}, kernels exist for {RECIPES}")

    def sized(group_size: int) -> MoeSpec:
        return geometry(
            model,
            tensor_parallel=choice.tp,
            element=recipe.element,
            group_size=group_size,
            has_zero_points=recipe.has_zero_points,
        )

    try:
        return sized(recipe.group_size)
    except UnsupportedError as error:
        fitting = [
            f"{recipe.element}-g{size}" for size in GROUP_SIZES if _is_supported(sized, size)
        ]
        raise UnsupportedError(
            f"--recipe: got {name}, must be one of {', '.join(fitting) or 'none'} for {model}: "
            f"{error}"
        ) from error


def _is_supported(sized: Callable[[int], MoeSpec], group_size: int) -> bool:
    try:
        sized(group_size)
    except (InvalidArgumentError, UnsupportedError):
        return False
    return True


def _linears(choice: PlanChoice, contents: Contents) -> tuple[TrellisLinearSpec, ...]:
    """Each kind of EXL3 linear that has kernels; stderr says how many have none, and why."""
    dtype = _dtype(contents.checkpoint.config)
    specs: list[TrellisLinearSpec] = []
    refused: Counter[str] = Counter()
    given = {"--tp": choice.tp, "--ep": choice.ep}
    shared = "".join(f"{name}: got {ranks}" for name, ranks in given.items() if ranks > 1)
    for source in contents.dense:
        if not isinstance(source.scheme, TrellisScheme):
            continue
        if shared:
            refused[f"{shared}, linears are planned whole, with 1"] += 1
            continue
        try:
            specs.append(trellis_linear_spec_of(source.scheme, dtype=dtype))
        except UnsupportedError as error:
            refused[str(error)] += 1
    for reason, count in refused.items():
        stderr().print(f"{count} linear{'s' * (count > 1)}: {reason}", highlight=False)
    return tuple(dict.fromkeys(united(specs).values()))


def _stored(contents: Contents, choice: PlanChoice) -> tuple[LayerSpec, ...]:
    """Each kind of layer and rank of a checkpoint that has kernels; stderr says which have none."""
    check_ranks(choice.tp, choice.ep, contents.geometry.num_experts)
    ranks = max(choice.tp, choice.ep)
    found: dict[Place, LayerSpec] = {}
    refused: dict[Place, str] = {}
    for layer in contents.experts:
        if layer.layer >= contents.geometry.num_layers:
            continue
        places = [(layer.layer, rank) for rank in range(ranks)]
        try:
            _check_packed(layer)
            parts = stored_ranks(layer, tp=choice.tp, ep=choice.ep)
        except UnsupportedError as error:
            refused |= dict.fromkeys(places, str(error))
            continue
        for place, part in zip(places, parts, strict=True):
            try:
                found[place] = _layer_spec(contents, part)
            except UnsupportedError as error:
                refused[place] = str(error)
    specs = places_by(_united_by_rank(found))
    notes = [f"{where(at, ranks=ranks)}: {reason}" for reason, at in places_by(refused).items()]
    if not specs:
        raise UnsupportedError("; ".join(notes))
    for note in notes:
        stderr().print(note, highlight=False)
    _print_kinds(specs, ranks)
    return tuple(specs)


def _united_by_rank(found: Mapping[Place, LayerSpec]) -> dict[Place, LayerSpec]:
    """Layers of EXL3 that share a plan: those of a rank, which knows of no other's rates."""
    own: dict[int, list[TrellisMoeSpec]] = {}
    for (_, rank), spec in found.items():
        if isinstance(spec, TrellisMoeSpec):
            own.setdefault(rank, []).append(spec)
    same = {rank: united(specs) for rank, specs in own.items()}
    return {
        (layer, rank): same[rank][spec] if isinstance(spec, TrellisMoeSpec) else spec
        for (layer, rank), spec in found.items()
    }


def _check_packed(layer: ExpertLayer) -> None:
    if not layer.is_packed:
        raise UnsupportedError(
            f"no kernel for these experts: they are stored plain; --recipe plans them as if "
            f"quantised on load, {RECIPES}"
        )


def _layer_spec(contents: Contents, layer: ExpertLayer) -> LayerSpec:
    """Of a layer, or of a rank's part of it."""
    sizes, config = contents.geometry, contents.checkpoint.config
    num_experts = len(layer.sources[0])
    given: dict[str, Any] = {
        "num_experts": num_experts,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": layer.scheme(2).k,
        "top_k": _top_k(config),
        "activation": stored_activation(contents.family, config),
        "dtype": _dtype(config),
        "has_bias": contents.family.has_bias,
        # Kernels of a rank that has some of the experts read a map.
        "num_global_experts": None if num_experts == sizes.num_experts else sizes.num_experts,
    }
    if isinstance(layer.scheme(0), TrellisScheme):
        w13, w2 = (cast(Sequence[TrellisScheme], layer.schemes(*each)) for each in ((0, 1), (2,)))
        return trellis_moe_spec_of(w13, w2, **given)
    return moe_spec_of(layer.scheme(0), layer.scheme(2), **given)


def _top_k(config: Mapping[str, Any]) -> int:
    value = config.get("num_experts_per_tok")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {value!r}, must be a positive integer"
        )
    return value


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    # Before transformers 5 it was torch_dtype.
    name = str(config.get("dtype", config.get("torch_dtype")))
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"config.json: dtype is {name!r}, must be bfloat16 or float16")
    return found


def _tables(made: Plan, seconds: float) -> Group:
    ranges = made.ranges()
    keys = table("key>", "kernel", "tokens", "what sets it apart", "warps>", "stages>")
    for number, cells in enumerate(key_cells(made.keys)):
        kernel, apart, warps, stages = cells
        tokens = spans(ranges[made.keys[number]])
        keys.add_row(str(number), kernel, tokens, apart, warps, stages)
    regions = table("workspace", "dtype", "shape", "bytes>")
    for region in made.workspace.regions.values():
        shape = " x ".join(map(str, region.shape))
        regions.add_row(region.name, region.dtype, shape, f"{region.num_bytes:,}")
    total = made.workspace.num_bytes
    regions.add_row("total", "", f"{format_bytes(total)} with padding", f"{total:,}")
    title = f"{made.spec.title}: {len(made.keys)} keys for 0..{made.max_tokens} tokens"
    return Group(title, "", keys, "", regions, "", f"digest {made.digest}, {seconds:.2f} s")
