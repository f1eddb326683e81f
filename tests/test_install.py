"""`make` in a newcomer's hands: odd folders, missing things, no network; no C++ compiler.

The Makefile is run for real, in a folder with a difficult name. What stands in for Python writes
down what it is asked for, so that nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# for `make PYTHON=...`: a Python of another version, or that lacks a module; sh starts it, since
# a first line can't name a Python whose path has spaces, and Python takes those lines for a text
PRETENDER = """#!/bin/sh
'''exec' '{python}' "$0" "$@"
' '''
import sys
sys.version_info = {version}
sys.modules.update({missing})
if sys.argv[1] == "-c":
    exec(sys.argv[2])
elif sys.argv[1] == "--version":
    print("Python 3.x")
else:
    sys.exit("a broken venv")
"""

# for .venv/bin/python: it fails on each call that has one of the words in the file `fails`
RECORDER = """#!/bin/sh
echo "$PIP_CONSTRAINT $*" >> calls
[ -z "$PIP_CONSTRAINT" ] || [ -f "$PIP_CONSTRAINT" ] || exit 1
for word in $(cat fails); do case "$*" in *"$word"*) exit 1;; esac; done
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with the Makefile and what it looks at."""
    folder = tmp_path / "it's a folder, with spaces"
    (folder / "csrc").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "fails").write_text("")
    return folder


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def make(folder, *words, **options):
    done = subprocess.run(
        ["make", "--silent", *map(str, words)],
        cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def pretender(folder, version=(3, 12, 0), missing=()):
    missing = dict.fromkeys(missing)
    text = PRETENDER.format(python=sys.executable, version=version, missing=missing)
    return script(folder / "a python", text)


def recorded(folder):
    """An environment whose Python writes down what it is asked for."""
    script(folder / ".venv" / "bin" / "python", RECORDER)


def calls(folder):
    lines = (folder / "calls").read_text().splitlines()
    (folder / "calls").unlink()
    return lines


# what PYTHON is, besides its name -> what is said; only a Debian without venv is told of apt
NOT_OURS = (3, 10, 13), (3, 15, 0), (2, 7, 18)
VERSIONS = [({"version": version}, "3.11 to 3.14") for version in NOT_OURS]
NO_VENV = [({"missing": [module]}, "python3-venv") for module in ("venv", "ensurepip")]


@pytest.mark.parametrize(
    ("python", "says"),
    [*VERSIONS, *NO_VENV, ({}, "a broken venv"), (None, "python9 is not there")],
)
def test_a_python_that_does_not_do_is_refused_and_it_is_said_why(checkout, python, says):
    path = "python9" if python is None else pretender(checkout, **python)
    code, said = make(checkout, "ladder", f"PYTHON={path}")
    assert code != 0 and says in said and ("PYTHON=" in said) >= (says == "3.11 to 3.14")
    assert ("apt" in said) == (says == "python3-venv") and not (checkout / ".venv").exists()


def test_a_folder_that_can_not_be_written_to_is_told(checkout):
    checkout.chmod(0o555)
    nobody = {"user": 65534} if os.geteuid() == 0 else {}  # root may write anywhere
    code, said = make(checkout, "ladder", f"PYTHON={sys.executable}", **nobody)
    checkout.chmod(0o755)
    assert code != 0 and "can't be written to" in said and "apt" not in said


def test_the_tour_installs_the_pins_first_and_once(checkout):
    recorded(checkout)
    code, said = make(checkout, "ladder")
    assert code == 0, said
    installs = [line for line in calls(checkout) if " install " in line]
    assert len(installs) == 1 and installs[0].startswith("constraints.txt ")
    assert installs[0].endswith("--editable .[notebooks]")  # which are executed by what it brings
    assert "Installing" in said and "Stage 2" not in said
    code, said = make(checkout, "ladder")
    assert (code, said) == (0, "")
    assert calls(checkout) == [" -m harness run"]


def test_the_tests_install_their_own_extra_too(checkout):
    recorded(checkout)
    assert make(checkout, "test")[0] == 0
    words = calls(checkout)
    assert any(line.endswith("--editable .[notebooks,test]") for line in words)
    assert any("pytest" in line for line in words)


def test_only_large_downloads_are_shown_and_errors(checkout):
    """Two hundred lines of pip before the first table are read by nobody."""
    recorded(checkout)
    said = [f"  Downloading p{i}-1.whl (1.{i} MB)" for i in range(20)]
    for large in ("torch-2.13.0-cp311.whl (526.8 MB)", "x-1-py3.whl (2.7 GB)"):
        said.append(f"  Downloading {large}")
    (checkout / "pip says").write_text("\n".join(said))
    shows = '[ -z "$PIP_CONSTRAINT" ] || { cat "pip says"; echo "ERROR: it broke" >&2; }\n'
    script(checkout / ".venv" / "bin" / "python", RECORDER.replace("for word", shows + "for word"))
    for fails in ("", "install index"):
        (checkout / "fails").write_text(fails)
        code, told = make(checkout, "ladder")
        assert code == 0 if not fails else code != 0
        assert "torch 2.13.0: 526.8 MB" in told and "x 1: 2.7 GB" in told and "p1" not in told
        assert "ERROR: it broke" in told
        assert (checkout / ".venv" / "install.log").read_text().startswith("\n".join(said))
        for stamp in (checkout / ".venv").glob("*.stamp"):
            stamp.unlink()


def test_lint_looks_at_what_git_has_and_at_all_where_there_is_no_git(checkout):
    recorded(checkout)
    for name in ("ours.py", "mine_5.py"):
        (checkout / name).write_text("")

    def linted():
        assert make(checkout, "lint")[0] == 0
        return [line.split() for line in calls(checkout) if "ruff" in line or "mypy" in line]

    assert [words[-1] for words in linted()] == [".", ".", "mypy"]  # mypy: what pyproject.toml says
    for words in (["init", "-q"], ["add", "ours.py"]):
        subprocess.run(["git", *words], cwd=checkout, check=True)
    found = linted()
    assert len(found) == 3 and all(words[-1] == "ours.py" for words in found)
    assert not any("mine_5.py" in words for words in found)


def test_the_small_torch_comes_before_the_rest(checkout):
    recorded(checkout)
    assert make(checkout, "ladder", "TORCH=cpu")[0] == 0
    words = calls(checkout)
    small = next(i for i, line in enumerate(words) if "--torch-backend cpu torch" in line)
    assert "--editable" not in "".join(words[:small]) and "--editable" in "".join(words[small:])


def test_without_the_extension_it_says_what_is_missing_and_goes_on(checkout):
    recorded(checkout)
    (checkout / "fails").write_text("ladder_value_graph")
    code, said = make(checkout, "ladder")
    assert code == 0 and "C++ compiler" in said and "make build" in said
    assert len(said.splitlines()) <= 3
    assert calls(checkout)[-1] == " -m harness run"


@pytest.mark.parametrize(
    ("newer", "fails", "goes_on"),
    [
        ("constraints.txt", "install index", True),
        ("pyproject.toml", "install index", True),
        ("constraints.txt", "install", False),  # online: something else is wrong
        ("CMakeLists.txt", "install index", False),  # the extension would be an old one
        (None, "install index", False),  # nothing has been installed yet
    ],
)
def test_offline_changed_pins_are_no_reason_to_stop(checkout, newer, fails, goes_on):
    recorded(checkout)
    if newer is not None:
        assert make(checkout, "ladder")[0] == 0
        hour_ago = time.time() - 3600  # when all the rest was installed
        for path in [*checkout.iterdir(), *(checkout / ".venv").iterdir()]:
            if path.name != newer:
                os.utime(path, (hour_ago, hour_ago))
    (checkout / "calls").unlink(missing_ok=True)
    (checkout / "fails").write_text(fails)
    code, said = make(checkout, "ladder")
    assert (code == 0) == goes_on and ("Going on" in said) == goes_on
    assert (calls(checkout)[-1] == " -m harness run") == goes_on


# the C++ build


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, ("cmake", "ninja", "c++"))), reason="no CMake, ninja or C++ compiler"
)
def test_without_a_compiler_the_build_goes_on_and_with_one_it_is_used(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "ninja"):
        (tools / name).symlink_to(shutil.which(name))

    def configure(path):
        env = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
        command = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path / "build"]
        command += [f"-DPython_EXECUTABLE={sys.executable}", "-Dpybind11_DIR=nowhere"]
        return subprocess.run(command, capture_output=True, text=True, env=env | {"PATH": path})

    poor = configure(str(tools))
    assert poor.returncode == 0 and "stage 2 is left out" in poor.stderr, poor.stderr
    rich = configure(os.environ["PATH"])  # in the same folder: nothing of the first is remembered
    assert "stage 2 is left out" not in rich.stderr and "pybind11" in rich.stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_with_a_compiler_the_extension_is_built():
    """What leaves it out where none is found must not leave it out here."""
    from stages.common.machine import why_no_extension

    assert why_no_extension() is None
