"""constraints.txt can be installed, from wheels alone, on every Python and system that we name."""

import os
import re
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Debian 12 has 3.11.2; torch's wheels for Arm Macs begin with macOS 14
PYTHONS = ("3.11.2", "3.12", "3.13", "3.14")
SYSTEMS = {
    "Linux": "x86_64-unknown-linux-gnu",
    "Linux on Arm": "aarch64-unknown-linux-gnu",
    "macOS on Arm": "aarch64-apple-darwin",
    "Windows": "x86_64-pc-windows-msvc",
}


def pins():
    """name -> version, of each line of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def resolve(python, system, folder):
    """What uv would install there: every extra, and what the build needs. Nothing is downloaded."""
    uv = pytest.importorskip("uv", reason="uv is not installed: pip install -e '.[test]'")
    needs = folder / "build.in"
    needs.write_text("\n".join(PROJECT["build-system"]["requires"]))
    command = [
        uv.find_uv_bin(), "pip", "compile", "--python", sys.executable, "--no-python-downloads",
        "--python-version", python, "--python-platform", SYSTEMS[system],
        "--only-binary", ":all:", "--all-extras", "--constraints", ROOT / "constraints.txt",
        "--quiet", "--no-header", "--no-annotate", ROOT / "pyproject.toml", needs,
    ]  # fmt: skip
    env = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    # uv ends with 1 where no solution exists and with 2 where it could not look for one
    if done.returncode == 2 and "Failed to fetch" in done.stderr and not os.environ.get("CI"):
        pytest.skip("the package index can't be reached")
    assert done.returncode == 0, f"Python {python}, {system}: {done.stderr}"
    return dict(line.split(" ;")[0].split("==") for line in done.stdout.splitlines())


def everywhere():
    """(python, system); of these `make test` has the oldest Python on Linux alone."""
    for pair in product(PYTHONS, SYSTEMS):
        yield pytest.param(*pair, marks=() if pair == (PYTHONS[0], "Linux") else pytest.mark.slow)


@pytest.mark.parametrize(("python", "system"), [*everywhere()])
def test_the_pins_resolve_to_wheels_alone(tmp_path, python, system):
    """Each package has a wheel in its pinned version there, and none is left unpinned."""
    found = resolve(python, system, tmp_path)
    assert {"torch", "pytest", "jupytext", "transformers", "scikit-build-core"} <= set(found)
    unpinned = {
        name: version
        for name, version in found.items()
        if pins().get(name) != version and not name.startswith(("nvidia-", "cuda-"))
    }
    assert not unpinned, f"constraints.txt has no line for {unpinned}: its head says how to make it"


def test_the_same_pythons_are_named_everywhere():
    """By the classifiers, by the Makefile, by the workflow, and by the check above."""
    minors = [python[:4] for python in PYTHONS]
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert classifiers == minors
    assert re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", workflow)[1]) == minors
    assert PROJECT["project"]["requires-python"] == f">={minors[0]}"
    assert f"Python {minors[0]} to {minors[-1]}" in (ROOT / "Makefile").read_text()
    assert f"Python {minors[0]} to {minors[-1]}" in (ROOT / "README.md").read_text()
