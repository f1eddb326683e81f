"""Most GPU tests run a kernel's first candidate: tuning compiles all, which takes minutes."""

import faulthandler

import pytest

import stages
from stages.common import tuner
from stages.common.contract import why_not


@pytest.fixture(autouse=True)
def watchdog():
    """End everything where a kernel hangs, as at a wrong barrier: it can't be interrupted."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def skip_unless_it_runs(stage):
    """Skip, with the reason, where this GPU is none that `stage` is made for."""
    if reason := why_not(stage.STAGE, "cuda"):
        pytest.skip(f"stage {stage.STAGE.number}: {reason}")


@pytest.fixture
def on_hopper():
    skip_unless_it_runs(stages.by_number(9))


@pytest.fixture
def stage(number):
    """The stage of that number, for tests of several."""
    found = stages.by_number(number)
    skip_unless_it_runs(found)
    return found


@pytest.fixture
def pick(monkeypatch):
    """A function that has every kernel run its candidate of an index, the last at the most."""

    def pick(index):
        def choose(kernel, candidates, launch, *key, **more):
            return candidates[min(index, len(candidates) - 1)]

        monkeypatch.setattr(tuner, "choose", choose)

    return pick


@pytest.fixture(autouse=True)
def untuned(request, pick):
    if "tuner" not in request.keywords:
        pick(0)
