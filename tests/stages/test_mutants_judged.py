"""The command that the lecturer's page has for judging a file fails every wrong kernel."""

import re

import pytest
from ladder_command import ROOT, by_name, in_turn
from test_mutants import MUTANTS, mutate, shipped

A_RUN = 8  # mutants a command
# what no command asks for: q, k and v that are not contiguous (else k's strides are v's), or lie in
# storage full of NaN; scores of -inf
UNASKED = re.compile("stride|contiguous|unmasked|no mask on|minus infinity|of K$|like K$")


def commands():
    """(number, names) of the mutants that a command is given together."""
    for number in (4, 5):
        names = [name for name in MUTANTS[number] if not UNASKED.search(name)]
        for start in range(0, len(names), A_RUN):
            yield pytest.param(number, names[start : start + A_RUN], id=f"{number}-{start}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("number", "names"), [*commands()])
def test_the_documented_command_fails_every_mutant(number, names, tmp_path):
    page = (ROOT / "docs" / "lecturer.md").read_text()
    [line] = re.findall(r"^ladder (run --stages 3 --stage mine\.py .*?) --out", page, re.MULTILINE)
    before, after = line.split(" --stage mine.py ")
    files, known = [], {}
    for index, name in enumerate(names):
        text = mutate(shipped(number), MUTANTS[number][name]).replace("    exact_up_to=64,\n", "")
        text = re.sub(r'\bname="\w+"', f'name="mutant_{index}"', text, count=1)
        path = tmp_path / f"mutant_{index}.py"
        path.write_text(text)
        files += ["--stage", path]
        known[f"mutant_{index}"] = name
    out = tmp_path / "run.jsonl"
    done = in_turn(*before.split(), *files, *after.split(), "--out", out)
    assert done.returncode == 1, done.stderr
    cells = by_name(out)
    assert not [known[n] for n in known if {cell["status"] for cell in cells[n]} == {"ok"}]
