"""A file of the current folder is imported by no process of ours in place of another module."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ladder_command import PATIENCE, ROOT, environ

from harness import search_path

RAW = ROOT / "stages" / "s01_raw_python.py"
OTHERS = """
torch triton numpy rich typer psutil matplotlib PIL click sympy networkx jinja2 pydantic harness
stages course ladder attention_ladder tqdm dill pandas scipy cupy onnx optree yaml transformers
flash_attn flashinfer
"""  # installed, ours, or looked for by one of these
NAMES = [*sys.stdlib_module_names, *OTHERS.split()]


@pytest.fixture
def here(tmp_path):
    """A folder with a file of each name, all of which leave a line in the file ../imported."""
    folder = tmp_path / "here"
    folder.mkdir()
    line = f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__ + '\\n')\nraise SystemExit\n"
    for name in NAMES:
        (folder / f"{name}.py").write_text(line, encoding="utf-8")
    return folder


SCRIPT = """
import sys
from harness.__main__ import main

if __name__ == "__main__":
    for sys.argv[1:] in {commands}:
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
"""


def ladder(here, *commands, path=str(ROOT)):
    """What comes of each of `ladder COMMANDS`, and what it imported from `here`.

    One process, started as pip's script starts it, carries them out.
    """
    script = here.parent / "ladder"
    texts = [[*map(str, command)] for command in commands]
    script.write_text(SCRIPT.format(commands=texts), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=here, env=environ(PYTHONPATH=path),
        capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    found = here.parent / "imported"
    return done, found.read_text(encoding="utf-8").split() if found.exists() else []


CPU = ("--device", "cpu")
SMALL = ("run", "--stages", "0,3", "--n", 8, "--d", 4, *CPU)
COMMANDS = [
    (*SMALL, "--stage", RAW),
    ("bench", "--stages", "0,3", "--n", 8, "--d", 4, "--causal", "on", *CPU),
    ("train", "--stage", 3, "--steps", 1, *CPU),
    ("generate", "--stage", 3, "--tokens", 4, "--context", 16, *CPU),
    ("doctor",), ("list",), ("lab", "check", RAW), ("lab", "grade", RAW, "--stage", 1),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("commands", [[SMALL], COMMANDS], ids=["run", "all"])
def test_no_name_in_the_current_folder_has_the_place_of_a_module(here, commands):
    done, imported = ladder(here, *commands)
    assert (done.returncode, imported) == (0, []), done


@pytest.mark.slow
def test_nor_where_pythonpath_has_the_current_folder(here):
    """As PYTHONPATH=$PYTHONPATH:x does, the first time. Its other spellings are tested below."""
    code = "import harness, sys; print(*sys.modules)"
    started = subprocess.check_output(
        [sys.executable, "-P", "-c", code], env=environ(), text=True
    ).split()
    for name in {*started} & {*NAMES}:  # what is imported before our first line
        (here / f"{name}.py").unlink()
    path = os.pathsep.join(["", str(here), str(ROOT), "."])
    done, imported = ladder(here, SMALL, path=path)
    assert (done.returncode, imported) == (0, []), done


@pytest.mark.slow
def test_a_submission_may_have_any_name(here):
    """Also graded from its own folder, by the judge and the server that others share."""
    text = RAW.read_text(encoding="utf-8")
    for name in ("math", "torch", "types"):
        (here / f"{name}.py").write_text(text, encoding="utf-8")
    for file in here.iterdir():
        if file.stem not in ("math", "torch", "types", "copy"):
            file.unlink()
    done, imported = ladder(here, ("lab", "grade", ".", "--stage", 1))
    said = [line for line in done.stdout.splitlines() if ": passed, 9 of 9" in line]
    assert (done.returncode, len(said)) == (0, 3), done
    assert "copy: crashed" in done.stdout and imported == []  # it was watched, and is ended


def test_only_the_current_folder_goes_and_only_before_the_library(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    site = f"{search_path.LIBRARY}/site-packages"
    rest = [search_path.LIBRARY, site, str(tmp_path)]
    given = ["", str(tmp_path), ".", str(other), f"{tmp_path}/other/..", "/nowhere", *rest]
    assert search_path.without_here(given) == [str(other), "/nowhere", *rest]
    monkeypatch.chdir(site if Path(site).is_dir() else search_path.LIBRARY)
    assert search_path.without_here(rest) == rest  # where the library itself is


@pytest.mark.parametrize("found", [None, "/elsewhere/ladder/__init__.py", "own"])
def test_a_checkout_is_imported_from_its_own_folder(monkeypatch, found):
    """Installed or not, or where another one is installed; never before Python's library."""
    root = search_path.ROOT
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", [root, search_path.LIBRARY, "/site"])
    origin = f"{root}/ladder/__init__.py" if found == "own" else found
    spec = found and importlib.util.spec_from_loader("ladder", None, origin=origin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    search_path.leave_here()
    expected = {
        None: [search_path.LIBRARY, "/site", root],
        "own": [search_path.LIBRARY, "/site"],
    }.get(found, [search_path.LIBRARY, root, "/site"])
    assert sys.path == expected
