"""GPU tests run where there is a GPU, and are left out, by name, where there is none."""

import os
from dataclasses import replace

import pytest
import torch


def pytest_collection_modifyitems(config, items):
    items[:] = slow_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


def slow_first(items, workers):
    """`items` in such an order that each worker has its slow tests first, and no long one last.

    pytest-xdist gives each worker a run of neighbours. The short ones are those of the stages:
    they start no process.
    """
    classes = [[], [], []]
    for item in items:
        quick = "tests/stages/" in item.nodeid
        classes[0 if item.get_closest_marker("slow") else 1 + quick].append(item)
    shares = [
        some[len(some) * worker // workers : len(some) * (worker + 1) // workers]
        for worker in range(workers)
        for some in classes
    ]
    return [item for share in shares for item in share]


def pytest_report_header(config):
    return None if torch.cuda.is_available() else "no GPU here: the tests in tests/gpu are left out"


@pytest.fixture(autouse=True, scope="session")
def tuned_here_alone(tmp_path_factory):
    """No launch configuration of a user's is read, and none is written among them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LADDER_CACHE_DIR", str(tmp_path_factory.mktemp("tuned")))
        yield


@pytest.fixture(autouse=True, scope="session")
def lean_interpreter():
    """Triton's interpreter without what it does for nothing: kernels take less than half the time.

    It computes every sum and product of integers twice, in 64 bits too, for an assertion that it
    then leaves out; and for each call within a kernel it patches triton.language, patched already.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    language = interpreter.tl
    patch_language, patched = interpreter._patch_lang, []

    class Scope:
        """What restores triton.language: at the end of the launch that patched it."""

        def __init__(self, fn):
            modules = language, language.core
            self.seen = [x for x in fn.__globals__.values() if any(x is y for y in modules)]
            self.scope = None if self.seen in patched else patch_language(fn)
            patched.append(self.seen) if self.scope else None

        def restore(self):
            if self.scope:
                patched.remove(self.seen)
                self.scope.restore()

    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.interpreter_builder, "options", options)
        patch.setattr(interpreter, "_patch_lang", Scope)
        yield


@pytest.fixture(autouse=True)
def ieee_float32():
    """Each test begins with torch's own default for float32 products."""
    from harness.measures.accuracy import set_precision

    set_precision("ieee")
