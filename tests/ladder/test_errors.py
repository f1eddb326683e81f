"""Bad arguments: one clear line on stderr, exit code 2, no traceback, nothing written."""

import json
import os
import tomllib
from pathlib import Path

import pytest
import typer
from ladder_command import ROOT, fakes, in_turn, without_gpu
from made_up import make_cell, make_env, write_run

from harness.records import jsonl
from ladder import app, arguments, measuring
from ladder.options import UserError, size

H200 = ROOT / "results" / "h200"
STAGE = "from stages.contract import Stage\n"
DECLARED = STAGE + 'STAGE = Stage(number=90, name="bad", title="bad", idea="bad")\n'
ATTEND = "def attend(q, k, v):\n    return q\n"
LONG = "n" * 300  # a name that no file can have


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """name -> what is in each file of records, good and bad, and in others."""
    folder, cells = tmp_path_factory.mktemp("records"), [make_cell()]
    run = write_run(folder / "run.jsonl", make_env(cells), cells).read_bytes()
    first, second = run.splitlines(keepends=True)
    cells = [make_cell(status="crashed", time_ms=None, peak_bytes=None, err_f64_max=None)]
    crashed = write_run(folder / "crashed.jsonl", make_env(cells), cells).read_bytes()
    trained = (H200 / "train.jsonl").read_bytes().splitlines(keepends=True)
    ceilings = (H200 / "ceilings.jsonl").read_bytes().splitlines(keepends=True)
    return {
        "run.jsonl": run, "crashed.jsonl": crashed, "stage.txt": (DECLARED + ATTEND).encode(),
        "no_copy": b"".join(line for line in ceilings if b'"copy"' not in line),
        "there.jsonl": b"somebody's\n", "other.csv": b"mine", "empty": b"", "torn": first[:40],
        "cut": first + second + second[:-20],
        "begun": first, "mixed": first + second + trained[1], "trained": trained[0] + trained[1],
        "unknown": first + b'{"kind": "rumour"}\n', "twice": first + first, "no_env": second,
        "env_alone": b'{"kind": "env"}\n', "bytes": b"\xff\xfe\n", "text": b"no line at all",
        "not_ours": b'{"a": 1}\n{"b"', "zeros": b"\x00\xff\n\x00",
        "peer.py": (DECLARED.replace("=90", "=100") + ATTEND).encode(),
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path, contents):
    """A folder with those files."""
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
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


@pytest.mark.parametrize("late", [False, True])
def test_of_two_commands_with_one_out_the_second_is_told_so(late, tmp_path, monkeypatch):
    """The first makes the file when the second has looked for it, or has written its draft."""
    out = tmp_path / "same.jsonl"

    def first(*_):
        out.write_text("the first's")
        return b"the second's"

    if late:
        monkeypatch.setattr(jsonl, "dump_line", first)
    with pytest.raises(UserError) as raised:
        measuring.begin("run-", out, "cpu", {}, check=dict if late else first)
    assert str(raised.value) == f"--out: {out} is there already: name another"
    assert out.read_text() == "the first's" and [*tmp_path.iterdir()] == [out]


TABLE = tomllib.loads(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))
ANY = {words.replace("H200", str(H200)): says for words, says in TABLE["any"].items()} | {
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
CALLS = ANY | {
    f"run --stages 3 --out new.jsonl {options}": says for options, says in TABLE["run"].items()
}


def commands(command, *words):
    """The words and the click command of each command below `command`."""
    if below := getattr(command, "commands", None):
        for name, each in below.items():
            yield from commands(each, *words, name)
    else:
        yield words, command


# options that take any text, or the name of a file or a peer
FREE = {"--stage", "--out", "--resume", "--expect", "--plot", "--ceilings", "--save", "--load",
        "--prompt", "--text", "--weights", "--roofline", "--show", "--plots", "--to", "--points",
        "--gradebook", "--column", "--junit", "--gradescope", "--only", "bench --stages",
        "ring --stages", "lab export --stages"}  # fmt: skip


def test_every_option_refuses_a_value_that_it_can_not_read(capsys):
    asked = 0
    for words, command in commands(typer.main.get_command(app.app)):
        for option in command.params:
            name = option.opts[0]
            if option.param_type_name != "option" or option.is_flag:
                continue
            if {name, " ".join((*words, name))} & FREE:
                continue
            with pytest.raises(Exception) as raised:
                command.make_context(words[-1], [f"{name}=@"])
            assert app.exit_code(raised.value) == 2
            out, err = capsys.readouterr()
            assert out == "" and err.startswith(f"ladder: {name}: got '@', expected"), err
            assert err.count("\n") == 1
            asked += 1
    assert asked > 70


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
        (ATTEND, "ladder: mine.py: ValueError: no STAGE"),
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
        (["--stage", folder], f"{folder}: ", "no __init__.py in it"),
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
