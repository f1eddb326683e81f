"""A file is written whole or not at all, where it was meant to be, and by one process at a time."""

import os
import stat
import sys
import threading
from datetime import datetime

import pytest
from ladder_command import FAKES, measured
from made_up import make_env

from harness.records import files
from ladder import measuring

posix = pytest.mark.skipif(sys.platform == "win32", reason="links, pipes and modes")


def test_what_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "new" / "x.csv"
    files.write(path, "before\n")
    with pytest.raises(ZeroDivisionError), files.whole(path) as draft:
        draft.write_text("half")
        assert path.read_text() == "before\n" and draft.suffix == ".csv"
        raise ZeroDivisionError
    assert path.read_text() == "before\n" and [*path.parent.iterdir()] == [path]


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path):
    with pytest.raises(OSError, match=r"full\.csv") as error, files.whole(tmp_path / "full.csv"):
        raise OSError(28, "No space left on device")  # what a write raises names none
    assert error.value.filename == str(tmp_path / "full.csv")


def test_a_new_file_replaces_none_that_came_meanwhile(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(FileExistsError), files.whole(path, new=True) as draft:
        draft.write_text("ours")
        path.write_text("theirs")
    assert path.read_text() == "theirs" and [*tmp_path.iterdir()] == [path]
    with pytest.raises(FileExistsError), files.whole(path, new=True):
        raise AssertionError("told at the beginning")


@posix
def test_a_link_stays_a_link_and_a_mode_stays(tmp_path):
    path, link = tmp_path / "x", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to(path)
    files.write(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@posix
def test_a_pipe_or_device_is_written_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    files.write(pipe, "text")
    reader.join()
    assert got == ["text"] and pipe.is_fifo()
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    files.write(null, "text")
    owned = files.Owned(null)
    owned.replace(b"text")
    owned.close()
    assert null.is_symlink() and stat.S_ISCHR(null.stat().st_mode)


@posix
@pytest.mark.parametrize("fails", ["replace", "access"])
def test_a_file_whose_folder_takes_no_other_is_written_in_place(tmp_path, monkeypatch, fails):
    """As one that a container mounts by itself, or in a folder that is read-only."""
    path = tmp_path / "x"
    path.write_text("old")
    before = path.stat().st_ino

    def busy(*_):
        raise OSError(16, "Device or resource busy")

    if fails == "replace":
        monkeypatch.setattr(files.Path, "replace", busy)
    else:
        monkeypatch.setattr(files.os, "access", lambda *_: False)
    owned = files.Owned(path)
    for text in (b"new", b"newer"):
        owned.replace(text)
        assert path.read_bytes() == text
        with pytest.raises(BlockingIOError):
            files.Owned(path)
    owned.close()
    files.Owned(path).close()
    assert path.stat().st_ino == before and [*tmp_path.iterdir()] == [path]


def test_two_runs_that_begin_in_the_same_second_have_a_file_each(tmp_path, monkeypatch):
    class Frozen(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 1)

    monkeypatch.setattr(measuring, "datetime", Frozen)
    monkeypatch.setattr(measuring.environment, "make_env", lambda *_: make_env([]))
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        with measuring.begin("", None, "cpu", {}) as writer:
            names.append(writer.path.name)
    assert names == [f"20260101-000000{end}.jsonl" for end in ("", "-2", "-3")]


@pytest.mark.slow
def test_no_record_is_of_another_file_than_it_names(tmp_path):
    """As when somebody edits a stage while the command runs."""
    mine = FAKES.write(tmp_path, "edits_itself")
    asked = ("run", "--stages", 3, "--stage", mine, "--inputs", "normal", "--n", 8, "--d", 4)
    _, cells = measured(tmp_path, *asked, "--device", "cpu", code=1)
    [record] = cells["edits_itself"]
    assert record["status"] == "crashed" and "changed after this command began" in record["reason"]


@posix
def test_what_can_not_be_written_is_named_as_it_was_given(tmp_path):
    path = tmp_path / ("n" * 300)
    with pytest.raises(OSError) as raised:
        files.write(path, "")
    assert raised.value.filename == str(path)
