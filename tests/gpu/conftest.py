"""GPU tests keep launch configurations to themselves: none of a user's is read, none is written.

Most of them run the first candidate: tuning compiles them all, and would make minutes of seconds.
"""

import faulthandler

import pytest

import stages
from stages import autotune
from stages.contract import why_not


@pytest.fixture(scope="session", autouse=True)
def tuned_here_alone(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LADDER_CACHE_DIR", str(tmp_path_factory.mktemp("tuned")))
        yield


@pytest.fixture
def on_hopper():
    """Skip where stage 9 can't run, and end everything where it hangs."""
    if reason := why_not(stages.by_number(9).STAGE, "cuda"):
        pytest.skip(reason)
    # a wrong barrier hangs, and a hanging kernel can't be interrupted
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def pick(monkeypatch):
    """A function that has every kernel run its candidate of an index, the last at the most."""

    def pick(index):
        def choose(kernel, candidates, launch, **key):
            return candidates[min(index, len(candidates) - 1)]

        monkeypatch.setattr(autotune, "choose", choose)

    return pick


@pytest.fixture(autouse=True)
def untuned(request, pick):
    if "tuner" not in request.keywords:
        pick(0)
