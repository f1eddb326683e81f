"""`in_turn` is `ladder` without the start-up: the same said, the same exit code, nothing kept."""

import os

import ladder_command
import pytest
from ladder_command import in_turn, ladder

TELLS = """
import os
import stages
from stages.contract import Stage

STAGE = Stage(number=90, name="tells", title="tells", idea="tells which GPUs it may see")


def attend(q, k, v):
    print("sees", repr(os.environ.get("CUDA_VISIBLE_DEVICES")), flush=True)
    return stages.by_number(3).attend(q, k, v)
"""


def said(done):
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [["diff", 4, 5], ["run", "--n", 0], []], ids=str)
def test_it_says_what_a_process_of_its_own_says(arguments):
    assert said(in_turn(*arguments)) == said(ladder(*arguments))


def test_a_command_whose_process_dies_fails_and_the_next_gets_another():
    in_turn("diff", 3, 3)
    [before] = ladder_command.TURNS
    before.process.kill()
    with pytest.raises(AssertionError, match=r"ladder diff 3 3: .*exit code -9"):
        in_turn("diff", 3, 3)
    assert said(in_turn("diff", 3, 3)) == (0, "", "")
    assert before not in ladder_command.TURNS


def test_a_command_is_told_nothing_of_the_one_before(tmp_path):
    """--device cpu hides the GPUs: from its own cells, and from no later command's."""
    stage = tmp_path / "tells.py"
    stage.write_text(TELLS)
    usual = os.environ.get("CUDA_VISIBLE_DEVICES")
    for index, (options, sees) in enumerate([((), usual), (("--device", "cpu"), ""), ((), usual)]):
        arguments = ("--stages", 3, "--n", 8, "--stage", "tells.py", "--out", f"{index}.jsonl")
        done = in_turn("run", *arguments, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = {line for line in done.stderr.splitlines() if " sees " in line}
        assert lines == {f"tells | sees {sees!r}"}
