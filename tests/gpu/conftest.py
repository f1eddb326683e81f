"""GPU tests keep launch configurations to themselves: none of a user's is read, none is written.

Most of them run the first candidate: tuning compiles them all, and would make minutes of seconds.
"""

import faulthandler

import pytest

import stages
from stages.common import tuner
from stages.common.contract import why_not


@pytest.fixture(scope="session", autouse=True)
def tuned_here_alone(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LADDER_CACHE_DIR", str(tmp_path_factory.mktemp("tuned")))
        yield


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
        def choose(kernel, candidates, launch, **key):
            return candidates[min(index, len(candidates) - 1)]

        monkeypatch.setattr(tuner, "choose", choose)

    return pick


@pytest.fixture(autouse=True)
def untuned(request, pick):
    if "tuner" not in request.keywords:
        pick(0)
