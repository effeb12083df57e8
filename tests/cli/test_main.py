import re
import sys

import pytest

import firesteel
from firesteel.cli.main import app
from firesteel.errors import CheckpointError
from tests.cli.command import INT4, assert_error, invoke, run_apart


def test_help_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("generate", "inspect", "env", "bench"):
        assert command in result.stdout


def test_no_command_prints_the_help():
    assert invoke().stdout == invoke("--help").stdout


def test_version():
    assert invoke("--version").stdout.strip() == firesteel.__version__


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], ["nope"]),
        (["inspect"], ["CHECKPOINT"]),
        (["inspect", "a", "b"], ["b"]),
        (["inspect", "--nope"], ["--nope"]),
        (["generate", "x", "--seed", "one"], ["--seed"]),
        (["generate", "x", "--max-new-tokens"], ["--max-new-tokens"]),
        (["bench"], ["command"]),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], words: list[str]):
    assert_error(invoke(*arguments), *words)


def test_a_missing_checkpoint_is_one_line(tmp_path):
    assert_error(invoke("inspect", tmp_path), "config.json")
    assert_error(invoke("inspect", tmp_path / "nowhere"), "nowhere", "must be a folder")


def test_an_error_of_several_lines_is_printed_as_one(monkeypatch):
    def fail(*_, **__):
        raise CheckpointError("shape: got\n  [1]\x1b[31m,\n must be [2]")

    monkeypatch.setattr("firesteel.cli.inspection.run", fail)
    result = invoke("inspect", INT4)
    assert_error(result)
    assert result.stderr == "error: shape: got [1]?[31m, must be [2]\n"


def test_an_interrupt_exits_with_130(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("firesteel.cli.inspection.run", interrupt)
    assert invoke("inspect", INT4).exit_code == 130


def test_an_unexpected_exception_keeps_its_traceback():
    # In the place of the command's own module, which takes long to import.
    code = """
import sys, types
def fail(*_, **__):
    raise ZeroDivisionError("a bug")
sys.modules["firesteel.cli.inspection"] = types.SimpleNamespace(run=fail)
"""
    done = run_apart("inspect", INT4, code=code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError: a bug" in done.stderr


def test_the_entry_point_is_this_app():
    assert app.info.cls is not None
    done = run_apart("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == firesteel.__version__


def test_help_imports_no_torch():
    code = "import atexit, sys; atexit.register(lambda: sys.exit(print(sorted(sys.modules))))"
    done = run_apart("--help", code=code)
    assert done.returncode == 0
    modules = set(re.findall(r"'(\w+)'", done.stdout.splitlines()[-1]))
    assert "typer" in modules
    assert not {"torch", "transformers"} & modules
    assert sys.modules["torch"] is not None
