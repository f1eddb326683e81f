"""Bad arguments: one clear line on stderr, exit code 2, no traceback, nothing written."""

import json

import pytest
import typer
from ladder_command import fakes, in_turn, without_gpu
from made_up import make_cell, make_env, write_run

from ladder import app, arguments

STAGE = "from stages.contract import Stage\n"
DECLARED = STAGE + 'STAGE = Stage(number=90, name="bad", title="bad", idea="bad")\n'
ATTEND = "def attend(q, k, v):\n    return q\n"


def refused(folder, *arguments, says, run=in_turn):
    """`ladder ARGUMENTS`, run in `folder`, is refused with one line that holds `says`."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = run(*arguments, cwd=folder)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("ladder: ") and done.stderr.count("\n") == 1, done.stderr
    assert says.lower() in done.stderr.lower()
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after == before


BAD_OPTIONS = {
    "--n 0": "--n: got 0, expected whole numbers of at least 1",
    "--n -8": "--n",
    "--n eight": "--n: got 'eight'",
    "--n 8,,16": "--n: got '8,,16'",
    "--n 8.5": "--n: got '8.5'",
    "--n=": "--n",
    "--nq 0 --n 8": "--nq: got 0",
    "--nq many": "--nq: got 'many', expected: a valid integer",
    "--d 0": "--d: got 0, expected a whole number from 1 to 256",
    "--d 257": "--d: got 257, expected a whole number from 1 to 256",
    "--d 64,128": "--d: got '64,128', expected: a valid integer",
    "--b 0": "--b: got 0, expected a whole number of at least 1",
    "--h 0": "--h: got 0",
    "--h -1": "--h",
    "--h 4 --hk 3": "--hk: got 3, expected a number that divides the 4 heads of q",
    "--h 4 --hk 0": "--hk: got 0",
    "--h 4 --hk 8": "--hk: got 8",
    "--h 4 --hk two": "--hk",
    "--n 8 --seqlens nine": "--seqlens: got 'nine', expected a whole number of keys for each",
    "--n 8 --seqlens 4,": "--seqlens: got '4,'",
    "--n 8 --seqlens=-1": "--seqlens: got '-1'",
    "--n 8 --b 2 --seqlens 4": "--seqlens: got 4, expected a length for each batch entry, and the "
    "batch size is 2: give --b 1, or as many lengths",
    "--n 8 --seqlens 4,4": "--seqlens: got 4,4, expected a length for each batch entry",
    "--n 16,8 --seqlens 9": "--seqlens: got 9, expected at most N = 8, the number of keys",
    "--inputs real --n 8 --h 4 --hk 2": "--hk: got 2, real inputs have as many key heads as heads",
    "--dtype float8": "--dtype: got 'float8', expected one of float16, bfloat16, float32, float64",
    "--inputs spiky": "--inputs: got 'spiky', expected one of normal, peaky, real",
    "--precision high": "--precision: got 'high', expected one of ieee, tf32",
    "--precision tf32 --dtype fp16": "--precision: got tf32 with float16",
    "--device tpu": "--device: got 'tpu', expected one of cpu, cuda",
    "--memory 0": "--memory: got '0', expected a size",
    "--memory 0.0000001": "--memory",
    "--memory 99999999T": "--memory: got '99999999T', expected a size",
    "--memory plenty": "--memory: got 'plenty', expected a size such as 500M or 4G",
    "--budget 0": "--budget: got 0, expected a number of seconds above 0",
    "--budget -1": "--budget",
    "--budget nan": "--budget",
    "--budget inf": "--budget",
    "--seed -1": "--seed: got '-1', expected: greater than or equal to 0",
    "--seed 18446744073709551616": "--seed",
    "--seed x": "--seed",
    "--stages three": "--stages: got 'three'",
    "--stages 88": "--stages: got 88, expected some of 0, 1, 2, 3",
    "--inputs real --n 513": "--n: got 513, real inputs have at most 512 tokens",
    "--inputs real --n 8 --nq 513": "--nq: got 513",
    "--inputs real --d 64": "--d: got 64, real inputs have 32",
    "--inputs real --b 3": "--b: got 3, real inputs have at most 2",
    "--inputs real --h 13": "--h: got 13, real inputs have at most 12",
    "--colour red": "--colour",
    "8": "8",
}


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_a_bad_option_of_run(tmp_path, options):
    arguments = ("run", "--stages", 3, "--out", "run.jsonl", *options.split(" "))
    refused(tmp_path, *arguments, says=BAD_OPTIONS[options])


def test_no_gpu_for_device_cuda(tmp_path):
    says = "--device: got cuda, but"
    refused(tmp_path, "run", "--device", "cuda", "--n", 8, says=says, run=without_gpu)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["climb"], "climb"),
        (["table"], "FILE"),
        (["table", "nothing.jsonl"], "nothing.jsonl: No such file"),
        (["table", "."], "Is a directory"),
        (["plot", "nothing.jsonl"], "--out"),
        (["plot", "nothing.jsonl", "--out", "here"], "nothing.jsonl: No such file"),
        (["diff", "4"], "NEW"),
        (["diff", "4", "77"], "diff: got 77, expected some of 0, 1, 2, 3"),
        (["diff", "four", "5"], "old: got 'four', expected: a valid integer"),
        (["list", "--loud"], "--loud"),
    ],
)
def test_a_bad_command(tmp_path, arguments, says):
    refused(tmp_path, *arguments, says=says)


def test_a_table_of_another_format_and_of_no_run_of_ours(tmp_path):
    cells = [make_cell()]
    run = write_run(tmp_path / "run.jsonl", make_env(cells), cells)
    refused(tmp_path, "table", run, "--format", "latex", says="--format: got 'latex'")
    strange = tmp_path / "strange.jsonl"
    strange.write_text('{"kind": "env"}\n')
    refused(tmp_path, "table", strange, says="line 1 is not a record of ours")
    strange.write_text("")
    refused(tmp_path, "table", strange, says="no whole line in it")
    strange.write_bytes(b"\xff\xfe\n")
    refused(tmp_path, "plot", strange, "--out", "plots", says="line 1 is not a record of ours")


def test_plots_that_can_not_be_written_or_would_be_empty(tmp_path):
    cells = [make_cell()]
    run = write_run(tmp_path / "run.jsonl", make_env(cells), cells)
    refused(tmp_path, "plot", run, "--out", run, says="--out")
    cells = [make_cell(status="crashed", time_ms=None, peak_bytes=None, err_f64_max=None)]
    run = write_run(tmp_path / "nothing.jsonl", make_env(cells), cells)
    refused(tmp_path, "plot", run, "--out", tmp_path / "plots", says="anything to plot")


def test_where_the_records_go(tmp_path):
    there = tmp_path / "there.jsonl"
    there.write_text("somebody's\n")
    refused(tmp_path, "run", "--n", 8, "--out", there, says="is there already")
    under_a_file = there / "run.jsonl"
    refused(tmp_path, "run", "--n", 8, "--out", under_a_file, says="--out")


def test_resume_of_nothing_of_something_else_and_with_out(tmp_path):
    refused(tmp_path, "run", "--resume", "nothing.jsonl", says="--resume: nothing.jsonl")
    # nothing of what isn't ours is written to, not even a last line that looks torn
    for content in (b"no line at all", b'{"a": 1}\n{"b"', b"", b"\x00\xff\n\x00"):
        strange = tmp_path / "strange"
        strange.write_bytes(content)
        refused(tmp_path, "run", "--resume", strange, says="strange")
        refused(tmp_path, "run", "--resume", strange, "--out", "x.jsonl", says="--out")


BAD_STAGES = {
    "syntax.py": ("def attend(q, k, v:\n", "SyntaxError"),
    "no_stage.py": (ATTEND, "no STAGE"),
    "stage_of_another_kind.py": ("STAGE = {'number': 90}\n" + ATTEND, "no STAGE"),
    "no_attend.py": (DECLARED, "no attend"),
    "exits.py": ("import sys\nsys.exit(0)\n", "SystemExit"),
    "ends.py": ("import os\nos._exit(0)\n", "exit code 0"),
    "needs_more.py": ("import no_such_module\n", "no_such_module"),
    "bad_number.py": (
        STAGE + 'STAGE = Stage(number=-1, name="bad", title="bad", idea="bad")\n' + ATTEND,
        "Stage.number: got -1",
    ),
}


@pytest.mark.slow
def test_bad_stage_files(tmp_path):
    """Each is refused with a line that names it."""
    cases = []
    for name, (text, says) in BAD_STAGES.items():
        (tmp_path / name).write_text(text)
        cases.append((["--stage", name], f"{name}: ", says))
    (tmp_path / "stage.txt").write_text(DECLARED + ATTEND)
    cases += [
        (["--stage", "none.py"], "none.py: ", "no such file"),
        (["--stage", str(tmp_path)], f"{tmp_path}: ", "no such file"),
        (["--stage", "stage.txt"], "stage.txt: ", "not a Python file"),
        (fakes("modest", "modest"), "modest.py: ", "number 90, name 'modest'"),
    ]
    for stages, name, says in cases:
        run = ("run", "--stages", 3, "--n", 8, "--out", "run.jsonl")
        done = in_turn(*run, *stages, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"ladder: {name}") and done.stderr.count("\n") == 1
        assert says in done.stderr
    assert not (tmp_path / "run.jsonl").exists()


def test_ladder_alone_is_the_help():
    done = in_turn()
    assert done.returncode == 2
    for word in ("run", "table", "plot", "list", "doctor", "diff"):
        assert f" {word} " in done.stderr
    assert "Traceback" not in done.stderr
    helped = in_turn("run", "--help")
    assert helped.returncode == 0
    assert "--resume" in helped.stdout


def test_good_sizes_are_understood(tmp_path):
    """What --memory takes, in powers of 1024, as the env line keeps it."""
    from ladder.options import size

    assert size("500M") == 500 << 20
    assert size("4GiB") == size("4g") == size(" 4 GB ") == 4 << 30
    assert size("1.5k") == 1536
    assert size("123") == 123


def test_a_tour_whose_file_has_no_ending_does_not_stumble_over_its_plots(tmp_path):
    """The plots' folder is named after the file: a file without .jsonl is its own folder."""
    from harness.records.jsonl import Writer, read
    from harness.runs.plan import Limits
    from ladder import run

    cells = [make_cell()]
    out = tmp_path / "tour"
    env = make_env(cells, arguments=dict(run.DEFAULTS))
    with Writer.create(out, env) as writer:
        assert run.measure_cells([], [], writer, Limits()) == 0
    assert json.loads(out.read_text()) == read(out)[0] == env


@pytest.mark.parametrize(
    ("words", "asked"),
    [("run --n 8", False), ("run --n 8 --direction bwd", True),
     ("bench --n 8", False), ("bench --n 8 --mode fwd,train", True),
     ("lab grade . --stage 1 --out g.csv", False), ("lab grade . --stage 7 --out g.csv", True)],
)  # fmt: skip
def test_the_fork_server_is_told_whether_gradients_are_asked_for(
    words, asked, tmp_path, monkeypatch
):
    told = []

    def server(gradients=False):
        told.append(gradients)
        raise NotImplementedError  # before anything is started

    (tmp_path / "mine.py").write_text("STAGE = None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arguments, "server", server)
    with pytest.raises(NotImplementedError):
        typer.main.get_command(app.app)(words.split(), standalone_mode=False)
    assert told == [asked]
