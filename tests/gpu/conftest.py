"""GPU tests keep launch configurations to themselves: none of a user's is read, none is written.

Most of them run the first candidate: tuning compiles them all, and would make minutes of seconds.
"""

import pytest

from stages import autotune


@pytest.fixture(scope="session", autouse=True)
def tuned_here_alone(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LADDER_CACHE_DIR", str(tmp_path_factory.mktemp("tuned")))
        yield


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
