"""A run that is killed, torn or interrupted is finished by --resume, each record there once."""

import json
import os
import random
import re
import shlex
import signal
import time

import pytest
from ladder_command import FAKES, ROOT, RUN, Started, fakes, in_turn, measured

from harness.records.jsonl import read
from harness.records.schema import key

# four cells, in a direction and with heads and lengths that are no default
SMALL = ("run", "--stages", "3", "--n", "8,12,16,20", "--mode", "train", "--b", "2", "--h", "2",
         "--hk", "1", "--seqlens", "5,8", "--budget", "20")  # fmt: skip
# four comparisons of two stages
PAIRS = ("bench", "--stages", "2,3", "--n", "8", "--mode", "fwd,train", "--inputs", "all",
         "--causal", "off", "--warmup", "1", "--repeat", "3", "--device", "cpu")  # fmt: skip


def lines(path):
    """How many whole lines `path` has; 0 where it isn't there."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def hold_complete(path):
    """The file validates, and each planned cell is in it exactly once; returns the cells."""
    assert path.read_bytes().endswith(b"\n")
    env, cells = read(path)
    assert sorted(key(cell) for cell in cells) == sorted(key(cell) for cell in env["plan"])
    assert len({key(cell) for cell in cells}) == len(cells)
    return cells


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_is_finished(tmp_path):
    """As it starts, and in the middle of its cells."""
    path = tmp_path / "run.jsonl"
    begin = (*RUN, "--stages", 3, "--n", "8,16,24", *fakes("naps"), "--out", path)
    resume = ("run", "--resume", path, *fakes("naps"))
    for some in (0, 2, 4):
        with Started(*(resume if path.exists() else begin), log=tmp_path / "log") as run:
            run.wait_for(lambda some=some: lines(path) >= some, "its cells")
            run.process.send_signal(signal.SIGKILL)
            assert run.process.wait() == -signal.SIGKILL, "it was over before it was killed"
            assert run.wait_until_gone() == []
    done = in_turn(*resume)
    assert done.returncode == 0, done.stderr
    cells = hold_complete(path)
    assert len(cells) == 6 and {cell["status"] for cell in cells} == {"ok"}
    # the table at the end is that of the whole run, not of its last part
    assert done.stdout.count("naps") == 3


@pytest.mark.slow
def test_nothing_is_left_behind_by_a_killed_run_whose_stage_hangs(tmp_path):
    arguments = (*RUN, "--stages", 3, "--n", 32, *fakes("hangs"), "--out", tmp_path / "run.jsonl")
    with Started(*arguments, log=tmp_path / "log") as run:
        run.wait_for(lambda: "[1/2]" in run.text(), "its first cell")
        time.sleep(1.5)  # by now the stage that hangs is under way
        assert len(run.left_behind()) >= 3
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        assert run.wait_until_gone() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "kept", "said"),
    [((*RUN, "--n", "8,16"), 3, "1 of 4 cells left"),
     (("bench", "--n", "8,16", "--causal", "off", "--inputs", "normal"), 2,
      "1 of 2 comparisons left")],
    ids=["run", "bench"],
)  # fmt: skip
def test_ctrl_c_leaves_a_valid_file_and_a_table_of_what_is_done(tmp_path, begin, kept, said):
    """A stage that hangs is named meanwhile; and a second run may not write to the file."""
    path, mine = tmp_path / "my run.jsonl", fakes("hangs_above_8")
    with Started(*begin, "--stages", 3, *mine, "--out", path, log=tmp_path / "log") as run:
        run.wait_for(lambda: lines(path) == 1 + kept, "its first cells")
        refuses(path, *mine, says="being written by another run", command=begin[0], starts="")
        if begin[0] == "bench":  # each step is said when it begins
            run.wait_for(lambda: "N = 16: 90 hangs_above_8 is called" in run.text(), "its name")
            assert "[2/2]" in run.text() and "d = 16, N = 16: the stages load" in run.text()
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 130
        assert run.wait_until_gone() == []
        text = run.text()
    assert "Traceback" not in text and "torch, three GEMMs" in text
    words = shlex.join([begin[0], "--resume", str(path), *mine])
    assert re.search(rf"interrupted, {said}: \S*ladder {re.escape(words)}", " ".join(text.split()))
    env, cells = read(path)
    assert len(env["plan"]) == 4 and len(cells) == kept
    assert {cell["status"] for cell in cells} == {"ok"}


@pytest.mark.slow
def test_ctrl_c_of_several_ranks_names_the_command_that_goes_on(tmp_path):
    path = tmp_path / "ring.jsonl"
    begin = ("ring", "--world", 2, "--device", "cpu", "--n", "32,64,96,128,160", "--stages", "ring")
    with Started(*begin, "--out", path, log=tmp_path / "log") as run:
        run.wait_for(lambda: lines(path) >= 2, "its first cell")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 130
        assert run.wait_until_gone() == []
        said = " ".join(run.text().split())
    found = re.search(rf"ladder (\w+ --resume {path})", said)
    assert found and found[1].startswith("ring ") and "--stage" not in said, said


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The bytes of a finished run of SMALL."""
    path = tmp_path_factory.mktemp("finished") / "run.jsonl"
    done = in_turn(*SMALL, "--out", path)
    assert done.returncode == 0, done.stderr
    return path.read_bytes()


def cuts(file, count):
    """`count` bytes at which a file may end after its first line, drawn at random, and its ends."""
    seed = int(os.environ.get("LADDER_TEST_SEED") or random.SystemRandom().getrandbits(32))
    print(f"LADDER_TEST_SEED={seed} repeats these cuts")
    first = file.index(b"\n") + 1
    return [first, len(file) - 1, *random.Random(seed).sample(range(first, len(file)), count)]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "together"), [("run", 1), ("bench", 2)])
def test_a_file_that_ends_at_any_byte_is_finished(tmp_path, finished, compared, command, together):
    """What is whole stays as it is, and the rest is measured; of a comparison all or nothing."""
    file = finished if command == "run" else compared[0]
    path = tmp_path / "run.jsonl"
    plan = [key(entry) for entry in json.loads(file.splitlines()[0])["plan"]]
    for cut in cuts(file, 3):
        path.write_bytes(file[:cut])
        whole = (file[:cut].count(b"\n") - 1) // together
        assert len(read(path)[1]) == file[:cut].count(b"\n") - 1  # a view passes over it,
        assert path.read_bytes() == file[:cut]  # and leaves it
        done = in_turn(command, "--resume", path)
        assert done.returncode == 0, done.stderr
        records = hold_complete(path)
        assert [key(record) for record in records] == plan
        kept = file.splitlines(keepends=True)[: 1 + together * whole]
        assert path.read_bytes().startswith(b"".join(kept))
        said = [number for number in range(1, 5) if f"[{number}/4] " in done.stderr]
        assert said == list(range(whole + 1, 5))
        if command == "bench":
            assert path.with_suffix(".csv").read_text().count("\n") == 1 + len(plan)
            path.with_suffix(".csv").unlink()


def edited(path, finished, **changes):
    """A file at `path`: the run `finished`, less its last record, its env line changed."""
    first, *rest = finished.splitlines()
    env = json.loads(first)
    assert changes.keys() <= env.keys()
    env |= changes
    path.write_bytes(b"\n".join([json.dumps(env).encode(), *rest[:-1]]) + b"\n")


def refuses(path, *arguments, says, command="run", starts="--resume: "):
    before = path.read_bytes()
    done = in_turn(command, "--resume", path, *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"ladder: {starts}") and done.stderr.count("\n") == 1
    assert says in done.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [{"commit": "0" * 40}, {"sources": "0" * 16}, {"device_name": "another processor"},
     {"torch": "1.0.0"}, {"cores": 999}, {"device_name": "NVIDIA H100", "device": "cuda"}],
    ids=lambda change: "-".join(change),
)  # fmt: skip
@pytest.mark.parametrize("command", ["run", "bench"])
def test_a_run_goes_on_with_the_same_code_on_the_same_machine_alone(
    tmp_path, finished, compared, command, change
):
    """Where it is refused, the records of a comparison that is not whole stay, too."""
    path = tmp_path / "run.jsonl"
    edited(path, finished if command == "run" else compared[0], **change)
    refuses(path, says=f"was begun with {next(iter(change)).replace('_', ' ')}", command=command)


@pytest.mark.parametrize(
    ("command", "options"),
    [("run", {"--n 8,16,32": "8,12", "--stages 2": "3", "--d 16": "", "--budget 3": "20",
              "--seed 5": "", "--inputs peaky": "", "--causal": "", "--dtype fp16": "",
              "--nq 1": "", "--memory 1G": "", "--b 3": "2", "--h 4": "2", "--hk 2": "1",
              "--seqlens 4,4": "5,8", "--mode bwd": "train"}),
     ("bench", {"--repeat 30": "3", "--n 8,16": "8", "--stages 2": "2,3", "--mode fwd": "fwd,",
                "--seed 1": "", "--budget 9": "120", "--suite 004": "not given"})],
    ids=["run", "bench"],
)  # fmt: skip
def test_a_run_goes_on_with_the_same_arguments(tmp_path, finished, compared, command, options):
    path = tmp_path / "run.jsonl"
    edited(path, finished if command == "run" else compared[0])
    for option, was in options.items():
        refuses(path, *option.split(), says=f"{option.split()[0]} was {was}", command=command)


def test_an_older_files_arguments_count_by_their_new_names(tmp_path, finished):
    arguments = json.loads(finished.splitlines()[0])["arguments"]
    arguments |= {"direction": "bwd", "causal": False}
    del arguments["mode"]
    path = tmp_path / "run.jsonl"
    edited(path, finished, arguments=arguments)
    refuses(path, "--mode", "train", says="--mode was bwd")
    refuses(path, "--causal", says="--causal was off")
    # a default that is typed is an argument like another
    refuses(path, "--b", "1", says="--b was 2")


@pytest.mark.slow
def test_the_same_arguments_said_again_are_fine(tmp_path, finished):
    path = tmp_path / "run.jsonl"
    edited(path, finished)
    done = in_turn(*SMALL, "--resume", path)
    assert done.returncode == 0, done.stderr
    hold_complete(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "begin",
    [(*RUN, "--stages", 3, "--n", 8),
     ("bench", "--stages", 3, "--n", 8, "--causal", "off", "--inputs", "normal", "--repeat", 3)],
    ids=lambda begin: begin[0],
)  # fmt: skip
def test_a_stage_of_somebodys_must_be_there_and_unchanged(tmp_path, begin):
    command, path = begin[0], tmp_path / "run.jsonl"
    stage = FAKES.write(tmp_path, "naps")
    stage.write_text(stage.read_text() + "\nimport helped\n")
    helped = stage.with_name("helped.py")
    helped.write_text("FACTOR = 1.0\n")
    measured(tmp_path, *begin, "--stage", stage)
    edited(path, path.read_bytes())
    refuses(path, says="stage 90 (naps)", command=command)
    for file, more in ((stage, "\n# better now\n"), (helped, "FACTOR = 2.0\n")):
        text = file.read_text()
        file.write_text(text + more)
        says = "naps.py, or a file that it imports, has changed"
        refuses(path, "--stage", stage, says=says, command=command)
        file.write_text(text)
    done = in_turn(command, "--resume", path, "--stage", stage)
    assert done.returncode == 0, done.stderr
    hold_complete(path)


# ---- ladder bench


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The bytes of a finished run of PAIRS, and its tables."""
    path = tmp_path_factory.mktemp("compared") / "bench.jsonl"
    done = in_turn(*PAIRS, "--out", path)
    assert done.returncode == 0, done.stderr
    assert len(hold_complete(path)) == 8
    return path.read_bytes(), done.stdout.partition("records:")[0]


def test_a_finished_bench_measures_nothing_and_shows_its_tables(tmp_path, compared):
    finished, tables = compared
    path = tmp_path / "bench.jsonl"
    path.write_bytes(finished)
    done = in_turn("bench", "--resume", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.partition("records:")[0] == tables and "torch, three GEMMs" in tables
    assert path.read_bytes() == finished


@pytest.mark.parametrize(
    "change",
    [{"repeat": 1}, {"repeat": None}, {"warmup": []}, {"budget": "60"}, {"command": "run"}, "plan"],
    ids=str,
)
def test_what_no_bench_was_begun_with_is_refused(tmp_path, compared, change):
    path = tmp_path / "bench.jsonl"
    env = json.loads(compared[0].splitlines()[0])
    if change == "plan":
        edited(path, compared[0], plan=[env["plan"][0] | {"paired": None}])
    else:
        edited(path, compared[0], arguments=env["arguments"] | change)
    says = "line 1 is no run to go on with: "
    refuses(path, says=says, command="bench", starts=path)


@pytest.mark.parametrize(
    ("order", "says"),
    [((1, 0), "not in its plan's order"), ((*range(8), 7), "the cell of line 9 once more")],
    ids=str,
)
def test_records_that_are_not_the_plans_are_not_gone_on_with(tmp_path, compared, order, says):
    env, *records = compared[0].splitlines(keepends=True)
    path = tmp_path / "bench.jsonl"
    path.write_bytes(b"".join([env, *(records[index] for index in order)]))
    refuses(path, says=says, command="bench", starts=path)


@pytest.mark.slow
def test_a_bench_whose_views_can_not_be_written_is_not_gone_on_with(tmp_path, compared):
    path = tmp_path / "bench.csv"
    edited(path, compared[0])
    refuses(path, says="its CSV would be written over it", command="bench", starts=path)
    path = path.rename(tmp_path / "bench.jsonl")
    elsewhere = ROOT / "results" / "h200" / "ceilings.jsonl"
    says = f"--ceilings: {elsewhere}: "
    refuses(path, "--ceilings", elsewhere, says=says, command="bench", starts=says)


def test_the_other_commands_run_is_refused(tmp_path, finished, compared):
    path = tmp_path / "run.jsonl"
    for command, file in (("bench", finished), ("run", compared[0])):
        path.write_bytes(file)
        says = f"was begun by another command than `ladder {command}`"
        refuses(path, says=says, command=command, starts=path)


def test_the_env_line_tells_nothing_of_the_host_the_user_or_their_paths(tmp_path, finished):
    """Nor do the cells."""
    import getpass
    import socket
    from pathlib import Path

    text = finished.decode()
    secrets = {socket.gethostname(), str(Path.cwd()), str(Path.home()), "/tmp", "/work", "python -"}
    # a user called root, or a home that is /, is in every text
    secrets |= {getpass.getuser()} - {"root"}
    for secret in secrets:
        if len(secret) > 2:
            assert secret not in text, secret
    assert "/" not in text.replace("a/b", "").replace("N/A", "")
