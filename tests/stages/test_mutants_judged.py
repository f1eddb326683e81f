"""The command that the lecturer's page has for judging a file fails every wrong kernel."""

import math
import re

import pytest
from ladder_command import ROOT, by_name, in_turn
from test_mutants import MUTANTS

import stages
from course.edits import changed

A_RUN = 16  # mutants a command
UNASKED = "max from minus infinity"  # no command asks for scores of -inf


def commands():
    """(number, names) of the mutants that a command is given together; each once, in stage 5."""
    for number in (4, 5):
        twins = MUTANTS[5] if number == 4 else {}
        names = [name for name in MUTANTS[number] if name != UNASKED and name not in twins]
        for start in range(0, len(names), A_RUN):
            yield pytest.param(number, names[start : start + A_RUN], id=f"{number}-{start}")


def survivors(command, files, out):
    """Of `files`, name -> path, the names that `command` finds nothing wrong with."""
    stages = [word for path in files.values() for word in ("--stage", path)]
    done = in_turn(*command, *stages, "--out", out)
    cells = by_name(out)
    alive = [name for name in files if {cell["status"] for cell in cells[name]} == {"ok"}]
    assert done.returncode == (0 if alive == [*files] else 1), done.stderr
    return alive


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("number", "names"), [*commands()])
def test_the_documented_command_fails_every_mutant(number, names, tmp_path):
    """One length of it after another, for most are dead by then; the others are given all of it."""
    page = (ROOT / "docs" / "lecturer.md").read_text()
    [line] = re.findall(r"^ladder (run --stages 3 --stage mine\.py .*?) --out", page, re.MULTILINE)
    command = line.replace(" --stage mine.py", "").split()
    n = command.index("--n") + 1
    most = stages.by_number(number).STAGE.exact_up_to or math.inf  # it fails above as it is shipped
    lengths = [length for length in ("64", "1", "65") if int(length) <= most]
    assert set(lengths) <= set(command[n].split(","))
    assert "--inputs" not in command  # a file is asked with normal ones, and with others
    asked = [(length, "--inputs", "normal") for length in lengths] + [(",".join(lengths),)]
    files, known = {}, {}
    for index, name in enumerate(names):
        [text] = changed(number, [MUTANTS[number][name]], name).values()
        text = text.replace("    exact_up_to=64,\n", "")
        text = re.sub(r'\bname="\w+"', f'name="mutant_{index}"', text, count=1)
        path = tmp_path / f"mutant_{index}.py"
        path.write_text(text)
        files[path.stem], known[path.stem] = path, name
    for index, (length, *inputs) in enumerate(asked):
        part = [*command[:n], length, *command[n + 1 :], *inputs]
        alive = survivors(part, files, tmp_path / f"{index}.jsonl")
        files = {name: files[name] for name in alive}
        if not files:
            return
    pytest.fail(f"a mutant survives: {[known[name] for name in files]}")
