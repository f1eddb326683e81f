"""Stages import on every machine, load from anywhere, and say what they miss; each in a process."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from marks import quickly

import stages
from harness.records.code import STAGES, behind, built_in_files

ROOT = Path(__file__).parents[2]
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not HAS_TRITON and sys.platform != "linux", reason="no wheel of triton for this machine"
)

# prints, a stage: why_not on the CPU, and what attend says (None: it gave an output)
EVERY_STAGE = """
import json
import torch
import stages
from stages.common.contract import StageUnavailable, why_not

said = {}
from harness.records.code import built_in_files
for path in built_in_files():
    stage = stages.load(path)
    try:
        o = stage.attend(*torch.ones(3, 1, 1, 2, 4))
        error = None if torch.allclose(o, torch.ones(1)) else "wrong"
    except StageUnavailable as unavailable:
        error = str(unavailable)
    said[stage.STAGE.number] = [list(stage.STAGE.needs), why_not(stage.STAGE, "cpu"), error]
print(json.dumps(said))
"""


# forks for each line of code that it is sent: to import torch takes longer than most of them
WARM = """
import json, os, sys
import torch

for line in sys.stdin:
    code, environment, out, errors = json.loads(line)
    if not (child := os.fork()):
        for path, stream in ((out, 1), (errors, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.environ.update(environment)
        exec(code, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function: the JSON that code prints in a process of its own, which sees no GPU.

    It has torch, and neither triton nor a stage.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    clean |= {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    folder = tmp_path_factory.mktemp("said")
    out, errors = folder / "out", folder / "errors"
    with subprocess.Popen(
        [sys.executable, "-c", WARM], env=clean, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as warm:  # fmt: skip

        def said(code, **environment):
            asked = (code, environment, str(out), str(errors))
            warm.stdin.write(json.dumps(asked) + "\n")
            warm.stdin.flush()
            assert warm.stdout.readline() == "0\n", errors.read_text()
            return json.loads(out.read_text())

        yield said
        warm.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "need", "reason"),
    [
        ("triton", "triton", "no triton"),
        ("ladder_value_graph", "extension", "the C++ extension is not built"),
    ],
)
def test_every_stage_imports_without(missing, need, reason, run):
    said = run(f"import sys\nsys.modules[{missing!r}] = None\n{EVERY_STAGE}")
    assert len(said) == len(built_in_files())
    # what needs a GPU says that first
    without = [n for n, (needs, _, _) in said.items() if need in needs and "cuda" not in needs]
    assert without, f"no stage needs {need}: this test tests nothing"
    for number in without:
        _, why, error = said[number]
        assert why.startswith(reason)
        assert error.startswith(f"stage {number} (")
        assert error.endswith(f") can't run here: {why}")
    others = [(why, error) for number, (_, why, error) in said.items() if number not in without]
    assert others
    for why, error in others:
        assert error is None if why is None else error.endswith(why)


LOADED = """
import json, sys
import stages

stages.by_number({number})
print(json.dumps([m.__file__ for name, m in sys.modules.items() if name.startswith("stages.")]))
"""
NOT_BEHIND = {STAGES / "contract.py", *(STAGES / "common").iterdir()}


@needs_triton
@pytest.mark.parametrize("number", quickly(1, (9, 8, 7, 6)))
def test_the_code_behind_a_stage_is_all_that_it_imports(number, run):
    """But for what computes no result; a record is stale when one of these files is edited."""
    imported = {Path(file) for file in run(LOADED.format(number=number))}
    assert imported - NOT_BEHIND == {*behind(number)} - NOT_BEHIND
    assert STAGES / "common" / "kernels.py" in behind(number)


# an editable install's finder comes before sys.path, so this one comes before that
BROKEN_EXTENSION = """
import importlib.util, sys

class Broken:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "ladder_value_graph":
            return importlib.util.spec_from_file_location(name, {path!r})

sys.meta_path.insert(0, Broken)
"""


@pytest.mark.slow
def test_an_extension_of_another_python_is_said_to_be_one(tmp_path, run):
    path = tmp_path / "ladder_value_graph.py"
    path.write_text("raise ImportError('wrong ELF class')\n")
    said = run(BROKEN_EXTENSION.format(path=str(path)) + EVERY_STAGE)
    _, why, error = said["2"]
    assert "another Python or machine (wrong ELF class)" in why
    assert error.endswith(why)


# a torch without CUDA can't start it, so it is the attempt that is watched
WATCH_CUDA = """
import json, os, sys
import torch

started = []
torch.cuda.init = torch.cuda._lazy_init = lambda: started.append(True)
torch._C._cuda_getDeviceCount = lambda: started.append(True) or 0
{before}
import stages
early = ["triton" in sys.modules, os.environ.get("TRITON_INTERPRET")]
from harness.records.code import built_in_files
for path in built_in_files():
    stages.load(path)
print(json.dumps({{
    "triton early": early[0],
    "interpret": early[1],
    "interpret after": os.environ.get("TRITON_INTERPRET"),
    "started": bool(started) or torch.cuda.is_initialized(),
    "nvml": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "set_to", "interpret"),
    [
        ("torch.cuda.is_available = lambda: False", None, "1"),
        ("torch.cuda.is_available = lambda: True", None, None),
        # who sets it knows why
        ("torch.cuda.is_available = lambda: False", "0", "0"),
        ("torch.cuda.is_available = lambda: True", "1", "1"),
    ],
)
def test_stages_decides_on_interpreting_and_starts_no_cuda(before, set_to, interpret, run):
    environment = {} if set_to is None else {"TRITON_INTERPRET": set_to}
    said = run(WATCH_CUDA.format(before=before), **environment)
    assert said == {
        "triton early": False,
        "interpret": interpret,
        "interpret after": interpret,
        "started": False,
        "nvml": "1",
    }


BESIDE_OTHERS = """
import json, os, sys
before = dict(os.environ)
import attention_ladder, torch
q, k, v = torch.ones(3, 1, 1, 2, 4)
attention_ladder.attend(q, k, v, causal=True)
attention_ladder.choose(q, k, v)
attention_ladder.stage(3)
untouched = dict(os.environ) == before, "triton" not in sys.modules
attention_ladder.stage({number}).attend(q, k, v)
print(json.dumps([*untouched, os.environ.get("TRITON_INTERPRET")]))
"""


@needs_triton
@pytest.mark.parametrize(("number", "interpret"), [(0, None), (5, "1")])
def test_other_peoples_processes_are_left_as_they_are(number, interpret, run):
    """Until they ask for a stage in Triton, which is then interpreted here, without a GPU."""
    assert run(BESIDE_OTHERS.format(number=number)) == [True, True, interpret]


# ---- files of others


FOUR = """
import torch
from stages.contract import Stage
STAGE = Stage(number=90, name="mine", title="Mine", idea="the mean of v, for equal keys")
"""
ATTEND = """
def attend(q, k, v):
    return v.mean(2, keepdim=True).expand(q.shape)
"""
KERNEL = """
import triton
@triton.jit
def kernel(x_ptr):
    pass
"""


def a_file(tmp_path, name, *parts):
    path = tmp_path / f"{name}.py"
    path.write_text("".join(parts))
    return path


def test_a_file_of_four_fields_is_a_stage(tmp_path):
    stage = stages.load(a_file(tmp_path, "foreign_four", FOUR, ATTEND))
    assert (stage.STAGE.number, stage.STAGE.name, stage.STAGE.needs) == (90, "mine", ())
    v = torch.arange(8.0).view(1, 1, 4, 2)
    assert stage.attend(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 4, 2), v).tolist() == [[[[3, 4]]]]
    assert stages.load(str(tmp_path / "foreign_four.py")).STAGE == stage.STAGE  # a text does, too


def test_a_file_without_what_a_stage_has(tmp_path):
    with pytest.raises(ValueError, match=r"^foreign_no_stage.py: no STAGE; .*STAGE = Stage\("):
        stages.load(a_file(tmp_path, "foreign_no_stage", ATTEND))
    with pytest.raises(ValueError, match=r"^foreign_other_stage.py: no STAGE"):
        stages.load(a_file(tmp_path, "foreign_other_stage", "STAGE = {'number': 90}\n", ATTEND))
    with pytest.raises(ValueError, match=r"^foreign_no_attend.py: no attend; .*attend\(q, k, v\)"):
        stages.load(a_file(tmp_path, "foreign_no_attend", FOUR))
    with pytest.raises(ValueError, match=r"^foreign_value.py: no attend"):
        stages.load(a_file(tmp_path, "foreign_value", FOUR, "attend = 5\n"))


def test_a_file_may_import_others_of_its_folder_but_none_in_place_of_a_module(
    tmp_path, monkeypatch
):
    """Two files of one name, of two folders, are two stages."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)  # of Python's library, rarely used
    for folder, value in (("a", "2 * v"), ("b", "3 * v")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"helps_{folder}.py").write_text("import colorsys\n")
        (tmp_path / folder / "colorsys.py").write_text("1 / 0\n")
        (tmp_path / folder / "torch.py").write_text(
            f"import helps_{folder}, torch\n{FOUR}\ndef attend(q, k, v):\n    return {value}\n"
        )
    one, other = (stages.load(tmp_path / folder / "torch.py") for folder in "ab")
    assert (one.attend(1, 1, 1), other.attend(1, 1, 1)) == (2, 3)
    assert sys.modules[one.__name__] is one and sys.modules[other.__name__] is other
    assert one.torch is other.torch is torch


def test_a_submission_imports_no_other_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "helps_c.py").write_text("")
    path = a_file(tmp_path, "foreign_alone", "import helps_c\n", FOUR, ATTEND)
    with pytest.raises(ModuleNotFoundError):
        stages.load(path, alone=True)


def test_a_file_that_is_another_than_expected_is_refused(tmp_path):
    path = a_file(tmp_path, "foreign_changed", FOUR, ATTEND)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert stages.load(path, sha256=digest).STAGE.number == 90
    with path.open("a") as file:
        file.write("# edited\n")
    with pytest.raises(ValueError, match=r"^foreign_changed.py: changed after this command began"):
        stages.load(path, sha256=digest)


def test_a_file_that_is_no_module(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("not Python")
    with pytest.raises(ValueError, match=r"^notes.txt: not a Python file"):
        stages.load(notes)
    with pytest.raises(FileNotFoundError):
        stages.load(tmp_path / "foreign_absent.py")
    with pytest.raises(ZeroDivisionError):  # its own errors are its own
        stages.load(a_file(tmp_path, "foreign_raises", "1 / 0\n"))


@needs_triton
def test_kernels_need_triton_whether_said_or_not(tmp_path):
    own = stages.load(a_file(tmp_path, "foreign_kernel", FOUR, ATTEND, KERNEL))
    assert own.STAGE.needs == ("triton",)
    assert own.STAGE.mode("cpu") == "interpreted"
    borrowed = "from stages.s05_triton_online import attention_kernel\n"
    other = stages.load(a_file(tmp_path, "foreign_borrowed", FOUR, ATTEND, borrowed))
    assert other.STAGE.needs == ("triton",)
    said = FOUR.replace("idea=", "needs=('extension', 'triton'), idea=")
    assert stages.load(a_file(tmp_path, "foreign_said", said, ATTEND, KERNEL)).STAGE.needs == (
        "extension",
        "triton",
    )
    unused = stages.load(a_file(tmp_path, "foreign_unused", FOUR, ATTEND, "import triton\n"))
    assert unused.STAGE.needs == ()


@pytest.mark.slow
@needs_triton
def test_a_kernel_is_seen_where_it_is_compiled_too(tmp_path, run):
    path = a_file(tmp_path, "foreign_compiled", FOUR, ATTEND, KERNEL)
    code = f"import json, stages\nprint(json.dumps(stages.load({str(path)!r}).STAGE.needs))"
    assert run(code, TRITON_INTERPRET="0") == ["triton"]


@pytest.mark.slow
@needs_triton
def test_stage_9_imports_under_a_gluon_with_other_names_and_says_so(run):
    hide = "from triton.experimental.gluon.language.nvidia.hopper import tma\n"
    for name in ("async_load", "async_copy_global_to_shared"):
        hide += f"vars(tma).pop({name!r}, None)\n"
    ask = "import json, stages\nfrom stages.common import machine\nstages.by_number(9)\n"
    why = run(f"{ask}{hide}print(json.dumps(machine.why_no_gluon()))")
    assert why is None  # hidden too late
    why = run(f"{hide}{ask}print(json.dumps(machine.why_no_gluon()))")
    assert "has other names: take triton 3.6 to 3.9" in why
    assert "none of async_load, async_copy_global_to_shared" in why
