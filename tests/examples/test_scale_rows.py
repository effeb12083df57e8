"""The README's kernel: the same text as the example, and it runs on the stub driver."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from examples.scale_rows.scale_rows import ScaleRows
from firesteel.launch import plan
from firesteel.launch.stub import StubDriver
from tests.launch.rig import call_of, ready_on_stub, tensors_of

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "scale_rows" / "scale_rows.py"


def test_the_readme_shows_the_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (shown,) = [block for block in blocks if "@triton.jit" in block]
    assert shown.rstrip() in EXAMPLE.read_text()


def run(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a script prints."""
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def test_what_the_readme_shows_runs_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (shown,) = [block for block in blocks if "@triton.jit" in block]
    (planned,) = [line for block in blocks for line in block.splitlines() if "made = plan(" in line]
    pasted = tmp_path / "pasted.py"
    pasted.write_text(f"{shown}\n{planned}\nprint(len(made.keys), 'keys')\n")
    assert run(pasted, capsys) == "4 keys\n"


def test_files_that_the_readme_names_in_commands_exist() -> None:
    words = re.findall(r"--traffic (\S+)", (ROOT / "README.md").read_text())
    assert words
    assert all((ROOT / word).is_file() for word in words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_example_prints_its_plan_where_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = run(EXAMPLE, capsys)
    assert "scale rows of 96: 4 keys for 0..1000 tokens" in printed
    assert "no GPU here: planned, not run" in printed


def test_what_the_readme_says_of_it() -> None:
    made = plan(ScaleRows(k=96), max_tokens=1000)
    assert len(made.keys) == 4
    driver = StubDriver.open()
    driver.reset()
    ready = ready_on_stub(made, driver)
    # Each kernel was launched once on empty work.
    assert driver.num_launches() == 4
    driver.reset()
    flags = (("dtype", "fp32"),)
    bound = ready.bind(tensors_of(made.spec, flags), ready.arena(), dtype="fp32")
    for num_tokens in (0, 1, 63, 64, 1000):
        assert bound.run(*call_of(made.spec, flags, num_tokens)) == (num_tokens > 0)
    grids = [launch.grid for launch in driver.launches()]
    assert grids == [(1, 1, 1), (48, 1, 1), (6, 1, 1), (94, 1, 1)]
