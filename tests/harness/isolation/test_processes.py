"""The processes: who imports torch, who computes, and what a child says."""

import gc
import json
import os
import signal
import subprocess
import sys

import pytest
from ladder_command import PATIENCE, ROOT, RUN, YARDSTICK, environ, fakes, measured

from harness.isolation import fork_server
from harness.isolation.child import Child, hear, say, starts_nothing


def python(code, *arguments):
    """The output of a script that is run from the checkout, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_command_line_and_the_runner_import_no_torch():
    loaded = python(
        "import json, sys\nimport ladder.app, ladder.doctor\n"
        "import harness.runs.comparison, harness.views.cell_tables\n"
        "import harness.views.plots, harness.views.roofline\n"
        "import harness.isolation.child, harness.isolation.measured_stage\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    assert not {"torch", "triton", "matplotlib", "stages"} & set(loaded)


SERVER = """
import importlib, json, multiprocessing.forkserver, os, sys, tempfile
from pathlib import Path
os.environ["OMP_NUM_THREADS"] = "2"  # an operation would start the other one
from harness.isolation.child import Child
from harness.isolation.fork_server import OF_GRADIENTS
from harness.isolation.roster import describe

stage3 = next(Path("stages").glob("s03_*.py")).resolve()
with tempfile.TemporaryDirectory() as folder:
    with Child(describe, [str(stage3)]) as child:
        said = child.receive(120, "no answer")
        said = child.receive(120, "no answer")
        server = multiprocessing.forkserver._forkserver
        status = Path(f"/proc/{server._forkserver_pid}/status").read_text()
        maps = Path(f"/proc/{server._forkserver_pid}/maps").read_text()
        list(map(importlib.import_module, server._preload_modules))
        loaded = list(sys.modules)
        list(map(importlib.import_module, OF_GRADIENTS))
        import torch
        known = set(sys.modules)
        x = torch.ones(2, requires_grad=True)
        torch.autograd.grad(x * x, x, torch.ones(2))
        print(json.dumps({"event": said["event"], "status": status, "torch": "libtorch" in maps,
                          "loaded": loaded, "by gradients": sorted(set(sys.modules) - known)}))
"""


@pytest.mark.slow
def test_the_fork_server_has_what_children_need_and_runs_no_operation():
    """An operation would leave threads behind, which a child's copy of it then waits for."""
    said = python(SERVER)
    assert said["event"] == "stage"
    assert said["torch"]
    threads = [line for line in said["status"].splitlines() if line.startswith("Threads:")]
    assert threads == ["Threads:\t1"]
    assert not [name for name in said["loaded"] if name.startswith("stages.s")]
    assert said["by gradients"] == [], "each child that computes gradients would import it"


def say_whether_garbage_is_looked_for(connection):
    say(connection, "collector", on=gc.isenabled(), frozen=gc.get_freeze_count())


def test_the_fork_server_imports_without_the_collector_and_each_child_has_it():
    """It is off there from the first import on, and none of it is looked through again."""
    assert fork_server.PRELOADED[0] == "harness.no_garbage"
    with Child(say_whether_garbage_is_looked_for) as each:
        said = each.receive(PATIENCE, "no answer")
    assert said["on"] and said["frozen"] > 100_000


@starts_nothing
def answers(connection):
    say(connection, "hears")
    say(connection, "heard", what=hear(connection)["what"])


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no process can be stopped here")
def test_a_judge_that_another_process_has_stopped_answers():
    with Child(answers) as each:
        each.receive(PATIENCE, "no greeting")
        os.kill(each.process.pid, signal.SIGSTOP)
        each.send({"what": "this"})
        assert each.receive(PATIENCE, "no answer")["what"] == "this"


def test_each_cell_has_a_process_of_its_own_and_no_stage_meets_another(tmp_path):
    """What a stage leaves in its process, or in torch, is gone for the next one."""
    asked = (*RUN, "--stages", 3, "--n", "20,32", *fakes("spoils"))
    _, cells = measured(tmp_path, *asked, code=1)
    assert [cell["status"] for cell in cells[YARDSTICK]] == ["ok", "ok"]
    assert [cell["status"] for cell in cells["spoils"]] == ["crashed", "crashed"]
    assert "ZeroDivisionError" in cells["spoils"][0]["reason"]


def test_paired_cells_hold_their_own_times_and_only_right_stages_compete(tmp_path):
    names = ("raw_python", YARDSTICK, "naps")
    asked = (*RUN, "--stages", "1,3", "--n", 8, "--paired", *fakes("ignores_v", "naps"))
    _, cells = measured(tmp_path, *asked, code=1)
    for name in names:
        assert [cell["paired"] for cell in cells[name]] == [False, True]
        assert [cell["status"] for cell in cells[name]] == ["ok", "ok"]
        assert cells[name][0]["rounds_ms"] is None  # it took turns with nobody
        assert cells[name][1]["time_ms"] > 0
    [samples] = {cells[name][1]["samples"] for name in names}
    assert {len(cells[name][1]["rounds_ms"]) for name in names} == {samples} and samples >= 5
    assert cells["naps"][1]["time_ms"] > 15
    wrong, turn = cells["ignores_v"]
    assert (wrong["status"], turn["status"]) == ("wrong", "skipped")
    assert "not ok by itself" in turn["reason"] and turn["time_ms"] is None
