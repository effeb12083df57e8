"""Make the checkpoints of tests/data: `python make_checkpoints.py TOOL [--only NAME]`.

Run each tool in an environment of its own (requirements/TOOL.txt), then `reference` in one
with requirements/reference.txt. README.md says the order.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

TOOLS = {
    "llmcompressor": ("llmcompressor_tool", "CASES"),
    "compressed-tensors-0.17": ("llmcompressor_tool", "OLD_CASES"),
    "auto-round": ("auto_round_tool", "CASES"),
    "gptqmodel": ("gptqmodel_tool", "CASES"),
    "modelopt": ("modelopt_tool", "CASES"),
    "before": ("before", "CASES"),
    "reference": ("reference", "CASES"),
}


def main() -> None:
    """Parse the command line and make every wanted checkpoint."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        # auto-round writes lists in the order of a set of strings.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=sorted(TOOLS))
    parser.add_argument("--only", help="make just the checkpoint of this name")
    parser.add_argument("--work", type=Path, default=Path("/tmp/firesteel-checkpoints"))
    args = parser.parse_args()
    module_name, cases_name = TOOLS[args.tool]
    module = importlib.import_module(f"checkpoint_maker.{module_name}")
    cases = [c for c in getattr(module, cases_name) if args.only in (None, c.name)]
    if not cases:
        parser.error(f"--only: got {args.only!r}, no such checkpoint of {args.tool}")
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    # Some tools leave logs where they run.
    os.chdir(work)
    for case in cases:
        module.make(case, work, args.tool)


if __name__ == "__main__":
    main()
