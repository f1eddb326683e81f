"""What `ladder --help` says: whole summaries in groups, examples that run; and what it costs."""

import re
import shlex
import subprocess
import sys

import pytest
import typer
from ladder_command import ROOT, command, environ, in_turn, ladder, one_process

from harness.records.code import built_in_files, label, peer_files, twin_files
from ladder import app, doctor, help

EVERY = typer.main.get_command(app.app).commands
COMMANDS = {name: command for name, command in EVERY.items() if not command.hidden}
GONE = ("torch", "numpy", "triton", "matplotlib")


def narrow(*arguments):
    """`ladder ARGUMENTS` on a terminal of 80 columns."""
    return subprocess.run(command(*arguments), cwd=ROOT, env=environ(COLUMNS="80"), text=True,
                          capture_output=True, stdin=subprocess.DEVNULL)  # fmt: skip


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_each_command_has_a_whole_summary_under_a_heading(option):
    done = narrow(option)
    assert (done.returncode, done.stderr) == (0, "")
    shown, heading = {}, ""
    for line in done.stdout.splitlines():
        assert len(line) <= 80 and "..." not in line.replace("[ARGS]...", "")
        if found := re.match(r"([A-Z].*):$", line):
            heading = found[1]
        if (found := re.match(r"  ([a-z]+)  +(\S.*)$", line)) and heading != "Options":
            shown[found[1]] = (heading, found[2])
    assert shown.keys() == COMMANDS.keys()
    assert len({heading for heading, _ in shown.values()}) > 2
    for name, (_, summary) in shown.items():
        assert summary == COMMANDS[name].help.splitlines()[0] and summary.endswith(".")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_examples_that_it_takes(name):
    done = in_turn(name, "-h")
    assert done.returncode == 0
    assert in_turn(name, "--help").stdout == done.stdout
    lines = done.stdout.partition("Examples:\n")[2].splitlines()
    calls = [shlex.split(line, comments=True) for line in lines if line.strip()]
    assert calls
    for ladder_, called, *options in calls:
        assert (ladder_, called) == ("ladder", name)
        COMMANDS[name].make_context(name, options)  # raises what typer would say


RUNS = {option: param for param in COMMANDS["run"].params for option in param.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_one_name_for_one_thing(name):
    """--stages takes several by number, --stage FILE one more; --stage N where there is one."""
    shown = {
        option: parameter
        for parameter in COMMANDS[name].params
        for option in parameter.opts
        if option.startswith("--") and not parameter.hidden
    }
    assert not {"--impl", "--direction", "--plots", "--show"} & shown.keys()
    if "--stages" in shown or name in ("model", "train"):
        assert ("--stages" in shown) != (name in ("model", "train"))
    if name in ("run", "bench"):
        assert "file" in shown["--stage"].help
        for option in ("--mode", "--causal", "--nq"):
            assert shown[option].help == RUNS[option].help
    if name in ("model", "train"):
        assert shown["--stage"].metavar == "N" and "repeated" not in shown["--stage"].help


@pytest.fixture
def without(tmp_path):
    """An environment in which nothing large can be imported, by children neither."""
    for module in GONE:
        (tmp_path / f"{module}.py").write_text(f"raise RuntimeError('{module} was imported')\n")
    return environ(PYTHONPATH=f"{tmp_path}:{ROOT}")


@pytest.mark.skipif(sys.platform == "win32", reason="a path's separator")
def test_what_needs_no_torch_loads_none(without):
    with one_process(without) as run:
        for arguments in ("--help", "--version", "run --help", "list", "diff 4 5"):
            done = run(*arguments.split())
            assert (done.returncode, done.stderr) == (0, "") and done.stdout, arguments
        assert "was imported" in run("run", "--n", 8).stderr  # it would show


def test_help_and_version_load_no_stage():
    code = (
        "import sys\nfrom ladder.app import main\n"
        "try:\n    main([sys.argv[1]])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'stages', 'numpy', 'matplotlib'} & sys.modules.keys()\n"
    )
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", code, option], cwd=ROOT, env=environ(),
                              capture_output=True, text=True)  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_the_projects():
    done = in_turn("--version")
    assert (done.returncode, done.stderr) == (0, "")
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert done.stdout.startswith(f"ladder {version} (Python {sys.version_info[0]}.")


def test_list_holds_every_stage_and_peer_and_ones_own(monkeypatch, tmp_path, capsys):
    mine = tmp_path / "s90_mine.py"
    mine.write_text(
        "from stages.contract import Stage\nIDEA = 'mine alone'\n"
        "STAGE = Stage(number=90, name='mine', title='my stage', idea=IDEA)\n"
        "def attend(q, k, v):\n    return q\n"
    )
    monkeypatch.setattr(doctor, "built_in_files", lambda: [*built_in_files(), mine])
    assert doctor.list_command() == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = [int(found[1]) for line in lines if (found := re.match(r" *(\d+) ", line))]
    ours = sorted([*built_in_files(), *twin_files()], key=label)
    files = [*ours, mine, *peer_files()]
    assert numbers == [int(re.match(r"[sp](\d+)_", label(path))[1]) for path in files]
    assert any(re.match(r" *90 +my stage +mine alone", line) for line in lines)


@pytest.mark.slow
def test_a_shell_completes_commands_and_options():
    def completed(words):
        count = str(len(words.split()) - 1)
        env = environ(_LADDER_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count)
        return ladder(env=env).stdout.split()

    assert completed("ladder s") == ["show"] and completed("ladder ro") == []
    assert completed("ladder run --seq") == ["--seqlens"]
    assert "--show-completion" in in_turn("--help").stdout


@pytest.mark.skipif(sys.platform == "win32", reason="scripts of another kind")
def test_a_command_is_printed_as_it_can_be_typed(tmp_path, monkeypatch):
    """`ladder: command not found` was what came of the tour's last line."""
    scripts = tmp_path / "a venv" / "bin"
    scripts.mkdir(parents=True)
    monkeypatch.setattr(help.sysconfig, "get_path", lambda _: str(scripts))
    monkeypatch.setattr(help.sys, "executable", str(scripts / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert help.as_typed("doctor") == "'a venv/bin/python' -m harness doctor"
    for folder in (scripts, tmp_path):  # the second is another environment's
        (folder / "ladder").touch(mode=0o755)
    assert help.as_typed("doctor") == "'a venv/bin/ladder' doctor"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert help.as_typed("doctor") == "'a venv/bin/ladder' doctor"
    monkeypatch.setenv("PATH", str(scripts))
    assert help.as_typed("doctor") == "ladder doctor"
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(scripts)  # a bare name would be looked for on the PATH
    assert help.as_typed("doctor") == f"'{scripts}/ladder' doctor"
