"""Temporary files lie in one folder, which is gone with its process; sockets fit where they lie."""

import functools
import os
import socket
import subprocess
import sys
import tempfile

import pytest
from ladder_command import PATIENCE, ROOT, environ

from harness.isolation import scratch

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sockets with names")

LONG = "a folder with a long name, as clusters and macOS have" * 3


@pytest.fixture
def long(tmp_path, monkeypatch):
    """The folder for temporary files has a long name; what is made is removed."""
    folder = tmp_path / LONG
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(scratch, "scratch", functools.cache(scratch.scratch.__wrapped__))
    made = []
    monkeypatch.setattr(scratch.atexit, "register", lambda remove, *args: made.append(args))
    yield folder
    for folder, pid in made:
        scratch.remove(folder, pid)
        assert not os.path.lexists(folder)


def test_a_long_name_of_the_folder_leaves_room_for_a_socket(long):
    folder = scratch.short_folder()
    name = f"{folder}/{'x' * (scratch.NAME - 1)}"
    assert len(os.fsencode(name)) <= scratch.LONGEST_SOCKET and str(long) not in folder
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)


def test_where_there_is_no_room_at_all_it_says_so(long, monkeypatch):
    monkeypatch.setattr(scratch, "SHORT", (str(long),))
    real = tempfile.mkdtemp

    def full(prefix, dir):
        if dir is not None:
            raise OSError(28, "No space left on device")
        return real(prefix=prefix)

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", full)
    with pytest.raises(OSError, match=f"its {len(str(long))} characters") as raised:
        scratch.short_folder()
    assert raised.value.filename == "TMPDIR"


@pytest.mark.slow
@pytest.mark.parametrize("name", [LONG, "absent"])
def test_a_run_takes_any_tmpdir_and_leaves_nothing_in_it(tmp_path, name):
    folder = tmp_path / name
    if name == LONG:
        folder.mkdir()
    asked = ("run", "--stages", "3", "--n", "8", "--d", "4", "--device", "cpu", "--out")
    done = subprocess.run(
        [sys.executable, "-m", "harness", *asked, tmp_path / "o.jsonl"], cwd=ROOT,
        env=environ(TMPDIR=str(folder)), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not folder.exists() or [*folder.iterdir()] == []
