"""GPU tests run where there is a GPU, and are left out, by name, where there is none."""

import contextlib
import functools
import gc
import os

# before NumPy and torch are imported: tests run side by side (ladder_command.py, environ)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import typer

from harness.isolation import fork_server
from harness.isolation.lean_interpreter import make_lean


def pytest_collection_modifyitems(config, items):
    items[:] = slow_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave what is imported and collected out of all searches for garbage: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def slow_first(items, workers):
    """`items` in such an order that each worker has its slow tests first, and no long one last.

    pytest-xdist gives each worker a run of neighbours. The longest ones compile kernels; the short
    ones are those of the stages: they start no process.
    """
    classes = [[], [], [], []]
    for item in items:
        compiles, quick = "cubins" in item.fixturenames, "tests/stages/" in item.nodeid
        slow = item.get_closest_marker("slow")
        classes[1 - compiles if slow else 2 + quick].append(item)
    shares = [
        some[len(some) * worker // workers : len(some) * (worker + 1) // workers]
        for worker in range(workers)
        for some in classes
    ]
    return [item for share in shares for item in share]


def pytest_report_header(config):
    return None if torch.cuda.is_available() else "no GPU here: the tests in tests/gpu are left out"


@pytest.fixture(autouse=True, scope="session")
def one_fork_server():
    """It has what gradients and labs take, too, whichever test starts it."""
    labs = "course.lab.grading.guard", "course.lab.layouts"
    fork_server.PRELOADED = (*fork_server.PRELOADED, *fork_server.OF_GRADIENTS, *labs)


@pytest.fixture(autouse=True, scope="session")
def lean_interpreter():
    """Kernels are interpreted here as they are in the harness's own processes."""
    import stages  # noqa: F401  decides first whether kernels are interpreted

    with contextlib.suppress(ImportError):
        from triton.runtime import interpreter  # noqa: F401
    make_lean()


@pytest.fixture(autouse=True, scope="session")
def one_parser():
    """The command line's parser is made for the first command here, not for each."""
    typer.main.get_command = functools.cache(typer.main.get_command)


@pytest.fixture
def one_thread():
    """As a stage's process has it: two that wait for each other take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def ieee_float32():
    """Each test begins with torch's own default for float32 products."""
    from harness.measures.accuracy import set_precision

    set_precision("ieee")


@pytest.fixture(scope="session")
def cubins(request, tmp_path_factory):
    """The folder in which Triton keeps what it compiles: pytest's cache, anew in CI.

    Its key is the kernel's source, its configuration and Triton's own version. All workers have it.
    """
    cache = None if os.environ.get("CI") else getattr(request.config, "cache", None)
    if cache:
        return cache.mkdir("cubins")
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cubins"
