"""The cache that processes share, and bundles: whole files or none, whatever happens."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from firesteel.errors import InvalidArgumentError
from firesteel.launch import plan, store
from firesteel.launch.binary import Binary
from firesteel.launch.store import Bundle, Cache, write_bundle
from tests.launch.gather_rows import GatherRows
from tests.launch.rig import pretended, warnings_of

ROOT = Path(__file__).parent.parent.parent
PLAN = plan(GatherRows(), 40)
BINARIES = [pretended(PLAN.kernels[key.kernel], key, "sm_90") for key in PLAN.keys]
FIRST, SECOND, *_ = BINARIES


def entry(folder: Path, binary: Binary) -> Path:
    return folder / "kernels" / binary.digest[:2] / f"{binary.digest}.kernel"


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    cache = Cache(tmp_path)
    for binary in BINARIES:
        cache.write(binary)
    return tmp_path


def test_what_is_written_is_read(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert [Cache(filled).read(binary.digest) for binary in BINARIES] == BINARIES
    assert sorted(files_of(filled)) == sorted(entry(filled, binary) for binary in BINARIES)
    assert warnings_of(caplog) == []


def test_what_was_never_written_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Cache(tmp_path).read(FIRST.digest) is None
    assert Cache(tmp_path / "new").read(FIRST.digest) is None
    assert warnings_of(caplog) == []


def test_no_folder_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cache = Cache(None)
    cache.write(FIRST)
    assert cache.read(FIRST.digest) is None
    assert files_of(tmp_path) == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def swap(path: Path) -> None:
    path.write_bytes(SECOND.to_bytes())


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def nested(path: Path) -> None:
    body = b"[" * 100_000
    path.write_bytes(sha256(body).hexdigest().encode() + b"\n" + body)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "bit flipped": flip,
    "empty": lambda path: path.write_bytes(b""),
    "another kernel's": swap,
    "a folder": make_folder,
    "nested": nested,
    "text": lambda path: path.write_text("hello\n{}\n"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_entry_is_rebuilt_with_one_warning(
    filled: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for binary in BINARIES:
        if binary != SECOND:
            DAMAGES[damage](entry(filled, binary))
    cache = Cache(filled)
    assert [cache.read(binary.digest) for binary in BINARIES] == [
        binary if binary == SECOND else None for binary in BINARIES
    ]
    (message,) = warnings_of(caplog)
    assert message.startswith(f"kernel cache: {entry(filled, FIRST)}: ")
    assert message.endswith("; compiled again")
    if damage == "a folder":
        return
    for binary in BINARIES:
        cache.write(binary)
    assert [Cache(filled).read(binary.digest) for binary in BINARIES] == BINARIES
    assert len(warnings_of(caplog)) == 1


def test_an_entry_for_another_target_is_corrupt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path)
    cache.write(replace(FIRST, target="sm_120"))
    assert cache.read(FIRST.digest, "sm_90") is None
    assert "it is for sm_120, not sm_90; compiled again" in warnings_of(caplog)[0]
    cache.write(FIRST)
    assert cache.read(FIRST.digest, "sm_90") == FIRST


def test_a_folder_whose_name_cannot_be_is_worked_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = Cache(Path("a\0b"))
    cache.write(FIRST)
    assert cache.read(FIRST.digest) is None
    (message,) = warnings_of(caplog)
    assert "null byte" in message
    assert message.endswith("kernels of this process are not kept")


def fail_with(number: int) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


class FullFile:
    """A file on a disk that fills up after a few bytes."""

    def __init__(self, handle: int, mode: str) -> None:
        self._file = open(handle, mode)  # noqa: SIM115

    def __enter__(self) -> "FullFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self._file.write(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("place", "fault", "words"),
    [
        ((os, "fdopen"), FullFile, "No space left"),
        ((os, "replace"), fail_with(errno.ENOSPC), "No space left"),
        ((os, "replace"), fail_with(errno.EROFS), "Read-only file system"),
        ((tempfile, "mkstemp"), fail_with(errno.EROFS), "Read-only file system"),
        ((tempfile, "mkstemp"), fail_with(errno.EACCES), "Permission denied"),
        ((Path, "mkdir"), fail_with(errno.EDQUOT), "quota"),
    ],
)
def test_a_disk_that_is_full_or_read_only_is_worked_without(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: tuple[object, str],
    fault: object,
    words: str,
) -> None:
    cache = Cache(tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr(*place, fault)
        for binary in BINARIES:
            cache.write(binary)
    (message,) = warnings_of(caplog)
    assert words in message
    assert "kernels of this process are not kept" in message
    # Neither half a file nor a temporary one is left.
    assert files_of(tmp_path) == []
    cache.write(FIRST)
    assert Cache(tmp_path / "cache").read(FIRST.digest) == FIRST


@pytest.mark.parametrize("place", ["", "kernels"])
def test_a_file_where_the_folder_should_be_is_worked_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    folder = tmp_path / "cache"
    if place:
        folder.mkdir()
    (folder / place).write_text("mine")
    cache = Cache(folder)
    for binary in BINARIES:
        assert cache.read(binary.digest) is None
        cache.write(binary)
    assert len(warnings_of(caplog)) == 1
    assert (folder / place).read_text() == "mine"


def test_a_temporary_file_is_never_an_entry(filled: Path) -> None:
    # As a process that was killed while it wrote leaves it.
    path = entry(filled, FIRST)
    path.rename(path.with_name(f".{path.name}-abc123"))
    assert Cache(filled).read(FIRST.digest) is None
    Cache(filled).write(FIRST)
    assert Cache(filled).read(FIRST.digest) == FIRST


WRITER = """
import sys
from pathlib import Path
from firesteel.launch.binary import Binary
from firesteel.launch.store import Cache

cache = Cache(Path(sys.argv[1]))
made = Binary.from_bytes(Path(sys.argv[2]).read_bytes(), sys.argv[3])
for _ in range(100):
    cache.write(made)
    assert cache.read(made.digest) == made
"""


def test_many_processes_write_and_read_one_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Large, so that a file that is not written at once would be read in parts.
    large = replace(FIRST, image=b"cubin" * 100_000)
    source = tmp_path / "source"
    source.write_bytes(large.to_bytes())
    folder = tmp_path / "cache"
    command = [sys.executable, "-c", WRITER, str(folder), str(source), large.digest]
    writers = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    cache = Cache(folder)
    read = 0
    while not folder.exists() and any(writer.poll() is None for writer in writers):
        # They still import.
        time.sleep(0.01)
    while any(writer.poll() is None for writer in writers):
        found = cache.read(large.digest)
        assert found in (None, large)
        read += found is not None
    assert [writer.returncode for writer in writers] == [0, 0]
    assert read
    assert warnings_of(caplog) == []
    assert files_of(folder) == [entry(folder, large)]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    total = write_bundle(folder, BINARIES, plans=[PLAN.digest], targets=["sm_90"])
    assert total == sum(len(binary.to_bytes()) for binary in BINARIES)
    return folder


def test_a_bundle_gives_its_kernels_back(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = Bundle(bundle)
    assert [opened.read(binary.digest, "sm_90") for binary in BINARIES] == BINARIES
    assert opened.manifest["plans"] == [PLAN.digest]
    assert opened.manifest["targets"] == ["sm_90"]
    assert {path.name for path in bundle.iterdir()} == {
        "manifest.json",
        *(f"{binary.digest}.kernel" for binary in BINARIES),
    }
    assert warnings_of(caplog) == []


def change_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text(""),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").write_text('"text"'),
        lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"),
        lambda folder: change_manifest(folder, entries=None),
        lambda folder: change_manifest(folder, entries=5),
        lambda folder: change_manifest(folder, entries=["a"]),
        lambda folder: change_manifest(folder, targets=None),
        lambda folder: change_manifest(folder, targets=90),
        lambda folder: change_manifest(folder, triton=None),
        lambda folder: change_manifest(folder, targets="sm_90"),
        lambda folder: change_manifest(folder, targets=[90]),
        lambda folder: change_manifest(folder, triton=["3.7"]),
        lambda folder: change_manifest(folder, plans=None),
        lambda folder: change_manifest(folder, entries={"a": 5}),
        lambda folder: change_manifest(folder, format=None),
        lambda folder: change_manifest(folder, format=True),
        lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
    ],
)
def test_a_corrupt_manifest_is_refused(bundle: Path, change: Callable[[Path], object]) -> None:
    change(bundle)
    with pytest.raises(InvalidArgumentError, match=r"bundle: .* has no readable manifest\.json"):
        Bundle(bundle)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgumentError, match="must be a folder that `firesteel build` made"):
        Bundle(tmp_path / name)


def test_a_bundle_of_another_format_is_refused(bundle: Path) -> None:
    change_manifest(bundle, format=99)
    with pytest.raises(InvalidArgumentError, match="is of format 99, not 1"):
        Bundle(bundle)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "its hash does not match its bytes"),
        (flip, "its hash"),
        (swap, "its hash is not the manifest's"),
        (Path.unlink, "No such file"),
    ],
)
def test_a_corrupt_kernel_of_a_bundle_is_left_with_one_warning(
    bundle: Path,
    damage: Callable[[Path], object],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for binary in (FIRST, *BINARIES[2:]):
        damage(bundle / f"{binary.digest}.kernel")
    opened = Bundle(bundle)
    assert [opened.read(binary.digest, "sm_90") for binary in BINARIES] == [
        binary if binary == SECOND else None for binary in BINARIES
    ]
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"bundle {bundle} cannot be used: {FIRST.digest}.kernel: ")
    assert message in warning
    assert warning.endswith("; compiling instead")


def test_a_kernel_whose_hash_is_not_the_manifests_is_left(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Whole and of the right digest, but not what was built: its machine code is another.
    (bundle / f"{FIRST.digest}.kernel").write_bytes(replace(FIRST, image=b"else").to_bytes())
    assert Bundle(bundle).read(FIRST.digest, "sm_90") is None
    assert "its hash is not the manifest's" in warnings_of(caplog)[0]


@pytest.mark.parametrize(
    ("changes", "target", "message"),
    [
        ({"targets": ["sm_100", "sm_120"]}, "sm_90", "for sm_100, sm_120, this device is sm_90"),
        ({"triton": "9.9.9"}, "sm_90", "it was made by Triton 9.9.9, here is "),
        ({}, "sm_90", "it was made of other sources, another plan, or in another environment"),
    ],
)
def test_a_foreign_bundle_says_why_with_one_warning(
    bundle: Path,
    changes: dict[str, object],
    target: str,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    change_manifest(bundle, **changes)
    opened = Bundle(bundle)
    assert opened.read("0" * 64, target) is None
    assert opened.read("1" * 64, target) is None
    (warning,) = warnings_of(caplog)
    assert message in warning


def test_an_empty_folder_is_taken_and_another_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    write_bundle(folder, BINARIES[:1], plans=[], targets=["sm_90"])
    with pytest.raises(
        InvalidArgumentError, match=r"out: .* exists, must be new or an empty folder"
    ):
        write_bundle(folder, BINARIES, plans=[], targets=["sm_90"])
    assert len(Bundle(folder).manifest["entries"]) == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    write_bundle(empty, BINARIES, plans=[], targets=["sm_90"])
    assert len(Bundle(empty).manifest["entries"]) == len(BINARIES)


@pytest.mark.parametrize("kind", ["file", "under a file", "dangling link", "link to a folder"])
def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "target").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    folder = (
        tmp_path
        / {
            "file": "file",
            "under a file": "file/bundle",
            "dangling link": "dangling",
            "link to a folder": "link",
        }[kind]
    )
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidArgumentError, match=r"^out: "):
        write_bundle(folder, BINARIES, plans=[], targets=["sm_90"])
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "target").iterdir()) == []


def failing(number: int) -> Iterator[Binary]:
    yield from BINARIES[:number]
    raise MemoryError("the compiler gave up")


def test_a_bundle_whose_kernels_fail_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match="gave up"):
        write_bundle(tmp_path / "bundle", failing(2), plans=[], targets=["sm_90"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "name"),
    [(Path, "write_bytes"), (Path, "write_text"), (Path, "replace"), (store.tempfile, "mkdtemp")],
)
def test_a_bundle_on_a_full_disk_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: object, name: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(where, name, fail_with(errno.ENOSPC))
        with pytest.raises(InvalidArgumentError, match=r"out: cannot write .*No space left"):
            write_bundle(tmp_path / "bundle", BINARIES, plans=[], targets=["sm_90"])
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_of_one_bundle_the_second_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"

    def overtaken() -> Iterator[Binary]:
        yield FIRST
        write_bundle(folder, [SECOND], plans=[], targets=["sm_90"])

    with pytest.raises(InvalidArgumentError, match="out: cannot write"):
        write_bundle(folder, overtaken(), plans=[], targets=["sm_90"])
    assert list(Bundle(folder).manifest["entries"]) == [SECOND.digest]
    assert list(tmp_path.iterdir()) == [folder]
