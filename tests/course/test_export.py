"""A copy for students keeps its own promises, whichever stages it holds."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import typer
from ladder_command import by_name, environ, installed, ladder
from marks import quickly
from test_lab import solution

from course.lab import gaps, handout, labs
from harness.problems.problem import PEERS_FROM, YARDSTICK
from harness.records import checkout
from harness.records.code import built_in_files, label, number_of
from ladder import app, help, run

every_copy = pytest.mark.parametrize("last", (0, 1, 2, 4, 6, 8))


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A function that makes the copy with the stages up to one, once."""
    made = {}

    def copy(last):
        if last not in made:
            made[last] = tmp_path_factory.mktemp("copies") / f"to-{last}"
            handout.export(made[last], last)
        return made[last]

    return copy


def pages(copy):
    """Each page and notebook of a copy, with its words."""
    for page in sorted(copy.rglob("*.md")):
        yield page, page.read_text(encoding="utf-8")
    for page in sorted(copy.rglob("*.ipynb")):
        cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
        words = ["".join(x["source"]) for x in cells if x["cell_type"] == "markdown"]
        yield page, "\n".join(words)


@every_copy
def test_every_link_of_a_copy_leads_somewhere(last, copies):
    dead, linked = [], 0
    for page, text in pages(copies(last)):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
        for target in re.findall(r"(?:\]\(|(?:src|srcset|href)=\")<?([^)\s\">]+)", text):
            if re.match(r"https?:|mailto:|data:", target):
                continue
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            linked += 1
            if not there.exists() or (
                anchor and there.suffix == ".md"
                and anchor not in handout.headings(there.read_text(encoding="utf-8"))
            ):  # fmt: skip
                dead.append(f"{page.relative_to(copies(last))}: {target}")
    assert linked > 20 and dead == []


@every_copy
def test_no_page_of_a_copy_speaks_of_what_it_lacks(last, copies):
    walked = {int(page.name.split("-")[0])
              for page in (copies(last) / "docs" / "walkthrough").glob("[0-9]*-*.md")}  # fmt: skip
    assert walked == handout.stages_in(copies(last)) | {last + 1} & {*labs.about()}
    for page, text in pages(copies(last)):
        for gone in ("solutions are public", "lecturer", "Sizes;", "not in a handout", "pytest",
                     "test-all` fifteen", "On page 5"):  # fmt: skip
            assert gone not in text, page


def calls(text):
    """The `ladder` commands of a page: those of its blocks, and those in its sentences."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S))
    prose = re.sub(r"```.*?```", "", text, flags=re.S).replace("\n", " ")
    found = re.findall(r"^(?:\S*/)?ladder ([^#\n]+)", blocks, re.M)
    return found + re.findall(r"`(?:\.venv/bin/)?ladder ([^`]+)`", prose)


@every_copy
def test_every_command_of_a_copy_is_there_with_its_stages(last, copies):
    here, following = handout.stages_in(copies(last)), last + 1
    assert here == {*range(last + 1), YARDSTICK}
    known = typer.main.get_command(app.app).commands
    asked = [(page, call) for page, text in pages(copies(last)) for call in calls(text)
             if not call.startswith("-")]  # fmt: skip
    assert len(asked) > 20
    for page, call in asked:
        name, *words = shlex.split(call)
        assert name in known and name not in ("readme", "figures"), (page, call)
        assert words[:1] != ["export"], (page, call)
        labs_of = re.findall(r"lab (?:start|hint) (\d)|mine_(\d)\.py", call)
        assert {int(a or b) for a, b in labs_of} <= {*here, following}, (page, call)
        named = re.findall(r"(?:--stages? |^diff )(\d[\d, ]*)", call)
        numbers = {int(x) for each in named for x in re.findall(r"\d+", each)}
        assert {x for x in numbers if x < PEERS_FROM} <= here, (page, call)


@every_copy
def test_what_a_copy_says_comes_next_is_there(last, copies, monkeypatch):
    monkeypatch.setattr(checkout, "ROOT", copies(last))
    yours = checkout.to_be_written()
    assert yours == (last + 1 if last < max(labs.about()) else None)
    after = run.what_next({4})
    assert f"lab start {yours}" in after if yours else "diff 4 5" in after
    for command in typer.main.get_command(app.app).commands.values():  # those of a whole checkout
        shown = help.examples(*re.findall("ladder .*", command.epilog or ""))
        named = re.findall(r"(?:--stages? |diff )(\d[\d, ]*)", shown)
        numbers = {int(x) for each in named for x in re.findall(r"\d+", each)}
        if yours:
            assert {x for x in numbers if x < PEERS_FROM} <= handout.stages_in(copies(last)), shown
    compared = "ladder diff 4 5" in help.examples("ladder diff 4 5", "ladder list")
    assert compared == (last >= 5)
    with pytest.raises(checkout.NoCheckout, match="course's copy"):
        checkout.need("ladder readme")


@every_copy
def test_a_copy_has_nothing_of_the_upper_stages_but_the_stub(last, copies):
    copy = copies(last)
    here = handout.stages_in(copy)
    for path in (path for path in built_in_files() if number_of(path) not in here):
        found = [x for x in copy.rglob(label(path)) if x.parent.parent.name != "stubs"]
        assert found == ([copy / "stubs" / path.name] if number_of(path) == 2 == last + 1 else [])
    assert not [
        path for path in (copy / "tests").rglob("test_*.py") if path.name != "test_handout.py"
    ]
    assert (copy / "csrc").exists() == (last >= 2)
    for path in copy.glob("notebooks/*_to_*.*"):
        assert {int(x) for x in path.stem.split("_to_")} <= here
    # nor any line of a gap, but what a stage below has too, or is too short to tell anything
    below = "".join(solution(stage)[1] for stage in here if stage < 9)
    files = [path for path in copy.rglob("*") if path.is_file()]
    texts = {path: path.read_bytes() for path in files}
    for stage in {*range(9)} - here:
        for gap in gaps.find(solution(stage)[1], "small"):
            line = gap.lines[0].strip()
            if len(line) >= 25 and line not in below:
                assert [path for path in texts if line.encode() in texts[path]] == [], line
    for size in gaps.KINDS if last < 8 else ():
        for name, text in labs.stubs(last + 1, size).items():
            stub = copy / "stubs" / f"{last + 1}-{size}" / name
            assert stub.read_text(encoding="utf-8") == text


def test_a_copy_has_the_questions_of_the_next_stage_and_its_hints(copies, monkeypatch):
    page = (copies(4) / "docs/walkthrough/5-triton-online.md").read_text()
    assert "## Predict" in page and "How many numbers per row" in page
    assert "Why they are exact" not in page and "So it is multiplied by" not in page
    whole = {twin: list(labs.hints(5, 2, twin)) for twin in (False, True)}
    monkeypatch.setattr(labs, "STUBS", copies(4) / "stubs")
    monkeypatch.setattr(labs, "source", lambda stage, twin=False: copies(4) / "taken out.py")
    for twin, hints in whole.items():
        assert list(labs.hints(5, 2, twin)) == hints
        with pytest.raises(labs.NoLab, match="level 3"):
            list(labs.hints(5, 3, twin))
    with pytest.raises(labs.NoLab, match="neither its file nor a stub"):
        list(labs.hints(6, 1))


def in_a_copy(copy, site):
    """The environment in which the copy's own code is imported."""
    path = installed(site)["PYTHONPATH"]  # after the copy's: an editable install comes first else
    return environ(PYTHONPATH=f"{copy}:{path}")


@pytest.mark.parametrize("last", quickly(1, (4, 0, 2, 6, 8)))
def test_a_copy_measures_its_stages(last, copies, tmp_path):
    """Also the peers that it still has are loaded for that: whatever they import is there."""
    env = in_a_copy(copies(last), tmp_path / "site")
    (tmp_path / "away").mkdir()  # a path that is the current folder would be left out
    words = ["run", "--stages", "0", "--n", "8", "--device", "cpu", "--out", "run.jsonl"]
    done = ladder(*words, cwd=tmp_path / "away", env=env)
    assert done.returncode == 0, done.stderr
    assert by_name(tmp_path / "away" / "run.jsonl").keys() == {"scalar_autograd"}


@pytest.mark.slow
@pytest.mark.parametrize("last", (1, 4))
def test_the_tests_of_a_copy_pass_there_and_find_a_broken_stage(last, copies, tmp_path):
    """Also beside what a student writes."""
    copy = tmp_path / "copy"
    handout.export(copy, last)
    env = in_a_copy(copy, tmp_path / "site")
    (copy / "mine_5.py").write_text("import os;x=1")

    def tests():
        words = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not timing", "tests"]
        done = subprocess.run(words, cwd=copy, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout

    code, said = tests()
    assert code == 0 and " passed" in said, said
    assert "failed" not in said
    file = next((copy / "stages").glob("s00_*.py"))
    text = file.read_text(encoding="utf-8")
    broken = text.replace("+= local_grad * node.grad", "= local_grad * node.grad")
    assert broken != text
    file.write_text(broken, encoding="utf-8")
    code, said = tests()
    assert code == 1 and "test_a_stages_gradients_are_exact" in said
