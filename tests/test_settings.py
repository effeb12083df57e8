import ast
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from firesteel.errors import InvalidArgumentError
from firesteel.settings import MANIFEST, Settings, environment_markdown, variable

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "firesteel"

# What `firesteel build` leaves.
_made = TemporaryDirectory()
BUNDLE = Path(_made.name)
(BUNDLE / MANIFEST).touch()

# Of each variable: text, what it means, and texts that are refused.
VARIABLES: dict[str, tuple[str, object, tuple[str, ...]]] = {
    "FIRESTEEL_ON_MISS": ("compile", "compile", ("", "RAISE", "ignore")),
    "FIRESTEEL_LAUNCHER": ("python", "python", ("", "c", "None")),
    "FIRESTEEL_COMPILE_THREADS": ("3", 3, ("", "-1", "two", "1.0", "٣", "9" * 5000)),
    "FIRESTEEL_CACHE": ("off", "off", ("", "0", "false")),
    "FIRESTEEL_CACHE_DIR": ("/tmp/somewhere", Path("/tmp/somewhere"), ("", "  ")),
    "FIRESTEEL_BUNDLE": (str(BUNDLE), BUNDLE, ("", "/", "nowhere")),
    "FIRESTEEL_MAX_TOKENS": (" 17 ", 17, ("", "0", "-5", "1e3", "0x10")),
    "FIRESTEEL_VLLM": ("auto", "auto", ("", "on", "AUTO")),
}


def test_every_field_has_a_variable() -> None:
    assert {variable(field.name) for field in fields(Settings)} == set(VARIABLES)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_sets_its_field(name: str) -> None:
    text, value, _ = VARIABLES[name]
    field = name.removeprefix("FIRESTEEL_").lower()
    found = Settings.from_env({name: text, "PATH": "/bin"})
    assert found == Settings(**{field: value})
    assert getattr(found, field) == value
    assert getattr(Settings(), field) != value


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, (_, _, wrong) in VARIABLES.items() for text in wrong]
)
def test_a_wrong_value_is_refused_by_the_variables_name(name: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name}: got '.*', must be "):
        Settings.from_env({name: text})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FIRESTEEL_ON_MIS", "FIRESTEEL_ON_MIS: no such variable; did you mean FIRESTEEL_ON_MISS?"),
        ("FIRESTEEL_CACHEDIR", "did you mean FIRESTEEL_CACHE_DIR?"),
        ("FIRESTEEL_on_miss", "FIRESTEEL_on_miss: no such variable; did you mean FIRESTEEL_ON_M"),
        ("FIRESTEEL_FOO", "no such variable; there are FIRESTEEL_BUNDLE, FIRESTEEL_CACHE, "),
        ("FIRESTEEL_", "no such variable; there are FIRESTEEL_BUNDLE, FIRESTEEL_CACHE, "),
        ("FIRESTEEL_Z" * 3, "no such variable"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Settings.from_env({name: "1"})
    assert message in str(caught.value)


def test_other_names_are_left_alone() -> None:
    environ = {"firesteel_on_miss": "x", "MY_FIRESTEEL_CACHE": "x", "FIRESTEE": "x"}
    assert Settings.from_env(environ) == Settings.from_env({}) == Settings()


def test_the_processs_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = Settings.from_env()
    monkeypatch.setenv("FIRESTEEL_MAX_TOKENS", "12")
    assert Settings.from_env().max_tokens == 12
    assert before == Settings()


@pytest.mark.parametrize(
    "change",
    [
        {"on_miss": "never"},
        {"on_miss": ["raise"]},
        {"launcher": None},
        {"cache": True},
        {"cache_dir": "/tmp"},
        {"compile_threads": -1},
        {"compile_threads": True},
        {"max_tokens": 0},
        {"max_tokens": 8.0},
    ],
)
def test_a_wrong_value_is_refused_by_the_fields_name(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(InvalidArgumentError, match=f"^{name}: got .*, must be "):
        Settings(**change)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().on_miss = "warn"  # type: ignore[misc]


def test_the_cache_path_is_in_the_home_folder_or_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/elsewhere")
    assert Settings().cache_path == Path("/elsewhere/.cache/firesteel")
    assert Settings(cache="off").cache_path is None


def test_a_home_folder_that_is_not_known_is_refused() -> None:
    settings = Settings(cache_dir=Path("~nobody-of-this-name/cache"))
    with pytest.raises(InvalidArgumentError, match="cache_dir: got '~nobody-of-this-name/cache', "):
        _ = settings.cache_path
    assert Settings(cache="off", cache_dir=settings.cache_dir).cache_path is None


def test_the_page_of_variables_is_fresh() -> None:
    text = environment_markdown()
    assert (ROOT / "docs" / "environment.md").read_text() == text
    assert all(f"| `{name}` |" in text for name in VARIABLES)
    # Every field has a meaning.
    assert "|  |" not in text


def test_the_page_is_what_the_module_writes() -> None:
    command = [sys.executable, "-m", "firesteel.settings"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == environment_markdown()


# The file, and why it may: it counts the reads of others, and reads nothing itself.
ALLOWED = {"settings.py", "launch/watch.py"}
READERS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv", "expandvars"}


def environment_names(source: str) -> list[str]:
    """What of the `os` module's environment the code names, in any form."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in READERS:
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "posix", "os.path"):
            found += [alias.name for alias in node.names if alias.name in READERS]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['A']",
        "import os as o\nx = o.getenv('A')",
        "from os import environ as e",
        "from os.path import expandvars",
    ],
)
def test_a_reader_of_the_environment_would_be_found(source: str) -> None:
    assert environment_names(source)


def test_only_settings_reads_the_environment() -> None:
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in sorted(SOURCES.rglob("*.py"))
        if environment_names(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED
