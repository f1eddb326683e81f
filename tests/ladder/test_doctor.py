"""`ladder doctor`: what runs here and what doesn't, and why; on poorer machines, too."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ladder_command import environ, installed, ladder, one_process, without_gpu
from rich.console import Console

from harness.isolation.roster import read_stages
from ladder import doctor
from stages.common import tuner


def without(folder, *modules):
    """An environment in which `modules` can't be imported, as if they were not installed."""
    folder.mkdir(exist_ok=True)
    lines = [f"sys.modules[{name!r}] = None" for name in modules]
    (folder / "sitecustomize.py").write_text("import sys\n" + "\n".join(lines) + "\n")
    usual = environ()
    return {**usual, "PYTHONPATH": f"{folder}:{usual['PYTHONPATH']}"}


def rows(text):
    """number -> the row of a stage, broken lines joined, reasons put in from below the table."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r" {0,2}(\d+) ", line):
            found[int(match[1])] = line
            last = int(match[1])
        elif found and line.startswith("     "):
            found[last] += " " + line.strip()
    for number, reason in re.findall(r"^\((\d+)\) (.*)$", text, re.MULTILINE):
        found = {stage: row.replace(f"({number})", reason) for stage, row in found.items()}
    return found


def test_it_says_what_the_machine_has_and_what_runs_without_a_gpu():
    done = without_gpu("doctor")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"python  {sys.version.split()[0]}" in done.stdout
    for package in ("torch", "triton", "numpy", "rich", "typer"):
        assert re.search(rf"\b{package} (\d|missing)", done.stdout)
    said = rows(done.stdout)
    assert set(said) >= {0, 1, 2, 3, 4, 5}
    assert "native" in said[3] and "native" in said[1]
    if sys.platform == "linux":  # triton has wheels for it only
        assert all("interpreted, no bfloat16" in said[number] for number in (4, 5))
    assert "no GPU" in done.stdout
    assert set(said) >= {100, 105}  # peers, also those that can't run here
    assert re.search(r"c\+\+ +\S", done.stdout)


def test_a_reason_is_said_once(monkeypatch):
    """On a laptop it was said eleven times: no GPU."""
    stages = read_stages(absent=True)
    why = "no GPU: this torch is built without CUDA"
    poor = [replace(s, unavailable={"cpu": s.unavailable["cpu"], "cuda": why}) for s in stages]
    out = io.StringIO()
    doctor.show(poor, Console(file=out, width=80))
    text = out.getvalue()
    assert text.count(why) == 1 and max(map(len, text.splitlines())) <= 80
    assert all(why in row for row in rows(text).values())
    alone = "needs compute capability 9.x; this GPU has 8.0"
    at = next(i for i, stage in enumerate(poor) if stage.number == 9)
    poor[at] = replace(poor[at], unavailable={"cpu": None, "cuda": alone})
    doctor.show(poor, Console(file=out, width=200))
    assert alone in rows(out.getvalue())[9]


def test_it_says_what_the_gpu_is_and_how_stages_run_on_it():
    stages, out = read_stages(absent=True), io.StringIO()
    doctor.show(stages, Console(file=out, width=200))
    assert "This GPU" not in out.getvalue()
    here = {"card": "compute capability 8.9", "float16": "half: 64x32", "float32": "bf16x6: 32x16"}
    at = next(i for i, stage in enumerate(stages) if stage.number == 6)
    stages[at] = replace(stages[at], here=here)
    doctor.show(stages, Console(file=out, width=200))
    said = out.getvalue().partition("This GPU: compute capability 8.9.")[2]
    assert rows(said)[6].split() == ["6", "half:", "64x32", "bf16x6:", "32x16"]
    assert all(f"{kind}: " in said for kind in ("half", "bf16x6", "tf32", "ieee"))


def test_the_rule_that_it_tells_is_the_tuner_s():
    assert f"within {tuner.AS_FAST - 1:.0%} of the fastest" in doctor.TUNER


@pytest.mark.slow
def test_without_triton_and_the_extension_their_stages_say_so_and_the_rest_runs(tmp_path):
    out = tmp_path / "run.jsonl"
    with one_process(without(tmp_path / "poor", "triton", "ladder_value_graph")) as ladder:
        done = ladder("doctor")
        run = ladder("run", "--n", 4, "--d", 4, "--out", out)
    assert done.returncode == 0, done.stderr
    said = rows(done.stdout)
    assert "no triton" in said[4] and "no triton" in said[5]
    assert "extension is not built" in said[2] and "pip install" in said[2]
    assert "native" in said[3] and "native" in said[1]
    assert run.returncode == 0, run.stderr
    statuses = dict(re.findall(r"\] (\d+) \S+, N = 4, d = 4: (\S+)", run.stderr))
    expected = {"0": "ok", "1": "ok", "2": "skipped", "3": "ok", "4": "skipped", "5": "skipped"}
    assert {number: statuses[number] for number in expected} == expected
    assert "no triton" in run.stdout and "extension is not built" in run.stdout


@pytest.mark.slow
def test_a_minimal_machine_runs_from_a_checkout(tmp_path):
    """Torch, numpy, rich and typer; nothing for plots, tests or processes."""
    env = without(tmp_path / "poor", "matplotlib", "psutil", "hypothesis", "pytest")
    out = tmp_path / "run.jsonl"
    with one_process(env) as ladder:
        done = ladder("run", "--stages", 3, "--n", 8, "--out", out)
        assert done.returncode == 0, done.stderr
        assert "torch, three GEMMs" in done.stdout
        done = ladder("table", out)
        assert done.returncode == 0 and "torch, three GEMMs" in done.stdout
        done = ladder("plot", out, "--out", tmp_path / "plots")
    assert done.returncode == 2
    assert done.stderr.startswith("ladder: plots need matplotlib") and done.stderr.count("\n") == 1
    assert not (tmp_path / "plots").exists()


@pytest.mark.slow
def test_without_torch_it_says_so(tmp_path):
    """The one thing that nothing runs without."""
    done = ladder("doctor", env=without(tmp_path / "poor", "torch"))
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "torch" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_it_fails_where_stage_3_can_not_run(tmp_path):
    """In a copy of the checkout whose stage 3 needs compute capability 99."""
    env = installed(tmp_path)
    stage3 = tmp_path / "stages" / "s03_torch_three_gemm.py"
    text = stage3.read_text()
    broken = text.replace(
        "STAGE = Stage(\n", 'STAGE = Stage(\n    needs=("cuda",), capability=(99, 0),\n'
    )
    assert broken != text
    stage3.write_text(broken)
    done = ladder("doctor", cwd=tmp_path, env=env)
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "native" in rows(done.stdout)[1]  # the others are still told


@pytest.mark.parametrize(
    ("home", "path", "shown"),
    [("/home/me", "/home/me/.cache/f", "~/.cache/f"), ("/home/me", "/home/meg/f", "/home/meg/f"),
     ("/home/me", "/mnt/home/me/f", "/mnt/home/me/f"), ("", "/root/f", "/root/f")],
)  # fmt: skip
@pytest.mark.skipif(sys.platform == "win32", reason="homes of another kind")
def test_a_path_is_said_from_the_home(monkeypatch, home, path, shown):
    monkeypatch.setenv("HOME", home)
    assert doctor.from_home(Path(path)) == shown
