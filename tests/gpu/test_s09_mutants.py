"""The GPU tests of stage 9 bite: mistakes written into its files, each of which one must find.

A mutant is a checkout whose stages/ has one text replaced. The test that is to find it runs there,
in a process of its own that is ended after a while, since a wrong barrier waits for ever.
"""

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 150.0  # seconds for one: most of them go to compiling
FAILED = 1  # pytest's exit code where a test failed; 2 to 5 are about pytest itself
# the stages of the working directory, also where an editable install has others
START = """
import os, sys
sys.meta_path[:] = [x for x in sys.meta_path if not hasattr(x, "known_source_files")]
sys.path.insert(0, os.getcwd())
import pytest, stages
mine = os.path.samefile(os.path.dirname(stages.__file__), "stages")
sys.exit(pytest.main(sys.argv[1:]) if mine else pytest.ExitCode.USAGE_ERROR)
"""

EXACT = (
    "test_s09_gluon_hopper.py::test_each_configuration_is_exact[128-TWO_CONSUMERS-float16-normal]"
)
HIDDEN = "test_s09_gluon_hopper.py::test_hidden_values_change_no_output[128-TWO_CONSUMERS]"
PADDING = "test_s09_gluon_hopper.py::test_many_spoilt_rows_of_each_cta_are_walked_again[128-False]"
SAME = "test_s09_gluon_hopper.py::test_launches_are_the_same_bit_for_bit[128-TWO_CONSUMERS-False]"
GRADIENTS = "test_s09_gradients.py::test_gradients_are_exact[64-float16-normal]"
AGREE = "test_s09_gradients.py::test_launches_agree[128-False]"
UNSEEN = "test_s09_gradients.py::test_what_no_row_sees_and_rows_that_see_nothing_change_nothing"
ZEROS = "test_s09_gradients.py::test_dq_is_added_to_zeros_at_every_call[64]"


@dataclass(frozen=True)
class Mutant:
    """In `file` of stages/ `old` is `new`; the test `finds` it."""

    name: str
    finds: str
    file: str
    old: str
    new: str = ""


MUTANTS = [
    Mutant(
        "a key too many", EXACT, "s09_gluon_hopper",
        "before = first[None, :, None] < left[:, None, :]",
        "before = first[None, :, None] <= left[:, None, :]",
    ),
    Mutant(
        "a diagonal one key off", EXACT, "hopper_problem",
        "rows + (self.Nk - self.Nq + 1)", "rows + (self.Nk - self.Nq)",
    ),
    Mutant("one tile with a mask of two", EXACT, "s09_gluon_hopper", "MASKED == 2", "MASKED == 3"),
    Mutant(
        "an output never corrected", EXACT, "s09_gluon_hopper",
        "        acc = rescale_if_needed(acc, alpha) if SLACK > 0 else rescale(acc, alpha)\n",
    ),
    Mutant(
        "keys that two tiles have count twice", EXACT, "s09_gluon_hopper",
        "eights) if FIRST else", "eights) if False else",
    ),
    Mutant(
        "a tile read before it is there", SAME, "hopper_rings",
        "        mbarrier.wait(self.full.index(slot), (use // slots) & 1)\n",
    ),
    Mutant(
        "the other phase of a ring", EXACT, "hopper_rings",
        "(use // slots) & 1", "(use // slots + 1) & 1",
    ),
    Mutant(
        "a slot filled while it is read", SAME, "hopper_rings",
        "self.threads, use >= self.slots)", "self.threads, use < 0)",
    ),
    Mutant(
        "a slot never given back", EXACT, "s09_gluon_hopper",
        "        v_ring.give_back(use + steps - 1)\n",
    ),
    Mutant(
        "a counter that is not set back", SAME, "s09_gluon_hopper",
        "        gl.store(counter_ptr, 0, mask=fetched == problem.tiles - 1)\n",
    ),
    Mutant(
        "hidden values loaded", PADDING, "hopper_problem",
        "            start_n = gl.minimum(start_n, Nk_valid - self.BLOCK_N)\n",
        "            start_n += 0\n",
    ),
    Mutant(
        "spoilt rows written", HIDDEN, "s09_gluon_hopper",
        "spoilt = total != total", "spoilt = total < total",
    ),
    Mutant(
        "values walked again as they are", HIDDEN, "s09_gluon_hopper",
        "            take_out(v, start_n, first_smem)\n",
    ),
    Mutant(
        "P without its mask", GRADIENTS, "hopper_backward",
        "            p = gl.where(seen, p, 0.0)\n",
    ),
    Mutant(
        "dS read before it is written", AGREE, "hopper_backward",
        '                named_barrier("bar.sync", 15, 256)\n', "                pass\n",
    ),
    Mutant(
        "hidden keys that count", UNSEEN, "hopper_backward",
        "tile.store(gl.where((keys < Nk_valid)[:, None], tile.load(L), 0.0))",
        "tile.store(tile.load(L))",
    ),
    Mutant("sums that begin as they are", ZEROS, "hopper_gradients", "if ZERO:", "if not ZERO:"),
    Mutant(
        "delta added", GRADIENTS, "hopper_gradients", "-tl.sum(o * do, 1)", "tl.sum(o * do, 1)"
    ),
]  # fmt: skip


def checkout(folder):
    """A checkout in `folder`, whose stages/ is a copy; returns the copy."""
    for path in ROOT.iterdir():
        if path.name not in ("stages", ".git"):
            (folder / path.name).symlink_to(path)
    shutil.copytree(
        ROOT / "stages", folder / "stages", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder / "stages"


def text_of(mutant):
    """The text of its file, changed."""
    text = (ROOT / "stages" / f"{mutant.file}.py").read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.name}: {text.count(mutant.old)} x {mutant.old!r}"
    return text.replace(mutant.old, mutant.new)


def run(folder, *tests):
    """pytest's exit code and words in the checkout `folder`; None where it took too long."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-c", START, "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"tests/gpu/{test}" for test in tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT * len(tests)
        )
    except subprocess.TimeoutExpired:
        return None, "took too long"
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_the_shipped_file_with_one_change(mutant):
    assert mutant.old != mutant.new
    ast.parse(text_of(mutant))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_found(mutant, tmp_path):
    (checkout(tmp_path) / f"{mutant.file}.py").write_text(text_of(mutant), encoding="utf-8")
    code, said = run(tmp_path, mutant.finds)
    # a kernel that hangs, or takes its process with it, is found as well
    assert code is None or code == FAILED or code < 0, f"not found: {mutant.name}\n{said}"


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_the_shipped_stage_passes_in_a_copied_checkout(tmp_path):
    checkout(tmp_path)
    code, said = run(tmp_path, *dict.fromkeys(mutant.finds for mutant in MUTANTS))
    assert code == 0, said
