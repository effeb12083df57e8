import io
import pickle
import subprocess
import zipfile
from pathlib import Path

import pytest

from tools.check_hygiene import MAX_BYTES, check_file, list_files, main

PICKLE = pickle.dumps({"weight": 1})


def make_zip(member: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(member, b"")
    return stream.getvalue()


@pytest.mark.parametrize("folder", ["work", "root", "home/someone"])
@pytest.mark.parametrize("template", ["{}", "see {}.", "path='{}'"])
def test_machine_path_is_refused(folder, template):
    text = template.format(f"/{folder}/data")
    assert list(check_file("docs/a.md", text.encode())) == [f"docs/a.md:1: machine path /{folder}/"]


@pytest.mark.parametrize("text", ["a/work/b", "/homes/x/", "/workspace/", "~/root/x", "/home/"])
def test_other_path_is_fine(text):
    assert list(check_file("docs/a.md", text.encode())) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.pt", b""),
        ("a.dat", PICKLE),
        ("a.zip", make_zip("model/data.pkl")),
    ],
)
def test_pickle_is_refused(name, content):
    assert list(check_file(name, content)) == [f"{name}: a pickle; loading one can run code"]


def test_zip_without_pickle_is_fine():
    assert list(check_file("a.zip", make_zip("a.txt"))) == []


def test_large_file_needs_a_reason():
    content = b"\0" * (MAX_BYTES + 1)
    (message,) = check_file("tests/data/a.safetensors", content)
    assert message.startswith(f"tests/data/a.safetensors: {MAX_BYTES + 1} bytes")
    assert list(check_file("examples/little_moe/bf16/model.safetensors", content)) == []


def test_print_is_refused_in_src_only():
    source = b"x = 1\nprint(x)\n"
    (message,) = check_file("src/firesteel/a.py", source)
    assert message.startswith("src/firesteel/a.py:2: print")
    assert list(check_file("tools/a.py", source)) == []
    assert list(check_file("src/firesteel/a.py", b"'print(x)'\nconsole.print(x)\n")) == []


def test_main_reads_what_git_would_add(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "run.log").write_text("/".join(["", "root", "x"]))
    assert list_files(tmp_path) == [".gitignore"]
    assert main(tmp_path) == 0
    (tmp_path / "model.bin").write_bytes(PICKLE)
    assert main(tmp_path) == 1
    assert capsys.readouterr().out == "model.bin: a pickle; loading one can run code\n"
