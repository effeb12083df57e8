import pytest

from firesteel.cli.console import format_bytes, stdout, table


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (143_360, "143 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (4_205_312, "4.21 MB"),
        (17_200_000_000, "17.2 GB"),
        (3_000_000_000_000, "3 TB"),
    ],
)
def test_bytes_have_three_digits(num_bytes: int, text: str):
    assert format_bytes(num_bytes) == text


def test_cells_are_never_cut_where_there_is_no_terminal(capsys):
    made = table("name", "number>")
    made.add_row("n" * 120, "1")
    stdout().print(made)
    assert "n" * 120 in capsys.readouterr().out
