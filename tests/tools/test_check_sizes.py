from pathlib import Path

import pytest

from tools.check_sizes import check_source, find_sources, main


def make_function(num_lines: int, decorator: str = "", parameters: str = "") -> str:
    body = "    pass\n" * (num_lines - 1)
    return f"{decorator}\ndef work({parameters}):\n{body}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (make_function(81), "2: function work: 81 lines, at most 80"),
        (make_function(151, "@triton.jit"), "2: kernel work: 151 lines, at most 150"),
        (make_function(151, "@jit(noinline=True)"), "2: kernel work: 151 lines, at most 150"),
        ("x = 1\n" * 501, "1: file: 501 lines, at most 500"),
        (
            make_function(2, parameters="a, b, /, c, d, e, f, g=1"),
            "2: function work: 7 positional parameters, at most 6; make the rest keyword-only",
        ),
    ],
)
def test_over_the_limit_is_one_message(source, message):
    assert check_source(source) == [message]


@pytest.mark.parametrize(
    "source",
    [
        make_function(80),
        make_function(150, "@triton.jit(do_not_specialize=['n'])"),
        make_function(2, "@triton.jit", "a, b, c, d, e, f, g, h"),
        make_function(150, "@gluon.jit", "a, b, c, d, e, f, g, h"),
        make_function(2, parameters="a, b, c, d, e, f, *, g, h"),
        "x = 1\n" * 500,
        "class Box:\n    def work(self, a, b, c, d, e, f): pass\n",
        "",
    ],
)
def test_at_the_limit_is_fine(source):
    assert check_source(source) == []


def test_main_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner" / "long.py"
    path.write_text(make_function(81))
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"{path}:2: function work")


def test_missing_path_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="must be a file or folder"):
        find_sources([tmp_path / "absent"])
