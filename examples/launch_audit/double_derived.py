"""Rebuilds what a library launches whose warm-up and run time derive kernel keys apart; audits it.

Usage: python examples/launch_audit/double_derived.py [--out FOLDER]

The fused MoE kernel of that library is compiled for tile sizes and for a largest number of tiles.
Its warm-up takes pinned tile sizes and the tiles of the plan's capacity; its run time chooses tile
sizes anew and counts the tiles of the call's own size class. Each is right by itself. With --out,
both lists of keys are written as `firesteel audit --plan ... --prewarmed ...` reads them.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from firesteel.cli.auditing import read_traffic
from firesteel.launch import LaunchKey, Replay, plan, replay
from firesteel.launch.audit import replay_keys
from firesteel.moe.plan import num_blocks
from firesteel.moe.spec import geometry

HERE = Path(__file__).parent
NUM_EXPERTS, TOP_K = 256, 8

PINNED_TILES = (64, 256, 64, 256)
"""K and N of a tile of FC1, then of FC2, as the warm-up is told."""

RUN_TIME_TILES = {8: (128, 128, 128, 128), 64: (64, 256, 64, 256)}
"""What run time chooses by the rows of a tile."""

EVERY_COUNT = 32
"""The warm-up asks for every token count of a plan up to so many tokens, else for the last only."""


@dataclass(frozen=True)
class Server:
    """A plan of that library, and the traffic that goes through it.

    Fields
        name        of the traffic file
        max_tokens  capacity of the plan
        block_m     rows of a tile
    """

    name: str
    max_tokens: int
    block_m: int

    @property
    def capacity_blocks(self) -> int:
        """Tiles that the workspace has room for."""
        return num_blocks(self.max_tokens * TOP_K, NUM_EXPERTS, self.block_m)

    def traffic(self) -> list[int]:
        return read_traffic(HERE / f"{self.name}.txt")


SERVERS = (
    Server("decode_32", 32, 8),
    Server("decode_64", 64, 8),
    Server("prefill_3072", 3072, 64),
    Server("prefill_8192", 8192, 64),
)


def fused_key(block_m: int, tiles: tuple[int, int, int, int], max_m_blocks: int) -> LaunchKey:
    """The key of the fused kernel: GLM-5.2, one of four ranks."""
    names = ("FC1_TILE_K", "FC1_TILE_N", "FC2_TILE_K", "FC2_TILE_N")
    sizes = {"HIDDEN": 6144, "INTERMEDIATE": 512, "NUM_EXPERTS": NUM_EXPERTS, "TOP_K": TOP_K}
    constexprs = {
        **sizes,
        "BLOCK_M": block_m,
        **dict(zip(names, tiles, strict=True)),
        "MAX_M_BLOCKS": max_m_blocks,
    }
    arguments = (("x_ptr", "*bf16@16"), ("out_ptr", "*bf16@16"), ("M", "i64"))
    return LaunchKey("library.fused_moe_kernel", arguments, tuple(constexprs.items()), num_warps=8)


def prewarmed_keys(server: Server) -> list[LaunchKey]:
    """First derivation: what the warm-up compiles."""
    is_small = server.max_tokens <= EVERY_COUNT
    counts = range(1, server.max_tokens + 1) if is_small else (server.max_tokens,)
    # The count itself is in no field: all of them give one key.
    keys = (fused_key(server.block_m, PINNED_TILES, server.capacity_blocks) for _ in counts)
    return list(dict.fromkeys(keys))


def run_time_keys(server: Server, num_tokens: int) -> Iterator[LaunchKey]:
    """Second derivation: what a call of so many tokens looks up."""
    if num_tokens == 0:
        return
    size_class = 1 << (num_tokens - 1).bit_length()
    blocks = num_blocks(size_class * TOP_K, NUM_EXPERTS, server.block_m)
    if blocks > server.capacity_blocks:
        blocks = num_blocks(num_tokens * TOP_K, NUM_EXPERTS, server.block_m)
    yield fused_key(server.block_m, RUN_TIME_TILES[server.block_m], blocks)


def run_time_plan(server: Server) -> dict[str, object]:
    """All that run time can look up, in the form of `firesteel plan --json`."""
    spans: dict[LaunchKey, list[list[int]]] = {}
    for num_tokens in range(server.max_tokens + 1):
        for key in run_time_keys(server, num_tokens):
            found = spans.setdefault(key, [])
            if found and found[-1][1] == num_tokens - 1:
                found[-1][1] = num_tokens
            else:
                found.append([num_tokens, num_tokens])
    return {
        "title": f"double-derived {server.name}",
        "max_tokens": server.max_tokens,
        "keys": [{**key.as_dict(), "tokens": tokens} for key, tokens in spans.items()],
    }


def audit_double_derived(server: Server) -> Replay:
    """The server's traffic against the keys of its warm-up."""
    return replay_keys(
        lambda num_tokens: run_time_keys(server, num_tokens),
        server.max_tokens,
        server.traffic(),
        prewarmed=prewarmed_keys(server),
    )


def audit_planned(max_tokens: int, traffic: list[int]) -> Replay:
    """The same traffic through firesteel's plan, whose one derivation is what it prewarms."""
    spec = geometry("glm-5.2", tensor_parallel=4)
    return replay(plan(spec, max_tokens, flags={"ids": ("i32",)}), traffic)


def describe(name: str, found: Replay) -> str:
    missed = sum(found.launches[miss.key] for miss in found.misses)
    return (
        f"{name:14}{len(found.prewarmed):3} keys prewarmed, {len(found.reached):2} reached; "
        f"{len(found.misses):2} keys missed, by {missed} of {sum(found.launches.values())} launches"
    )


def write(folder: Path, server: Server) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    keys = [key.as_dict() for key in prewarmed_keys(server)]
    (folder / f"{server.name}.prewarmed.json").write_text(json.dumps(keys, indent=1) + "\n")
    (folder / f"{server.name}.plan.json").write_text(json.dumps(run_time_plan(server)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write both lists of keys of each server here")
    out = parser.parse_args().out
    print("keys derived twice")
    for server in SERVERS:
        print(describe(server.name, audit_double_derived(server)))
        if out is not None:
            write(out, server)
    print("one derivation: firesteel's plan, int32 ids")
    decode = SERVERS[1].traffic()
    for server in SERVERS:
        # One plan serves decode and prefill.
        traffic = server.traffic() + (decode if server.block_m == 64 else [])
        print(describe(server.name, audit_planned(server.max_tokens, traffic)))


if __name__ == "__main__":
    main()
