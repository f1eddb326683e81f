"""Bad arguments: one clear line on stderr, exit code 2, no traceback, nothing written."""

import json
import os

import pytest
import typer
from ladder_command import ROOT, fakes, in_turn, without_gpu
from made_up import make_cell, make_env, write_run

from ladder import app, arguments
from ladder.options import size

H200 = ROOT / "results" / "h200"
STAGE = "from stages.contract import Stage\n"
DECLARED = STAGE + 'STAGE = Stage(number=90, name="bad", title="bad", idea="bad")\n'
ATTEND = "def attend(q, k, v):\n    return q\n"
LONG = "n" * 300  # a name that no file can have


@pytest.fixture
def folder(tmp_path):
    """A folder with files of records, good and bad, and others."""
    cells = [make_cell()]
    run = write_run(tmp_path / "run.jsonl", make_env(cells), cells)
    first, second = run.read_bytes().splitlines(keepends=True)
    cells = [make_cell(status="crashed", time_ms=None, peak_bytes=None, err_f64_max=None)]
    write_run(tmp_path / "crashed.jsonl", make_env(cells), cells)
    trained = (H200 / "train.jsonl").read_bytes().splitlines(keepends=True)
    for name, content in {
        "there.jsonl": b"somebody's\n", "other.csv": b"mine", "empty": b"", "torn": first[:40],
        "begun": first, "mixed": first + second + trained[1], "trained": trained[0] + trained[1],
        "unknown": first + b'{"kind": "rumour"}\n', "twice": first + first, "no_env": second,
        "env_alone": b'{"kind": "env"}\n', "bytes": b"\xff\xfe\n", "text": b"no line at all",
        "not_ours": b'{"a": 1}\n{"b"', "zeros": b"\x00\xff\n\x00",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    (tmp_path / "stage.txt").write_text(DECLARED + ATTEND)
    return tmp_path


def refused(folder, arguments, says, run=in_turn):
    """`ladder ARGUMENTS`, run in `folder`, is refused with one line that holds `says`."""

    def files():
        found = (path for path in folder.rglob("*") if path.is_file())
        # what Python keeps of a module that it imported is Python's
        return {path: path.read_bytes() for path in found if path.parent.name != "__pycache__"}

    before = files()
    done = run(*arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), (done.returncode, done.stdout, done.stderr)
    assert done.stderr.startswith("ladder: ") and done.stderr.count("\n") == 1, done.stderr
    assert says.lower() in done.stderr.lower()
    assert files() == before


RUN = {
    "--n 0": "--n: got 0, expected whole numbers of at least 1",
    "--n -8": "--n",
    "--n eight": "--n: got 'eight'",
    "--n 8,,16": "--n: got '8,,16'",
    "--n 8.5": "--n: got '8.5'",
    "--n=": "--n",
    "--nq 0 --n 8": "--nq: got 0",
    "--nq many": "--nq: got 'many', expected whole numbers",
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
    "--inputs real --n 8 --nq 8,513": "--nq: got 513",
    "--inputs real --d 64": "--d: got 64, real inputs have 32",
    "--inputs real --b 3": "--b: got 3, real inputs have at most 2",
    "--inputs real --h 13": "--h: got 13, real inputs have at most 12",
    "--mode back": "--mode: got 'back', expected one of fwd, bwd, train",
    "--direction back": "--mode: got 'back'",
    "--direction fwd --mode bwd": "--direction: it is the old name of --mode",
    "--causal perhaps": "--causal: got 'perhaps', expected one of off, on, both",
    "--colour red": "--colour",
    "8": "8",
}
ANY = {
    "climb": "climb",
    "diff 4": "NEW",
    "diff 4 77": "diff: got 77, expected some of 0, 1, 2, 3",
    "diff 3 3": "diff: got 3 twice, the same stage",
    "diff 3 3 --whole": "diff: got 3 twice, the same stage",
    "diff four 5": "old: got 'four', expected: a valid integer",
    "list --loud": "--loud",
    # where the records go, and what a run is gone on with
    "run --n 8 --out there.jsonl": "--out: there.jsonl is there already",
    "run --n 8 --out there.jsonl/run.jsonl": "--out",
    "bench --out other.jsonl": "--out: other.csv is there already",
    "bench --out new.csv": "its CSV would be written over it",
    "run --resume nothing.jsonl": "--resume: nothing.jsonl",
    **{f"run --resume {name}": name for name in ("text", "not_ours", "empty", "zeros")},
    # options that exclude each other
    "run --resume x --out y": "--out: a resumed run goes on in its own file",
    "bench --resume x --out y": "--out: a resumed run goes on in its own file",
    "bench --b 2 --tokens 4": "--tokens: --b says",
    "bench --tokens 4 --b 2": "--tokens: --b says",
    "bench --h 2 --hidden 32": "--hidden: --h says",
    "bench --stages 3 --impl 3": "--impl: it is the old name of --stages",
    "run --suite table-4.1 --paired": "--paired: a suite's problems are its own",
    "run --suite table-4.1 --d 64": "--d: a suite's problems are its own",
    "run --suite table-4.1 --mode fwd": "--mode: a suite's problems are its own",
    "run --suite table-4.1 --direction bwd": "--mode: a suite's problems are its own",
    "run --suite table-4.1 --causal": "--causal: a suite's problems are its own",
    "run --suite table-4.1 --b 1": "--b: a suite's problems are its own",
    "bench --suite 004 --mode fwd": "--mode: a suite's problems are its own",
    "bench --suite 004 --n 64": "--n: a suite's problems are its own",
    "bench --suite decode --graph": "--graph: a suite may read from a paged cache",
    "bench --device cpu --graph": "--graph: got a CPU, expected a GPU",
    "bench --mode bwd --graph": "--graph: got --mode bwd, expected fwd",
    "run --paired": "--paired: the tour has each stage alone",
    "run --suite table-4.3 --stages 0 --device cpu": "none of the stages takes part",
    "model --stage 3 --text x --weights y": "--text: got --weights too",
    "bench --stage 3": "by number it is --stages 3",
    "run --stage 3,5": "by number it is --stages 3,5",
    # the problems of bench
    "bench --mode fwd,up": "--mode: got 'up', expected one of fwd, bwd, train",
    "bench --causal perhaps": "--causal: got 'perhaps', expected one of off, on, both",
    "bench --dtype int8": "--dtype: got 'int8'",
    "bench --inputs real": "--inputs: got 'real', expected one of normal, peaky",
    "bench --d 0": "--d: got 0",
    "bench --n 8,x": "--n: got '8,x'",
    "bench --n 512 --tokens 256": "--n: got 512, expected at most the 256 tokens",
    "bench --d 48 --device cpu": "--d: got 48, expected a divisor of 32",
    "bench --stages 3,nobody": "--stages: got 'nobody', expected some of 0 (scalar_autograd)",
    "bench --impl 3,nobody": "--stages: got 'nobody', expected some of 0 (scalar_autograd)",
    "bench --suite 002": "--suite: got '002', expected one of 001-forward",
    "bench --budget nan": "--budget: got nan",
    "bench --repeat 1": "--repeat",
    "bench --warmup 0": "--warmup",
    "bench --stages 5 --causal on --stage gone.py": "gone.py: no such file",
    "bench --ceilings gone.jsonl": "gone.jsonl: No such file",
    "bench --d 48 --hidden 64": "--d: got 48, expected a divisor of 64, the size",
    "bench --suite 004 --hk 1": "--hk: a suite's problems are its own",
    "bench --n 16 --h 4 --hk 3": "--hk: got 3, expected a number that divides the 4 heads of q",
    "bench --n 16 --b 2 --seqlens 4": "--seqlens: got 4, expected a length for each batch entry",
    "bench --n 16,8 --b 1 --seqlens 9": "--seqlens: got 9, expected at most N = 8",
    "bench --n 16 --seqlens 4,x --device cpu": "--seqlens: got '4,x'",
    "bench --suite 004 --device cpu": "hopeless on a CPU: the calls alone would take",
    # the other commands that measure
    "ceilings --device tpu": "--device: got 'tpu', expected one of cpu, cuda",
    "ceilings --out run.jsonl": "--out: run.jsonl is there already",
    "ceilings --device cpu --out run.jsonl/more": "can't be written",
    "train": "--stage: got none",
    "train --stage 3,,": "--stage",
    "train --stage sdpa_flash": "--stage: got sdpa_flash, expected a stage's number",
    "train --stage 3 --size huge": "--size: got 'huge'",
    "train --stage 3 --dtype float16": "--dtype: got 'float16'",
    "train --stage 3 --device tpu": "--device: got 'tpu'",
    "train --stage 3 --steps 0": "--steps: got 0",
    "train --stage 3 --seeds 0": "--seeds: got 0",
    "train --stage 3 --seed -1": "--seed: got -1",
    f"train --stage 3 --seed {2**63}": "--seed: got",
    "train --stage 4 --device cpu": "4 triton_lite can't be trained with: carries no grad",
    "train --stage 4,6 --device cpu": "Stages 0, 2, 3, 7, 9 carry gradients",
    "train --stage 3 --out run.jsonl": "is there already",
    "generate --stage 99": "--stage: got 99, expected a file or some of 0",
    "generate --stage 5 --device cpu": "5 triton_online: takes no causal",
    "generate --context 0": "--context: got 0, expected whole numbers of at least 1",
    "generate --context 9 --tokens 1": "--tokens: got 1, expected a whole number from 4",
    "generate --context 2 --prompt long": "--prompt: got 4 characters, expected at most 2",
    "generate --load gone.pt": "--load: gone.pt: no such file",
    "generate --save run.jsonl": "--save: run.jsonl is there already",
    # trace
    "trace --n 0": "--n: got 0, expected a whole number from 1 to 1024",
    "trace --n 1025": "--n: got 1025, expected",
    "trace --n eight": "--n",
    "trace --n 65": "--n: got 65, expected 64 or fewer as text; --format json takes more",
    "trace --d 17": "--d: got 17, expected 16 or fewer as text; --format json takes more",
    "trace --d 0": "--d: got 0, expected a whole number from 1 to 256",
    "trace --d 257 --format json": "--d: got 257, expected",
    "trace --tile 0": "--tile: got 0, expected a whole number from 1 to",
    "trace --tile -2": "--tile: got -2",
    "trace --row 8": "--row: got 8, expected a whole number from 0 to 7",
    "trace --row -1": "--row: got -1",
    "trace --n 1 --row 1": "--row: got 1, expected a whole number from 0 to 0",
    "trace --seed -1": "--seed: got -1",
    "trace --seed 9223372036854775808": "--seed: got 9223372036854775808",
    "trace --inputs real": "--inputs: got 'real', expected one of normal, peaky",
    "trace --format rich": "--format: got 'rich', expected one of text, json",
    "trace --tiles 2": "--tiles",
    "trace --causal both": "--causal: got 'both', expected one of on, off",
    # records that can't be shown
    "show": "FILE",
    "show nothing.jsonl": "nothing.jsonl: No such file",
    "show run.jsonl nothing.jsonl": "nothing.jsonl: No such file",
    "show .": ".: Is a directory",
    "show -": "FILE: got -, expected the name of a file",
    "show pipe": "pipe: got no regular file",
    "show run.jsonl --format latex": "--format: got 'latex'",
    "show empty": "empty: no whole line in it",
    "show torn": "torn: no whole line in it",
    "show begun": "begun: no record in it",
    "show mixed": "mixed: line 3 is of kind 'train', expected 'cell'",
    "show unknown": "unknown: line 2 is not a record of ours: kind: got 'rumour'",
    "show twice": "twice: line 2 is of kind 'env'",
    "show no_env": "no_env: line 1 is of kind 'cell', expected 'env'",
    "show env_alone": "env_alone: line 1 is not a record of ours",
    "show bytes": "bytes: line 1 is not a record of ours",
    "show run.jsonl --plot run.jsonl": "--plot",
    "show crashed.jsonl --plot plots": "crashed.jsonl: no cell in it has anything to plot",
    f"show {H200}/model-float32.jsonl --plot plots": "no model in it has anything to plot",
    "show run.jsonl crashed.jsonl --plot plots": "--plot: got 2 files of records, expected one",
    "show run.jsonl crashed.jsonl --format csv": "--format csv: got 2 files",
    "show run.jsonl --roofline plots": "--roofline: expected --ceilings FILE, too",
    "show run.jsonl --dark": "--dark: it is for --roofline",
    f"show run.jsonl --ceilings {H200}/ceilings.jsonl": "measured on cuda, the run on cpu",
    "show run.jsonl --ceilings run.jsonl": "run.jsonl: line 2 is of kind 'cell'",
    f"show {H200}/train.jsonl --roofline plots --ceilings {H200}/ceilings.jsonl": "under a roof",
    # the old words
    "table": "FILE",
    "table nothing.jsonl": "nothing.jsonl: No such file",
    "plot nothing.jsonl": "--out",
    "plot nothing.jsonl --out here": "nothing.jsonl: No such file",
    "plot run.jsonl --out run.jsonl": "--out",
    "roofline run.jsonl --out here": "--ceilings",
    "bench --show gone.jsonl": "gone.jsonl: No such file",
    "bench --show gone.jsonl --out x.jsonl": "--out: got x.jsonl, expected a name in .csv",
    "bench --show gone.jsonl --out other.csv": "--out: other.csv is there already",
    "bench --show run.jsonl --n 8": "--n",
    "train --show x --stage 3": "--stage",
    "generate --show x --tokens 4": "--tokens",
    # no file is called -
    **dict.fromkeys(
        ("run --n 8 --out -", "bench --out -", "bench --show x --plots -", "ceilings --out -",
         "train --stage 3 --save -", "plot x --out -", "figures --out -", "lab start 5 --to -",
         "lab export - --stages 0-4", "lab grade . --stage 1 --out -",
         "lab grade . --stage 1 --junit -"), ": got -, expected "),
    # a name too long, wherever a file is meant
    **{
        f"{words} --out {out}": "File name too long"
        for words in ("run --n 8", "bench --n 16", "train --stage 3", "model --stage 3",
                      "ceilings", "io")
        for out in (LONG, f"{LONG}/x.jsonl", f"{LONG}.csv")
    },
    **dict.fromkeys(
        (f"show {LONG}", f"show run.jsonl --plot {LONG}", f"bench --show {LONG}",
         f"run --resume {LONG}", f"bench --resume {LONG}", f"bench --ceilings {LONG}",
         f"run --stage {LONG}", f"bench --stage {LONG}", f"train --stage {LONG}",
         f"figures --ceilings {LONG} --out p", "show \udcff", "run --n 8 --stage \udcff"), ""),
}  # fmt: skip
CALLS = {f"run --stages 3 --out new.jsonl {options}": says for options, says in RUN.items()} | ANY


@pytest.mark.parametrize("words", CALLS, ids=lambda words: ascii(words.replace(LONG, "LONG")))
def test_bad_arguments_are_one_line(folder, words):
    if " pipe" in words:
        os.mkfifo(folder / "pipe")
    refused(folder, words.split(" "), CALLS[words])


@pytest.mark.parametrize(
    ("words", "says"),
    [("run --device cuda --n 8", "--device: got cuda, but no GPU"),
     ("ceilings --device cuda", "--device: got cuda, but no GPU"),
     ("io --out io.jsonl", "io: a GPU is needed"),
     ("run --stages 3,100", "--stages: 100 needs a GPU that it can use"),
     ("bench --stages 3,sdpa_flash", "--stages: sdpa_flash needs a GPU"),
     ("bench --stages 9,100 --n 1024", "--stages: 100 needs a GPU"),
     ("bench --d 5", "--d: got 5, expected a divisor of 32, the size of all heads"),
     ("bench --n 20000", "--n: got 20000, expected at most the 256 tokens of a batch")],
)  # fmt: skip
def test_what_a_machine_without_a_gpu_refuses(folder, words, says):
    refused(folder, words.split(), says, without_gpu)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def attend(q, k, v:\n", "SyntaxError"),
        (ATTEND, "no STAGE"),
        ("STAGE = {'number': 90}\n" + ATTEND, "no STAGE"),
        (DECLARED, "no attend"),
        ("import sys\nsys.exit(0)\n", "SystemExit"),
        ("import os\nos._exit(0)\n", "exit code 0"),
        ("import no_such_module\n", "no_such_module"),
        (DECLARED.replace("=90", "=-1") + ATTEND, "Stage.number: got -1"),
    ],
)
def test_a_bad_stage_file_is_named(folder, text, says):
    (folder / "mine.py").write_text(text)
    words = ["run", "--stages", "3", "--n", "8", "--out", "new.jsonl", "--stage", "mine.py"]
    refused(folder, words, "ladder: mine.py: ")
    refused(folder, words, says)


@pytest.mark.slow
def test_what_is_no_stage_file_is_named(folder):
    for stages, name, says in (
        (["--stage", "none.py"], "none.py: ", "no such file"),
        (["--stage", folder], f"{folder}: ", "no such file"),
        (["--stage", "stage.txt"], "stage.txt: ", "not a Python file"),
        (fakes("modest", "modest"), "modest.py: ", "number 90, name 'modest'"),
    ):
        words = (*["run", "--stages", "3", "--n", "8", "--out", "new.jsonl"], *stages)
        refused(folder, words, f"ladder: {name}")
        refused(folder, words, says)


def test_ladder_alone_is_the_help():
    done = in_turn()
    assert done.returncode == 2
    for word in ("run", "show", "list", "doctor", "diff"):
        assert f" {word} " in done.stderr
    assert "Traceback" not in done.stderr


def test_good_sizes_are_understood():
    """What --memory takes, in powers of 1024."""
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
    [("run --n 8", False), ("run --n 8 --direction bwd", True), ("run --mode fwd,train", True),
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
