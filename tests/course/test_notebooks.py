"""The notebooks: each runs on this machine, and what is committed is what its script makes."""

import contextlib
import importlib.metadata
import importlib.util
import re
import shlex
import socket
import statistics
import threading
import tomllib
from functools import lru_cache
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace

import build_notebooks as tool
import nbformat
import pytest
from jupyter_client.manager import KernelManager
from ladder_command import in_turn
from nbclient import NotebookClient

from course import notebook as nb
from course.lessons.side_by_side import BLANK, braces, changed, extent, fingerprint, folded
from harness.records.environment import own_files
from harness.records.jsonl import read

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
MOST_BYTES = 400_000
CELLS = range(10, 26)
# forward, 7 and 8 walk tiles as 6 does
PAIRS = [*((n, n + 1) for n in range(7)), (6, 8), (6, 9), (9, 10)]
STEPS = ["00_overview", *(f"{a:02d}_to_{b:02d}" for a, b in PAIRS), "primer"]

script = lru_cache(tool.from_script)
no_triton = importlib.util.find_spec("triton") is None
every = pytest.mark.parametrize("name", STEPS)


def committed(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook):
    """What the outputs say, in letters: streams, text and HTML; pictures left out."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                yield output.text
            for kind, data in output.get("data", {}).items():
                if kind.startswith("text/"):
                    yield re.sub(r"data:image/[^\"]*", "", data)


TIME = re.compile(r"\d ?(ns|us|ms|s)\b")


def times_of_kernels(text):
    """Rows of tables measured on a CPU in which a Triton kernel, or one's own, has a time."""
    where = ""
    for line in text.splitlines():
        if line.startswith(("N = ", "Nq = ")):
            where = line
        kernel = re.match(r"\d+ Triton|9\d ", line)
        if where.endswith("cpu") and kernel and TIME.search(line):
            yield line


def check_outputs(notebook):
    """What holds of the outputs of any notebook of ours, committed or just executed."""
    places = r"(?<![\w.:/-])/(home|root|tmp|work|Users|usr|opt|private|var|mnt|content)/"
    for text in texts(notebook):
        assert not re.search(places, text), "a path of this machine"
        assert str(ROOT) not in text
        assert str(Path.home()) + "/" not in text
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
        assert not list(times_of_kernels(text))
        for line in text.splitlines():
            assert not ("interpreted" in line and TIME.search(line)), line
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text
            data = output.get("data", {})
            if "text/html" in data:  # a terminal, and who reads by ear, get the text
                assert data["text/plain"].strip() and not data["text/plain"].startswith("\n")
            if "image/png" in output.get("data", ()):  # words for who doesn't see it
                assert len(output.metadata["image/png"]["alt"].split()) > 10


def test_there_is_a_notebook_for_each_step():
    assert tool.names() == STEPS
    assert {path.stem for path in own_files("notebooks/*.ipynb")} >= set(STEPS)


ALONE = "06_to_08"  # it has a kernel of its own, and its measurement a process, as for a reader
# run by the kernel of the others before their first cells: none has what another has named
AGAIN = "get_ipython().reset()\nimport os\nos.chdir({folder!r})"
IN_TURN = """
import os
from multiprocessing.connection import Client
from types import SimpleNamespace
from course import notebook


def run(command, **_):
    with Client({address!r}) as connection:
        connection.send((command[4:], os.getcwd()))
        return SimpleNamespace(**connection.recv())


notebook.subprocess = SimpleNamespace(run=run)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A kernel for one notebook after another: most of executing one is its start-up.

    Its `nb.measure` has its commands carried out here, for the same reason.
    """
    folder = tmp_path_factory.mktemp("kernel")
    listener = Listener(str(folder / "commands"))

    def answer():
        with contextlib.suppress(OSError):  # closed
            while True:
                with listener.accept() as connection:
                    arguments, folder = connection.recv()
                    connection.send(vars(in_turn(*arguments, cwd=folder)))

    threading.Thread(target=answer, daemon=True).start()
    manager = KernelManager()
    code = IN_TURN.format(address=listener.address)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))  # no start-up files of whoever tests
        carry_out(manager, f"exec({code!r}, {{}})")  # names of its own, which stay
    yield manager
    manager.shutdown_kernel(now=True)
    listener.close()


def carry_out(manager, code):
    """Have a kernel carry out what is no notebook's."""
    cell = nbformat.v4.new_code_cell(code)
    NotebookClient(nbformat.v4.new_notebook(cells=[cell]), km=manager).execute()


@pytest.mark.slow
@every
def test_each_notebook_executes(name, tmp_path, request):
    (tmp_path / "here").mkdir()
    manager = None
    if name != ALONE:
        manager = request.getfixturevalue("kernel")
        carry_out(manager, AGAIN.format(folder=str(tmp_path / "here")))
    notebook = tool.execute(name, tmp_path / "here", manager)
    check_outputs(notebook)
    if name == "04_to_05" and not no_triton:
        check_exercise(notebook)


def check_exercise(notebook):
    """The blanks are refused, the answer is right, and a missing correction is found out."""
    judged = "\n".join(texts(notebook))
    found = {}
    for title, table in re.findall(r"^N = (\d+),.* peaky .*\n((?:.+\n)+)", judged, re.MULTILINE):
        for line in table.splitlines():
            if row := re.match(r"(\d+) .* (\S+)$", line):
                found[int(row[1]), int(title)] = row[2]
    sizes = (64, 65, 128)
    assert [found[90, n] for n in sizes] == ["crashed"] * 3
    assert [found[91, n] for n in sizes] == ["ok"] * 3
    assert [found[92, n] for n in sizes] == ["ok", "wrong", "wrong"]
    assert [found[4, n] for n in sizes] == ["ok", "wrong-by-design", "wrong-by-design"]
    assert [found[5, n] for n in sizes] == ["ok"] * 3


@every
def test_the_committed_one_is_its_script_executed(name):
    notebook = committed(name)
    made = [(cell.cell_type, cell.source) for cell in script(name).cells]
    again = f"its script has changed: python tools/build_notebooks.py {name}"
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == made, again
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES
    assert len(notebook.cells) in CELLS
    check_outputs(notebook)
    check_exercise(notebook) if name == "04_to_05" else None


@every
def test_the_committed_one_shows_the_code_and_the_records_of_today(name):
    cited = {
        match
        for text in texts(committed(name))
        for match in re.findall(r"((?:stages|csrc|results)/[\w./-]+), sha256 ([0-9a-f]{12})", text)
    }
    again = f"python tools/build_notebooks.py {name}"
    for place, digest in cited:
        assert fingerprint(ROOT / place) == f"{place}, sha256 {digest}", f"{place} changed: {again}"
    if name not in ("00_overview", "primer"):
        shown = {place[len("stages/s") :][:2] for place, _ in cited if place.startswith("stages/")}
        assert shown >= {part for part in name.split("_to_") if part != "02"}
        assert "csrc/attention.cpp" in {place for place, _ in cited} or "02" not in name


def test_the_folded_answer_is_the_stages_own_lines():
    words = "\n".join(cell.source for cell in committed("04_to_05").cells)
    folded_answer = re.search(r"```python\n(.*?)```", words, re.DOTALL)[1].splitlines()
    exercise = nb.Exercise(4, 5, "attention_kernel")
    assert folded_answer == [re.sub(r"  #.*", "", line) for line in exercise.answer]


def inline(pattern):
    """Inline code of all notebooks' words that matches, once each."""
    found = {}
    for name in STEPS:
        lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
        words = "\n".join(line[2:] if line.startswith("# ") else "" for line in lines)
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", words):
            if re.match(pattern, code):
                found[" ".join(code.split())] = name
    return list(found)


@pytest.mark.slow
@pytest.mark.parametrize("call", inline(r"nb\.measure\("))
def test_a_measurement_that_an_exercise_asks_for_works(call, monkeypatch):
    # the notebooks themselves have a process for each of theirs
    turns = SimpleNamespace(run=lambda command, **_: in_turn(*command[4:]))
    monkeypatch.setattr(nb, "subprocess", turns)
    run = eval(call, {"nb": nb})
    assert {cell["status"] for cell in run} <= {"ok", "skipped"}
    assert any(cell["status"] == "ok" for cell in run)


@pytest.mark.parametrize("command", inline(r"ladder \w+ --.*mine\.py"))
def test_the_judges_command_in_the_words_is_executed_as_it_stands(command):
    """In the notebook itself; test_docs.py runs the other commands in the words."""
    shown = "\n".join(texts(committed("04_to_05")))
    (line,) = set(re.findall(r"^\$ (ladder run .*--stage mine\.py.*)$", shown, re.MULTILINE))
    assert set(shlex.split(command)) <= set(shlex.split(line))


# what executes them


def test_the_first_cell_is_everywhere_the_same_and_names_what_the_project_has():
    (first,) = {code_cells(script(name))[0].source for name in STEPS}
    extra = re.search(r"%pip install -e \"\.\.\[(\w+)\]\"", first)[1]
    text = (ROOT / "pyproject.toml").read_text()
    assert extra in tomllib.loads(text)["project"]["optional-dependencies"]
    exec(first, names := {})  # where the project is, it is an import
    assert names["nb"] is nb


# the views


def record(**fields):
    """The env and one cell of a committed run, changed as told."""
    env, cells = read(ROOT / "results" / "cpu" / "table-4.1.jsonl")
    found = next(cell for cell in cells if cell["stage"] == 5 and cell["nk"] == cell["nq"] == 64)
    return nb.Records(env, [{**found, **fields}], "$ made up")


def test_an_interpreted_time_is_not_shown():
    shown = nb.judged(record(mode="interpreted", status="ok", time_ms=12.5, paired=False))
    assert "12.5" in str(nb.judged(record(mode="native", status="ok", time_ms=12.5, paired=False)))
    for text in (shown.text, shown.html):
        assert "12.5" not in text
        assert "interpreted" in text


def test_a_ratio_is_of_right_answers_in_turns_or_none():
    run = nb.recorded("cpu/steps.jsonl")
    slow, fast = (run.one(stage=x, nk=64, paired=True)["rounds_ms"] for x in (0, 1))
    ratio = statistics.median(x / y for x, y in zip(slow, fast, strict=True))
    assert f" stage 1 is {ratio:#.3g}x (" in nb.ratio(run, 0, 1, nk=64)
    rounds = {0: [8.0, 9.0, 8.0, 80.0], 1: [2.0, 2.0, 1.6, 20.0]}
    kept = [cell | {"rounds_ms": rounds.get(cell["stage"])} for cell in run]
    said = nb.ratio(nb.Records(run.env, kept, ""), 0, 1, nk=64)
    assert "stage 1 is 4.25x (4.00-4.62) as fast as stage 0, in brackets the quartiles" in said
    kept = [cell | {"rounds_ms": None} for cell in run]
    assert "(" not in nb.ratio(nb.Records(run.env, kept, ""), 0, 1, nk=64)
    bad = [{**cell, "status": "wrong", "reason": "so it is"} for cell in run]
    assert "no ratio" in nb.ratio(nb.Records(run.env, bad, ""), 0, 1, nk=64)
    with pytest.raises(KeyError):
        nb.ratio(run, 0, 1)


@pytest.mark.slow
def test_a_gpu_is_given_enough_to_do_and_a_cpu_nothing_more(monkeypatch):
    monkeypatch.setattr(nb, "here", lambda cpu, gpu: cpu)
    assert nb.full_load() == {}
    monkeypatch.setattr(nb, "here", lambda cpu, gpu: gpu)
    run = nb.measure(stages="3", n="8", d=8, **nb.full_load())  # options that ladder run has
    (cell,) = run.records
    assert (cell["dtype"], cell["h"], cell["status"]) == ("float16", 32, "ok")


def test_what_ladder_refuses_is_raised_in_its_own_words():
    with pytest.raises(RuntimeError, match="--n: got 'x'"):
        nb.measure(stages="1", n="x")


def test_side_by_side_marks_each_changed_line_and_no_other():
    old, new = nb.code(4, "attention_kernel"), nb.code(5, "attention_kernel")
    gone, come = changed(old, new)
    assert set(gone) <= set(old.lines) - set(new.lines)
    shown = nb.side_by_side(old, new)
    marked = re.findall(r"<b [^>]*> *(\d+) ([-+])", shown.html)
    assert [mark for _, mark in marked].count("-") == len(gone) > 0
    assert [mark for _, mark in marked].count("+") == len(come) > 0
    text = old.path.read_text().splitlines()
    assert {text[int(number) - 1] for number, mark in marked if mark == "-"} == set(gone)
    assert "<style" not in shown.html


def test_a_folded_line_loses_nothing():
    for line in nb.code(7).lines:
        assert "".join("".join(folded(line)).split()) == "".join(line.split())


def test_a_function_is_found_whole_and_what_is_not_there_is_said():
    text = "@f\ndef a():\n    pass\n\n\nclass B:\n    def c(self):\n        return 1\n"
    assert extent(text, "a") == (1, 3)
    assert extent(text, "B.c") == (7, 8)
    cpp = "int f();\nint f() {\n  if (1) {\n  }\n}\n"
    assert braces(cpp, "int f") == (2, 5)
    for find in (extent, braces):
        with pytest.raises(KeyError, match="nowhere"):
            find("", "nowhere")


def test_an_exercise_is_the_upper_stage_but_for_its_blanks():
    exercise = nb.Exercise(4, 5, "attention_kernel")
    kernel = "\n".join(nb.code(5, "attention_kernel").lines)
    assert kernel in exercise.filled(exercise.answer)
    template = exercise.filled(exercise.blanked())
    assert template.count(f"= {BLANK}\n") == len(exercise.answer)
    for line in exercise.answer:
        assert line not in template
    assert "alpha = exp" not in template  # nor is the answer in its docstring
    with pytest.raises(ValueError, match=f"expected {len(exercise.answer)}"):
        exercise.filled(exercise.answer[1:])
