import json
import re

import pytest
import torch

from firesteel.cli.bench.records import context, writer
from firesteel.errors import InvalidArgumentError


def test_context_names_the_machine_and_the_versions():
    found = context(torch.device("cpu"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    assert found["device"] == "cpu"
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["name"]


def test_lines_are_appended_as_they_come(tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    path.write_text('{"old": 1}\n')
    with writer(path, as_json=True) as write:
        write({"new": 2})
        assert path.read_text() == '{"old": 1}\n{"new": 2}\n'
    assert json.loads(capsys.readouterr().out) == {"new": 2}


def test_no_json_no_output(tmp_path, capsys):
    with writer(tmp_path / "out.jsonl", as_json=False) as write:
        write({"new": 2})
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"new": 2}


def test_a_file_that_cannot_be_opened(tmp_path):
    with (
        pytest.raises(InvalidArgumentError, match="--out: "),
        writer(tmp_path / "no" / "folder.jsonl", as_json=False),
    ):
        pass
