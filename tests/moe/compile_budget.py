"""Print what each shipped key takes when it is compiled; with --write, make that the budget.

    python -m tests.moe.compile_budget --target sm_90 --only glm-5.2
    python -m tests.moe.compile_budget --write

Needs no GPU. Instructions a weight are those that all threads of a program run in a turn of its
main loop, over the weights that the turn takes; `tests.moe.sass` says which loop that is.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.moe.test_compile import BUDGET, TARGETS, measure

COLUMNS = {
    "registers": "registers",
    "spilled_bytes": "spilled, B",
    "shared_bytes": "shared, B",
    "matrix_instructions": "matrix",
    "waits": "waits",
    "turn_instructions": "a turn",
    "turn_blocks": "blocks",
    "instructions_a_weight": "a weight",
}


def limits(usage: Mapping[str, float]) -> dict[str, float]:
    """A row of the budget: what was measured, with the room that a compiler's patch level needs."""
    found: dict[str, float] = {
        # A GPU gives out registers in eights.
        "registers": 8 * math.ceil((usage["registers"] + 4) / 8),
        "spilled_bytes": usage["spilled_bytes"],
        "shared_bytes": usage["shared_bytes"],
    }
    if "instructions_a_weight" in usage:
        found["instructions_a_weight"] = math.ceil(103 * usage["instructions_a_weight"]) / 100
    return found


def budget_text(tables: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The budget as JSON, a row a line, so that a diff shows the rows that changed."""
    targets = [
        f" {json.dumps(target)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        + "\n }"
        for target, rows in tables.items()
    ]
    return "{\n" + ",\n".join(targets) + "\n}\n"


def usage_text(target: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """What was measured, as a table."""
    lines = [f"{target:<40}" + "".join(f"{head:>12}" for head in COLUMNS.values())]
    for name, row in rows.items():
        cells = (f"{round(row[field], 2)}" if field in row else "" for field in COLUMNS)
        lines.append(f"{name:<40}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--only", default="", metavar="PREFIX", help="rows that start with it")
    parser.add_argument("--write", action="store_true", help="rewrite the whole budget")
    chosen = parser.parse_args(arguments)
    if chosen.write and (chosen.target or chosen.only):
        parser.error("--write: got --target or --only, must measure every row")
    measured: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for target in chosen.target or TARGETS:
            measured[target] = measure(target, Path(folder), chosen.only)
            sys.stdout.write(usage_text(target, measured[target]))
    if chosen.write:
        tables = {
            target: {name: limits(usage) for name, usage in rows.items()}
            for target, rows in measured.items()
        }
        BUDGET.write_text(budget_text(tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
