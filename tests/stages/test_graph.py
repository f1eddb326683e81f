"""Launches as one CUDA graph, on a driver that only notes what it is asked for."""

import ctypes
import gc
from types import SimpleNamespace

import pytest

from stages.common import graph as path

THREAD_LOCAL = 1  # how this thread captures, before
STREAM, GREEN = 77 << 40, 78 << 40  # a user's, and one of a green context


class Driver:
    """The driver's functions, which keep count of what is alive; those in `failing` fail."""

    def __init__(self):
        self.failing, self.alive = set(), set()
        self.mode, self.made = THREAD_LOCAL, 0
        self.capturing, self.launched = None, []

    def __getattr__(self, name):
        if f"no {name}" in self.failing:
            raise AttributeError(name)

        def function(*args):
            if name in self.failing:
                if name == "cuStreamEndCapture":
                    self.capturing = None
                return 900
            getattr(self, f"do_{name}")(*args)
            return 0

        return function

    def new(self, place):
        self.made += 1
        place._obj.value = self.made
        self.alive.add(self.made)
        return self.made

    def do_cuStreamGetCtx_v2(self, stream, context, green):
        context._obj.value = 1
        green._obj.value = 2 if stream.value == GREEN else None

    def do_cuThreadExchangeStreamCaptureMode(self, mode):
        self.mode, mode._obj.value = mode._obj.value, self.mode

    def do_cuStreamCreate(self, stream, flags):
        assert flags == 1, "another thread's work on the default stream would wait for it"
        self.new(stream)

    def do_cuStreamBeginCapture_v2(self, stream, mode):
        assert mode == self.mode == path.RELAXED
        self.capturing = stream.value

    def do_cuStreamEndCapture(self, stream, graph):
        assert stream.value == self.capturing
        self.capturing = None
        self.new(graph)

    def do_cuGraphInstantiateWithFlags(self, handle, graph, flags):
        assert graph.value in self.alive and flags.value == 0
        self.handle = self.new(handle)

    def do_cuGraphDestroy(self, graph):
        self.alive.remove(graph.value)

    def do_cuStreamDestroy_v2(self, stream):
        assert stream.value != self.capturing
        self.alive.remove(stream.value)

    def do_cuGraphExecDestroy(self, handle):
        assert self.mode == path.RELAXED
        self.alive.remove(handle.value)

    def do_cuGraphLaunch(self, handle, stream):
        self.launched.append((handle.value, stream))


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(path, "driver", lambda: made)
    return made


def test_what_is_launched_on_a_stream_of_its_own_becomes_a_graph(driver):
    streams = []

    def launches(stream):
        assert driver.capturing == stream
        streams.append(stream)

    made = path.graph_of(launches, STREAM)
    assert len(streams) == 1 and driver.alive == {driver.handle}
    assert made.launch(STREAM) and driver.launched == [(driver.handle, STREAM)]
    driver.failing.add("cuGraphLaunch")
    assert not made.launch(STREAM)
    assert driver.mode == THREAD_LOCAL
    del made
    gc.collect()
    assert not driver.alive and driver.mode == THREAD_LOCAL


def test_a_stream_reaches_the_driver_whole(monkeypatch):
    """An int of no known type would be cut to 32 bits: of the stream's address 0, the default's."""
    launched = []
    seen = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
        lambda *args: launched.append(args) or 0
    )
    untyped = ctypes.pythonapi._FuncPtr(ctypes.cast(seen, ctypes.c_void_p).value)
    monkeypatch.setattr(path.ctypes, "CDLL", lambda name: SimpleNamespace(cuGraphLaunch=untyped))
    monkeypatch.setattr(path, "driver", path.driver.__wrapped__)
    graph = object.__new__(path.Graph)
    graph.handle = ctypes.c_void_p(GREEN)
    assert graph.launch(STREAM) and launched == [(GREEN, STREAM)]


def test_a_driver_older_than_green_contexts_makes_graphs(driver):
    driver.failing.add("no cuStreamGetCtx_v2")
    assert path.graph_of(int, STREAM).launch(STREAM)


def test_a_stream_of_a_green_context_gets_no_graph_as_that_would_leave_its_multiprocessors(driver):
    assert path.graph_of(lambda stream: pytest.fail("it was captured"), GREEN) is None
    assert not driver.alive


@pytest.mark.parametrize(
    "name",
    [
        "cuStreamGetCtx_v2",
        "cuThreadExchangeStreamCaptureMode",
        "cuStreamCreate",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "a launch",
        "no cuGraphInstantiateWithFlags",
    ],
)
def test_where_the_driver_refuses_there_is_no_graph_and_nothing_is_left(driver, name):
    driver.failing.add(name)

    def launches(stream):
        if name == "a launch":
            raise RuntimeError("Triton Error [CUDA]: out of memory")

    assert path.graph_of(launches, STREAM) is None
    assert not driver.alive and driver.mode == THREAD_LOCAL


@pytest.mark.parametrize("name", ["cuGraphDestroy", "cuStreamDestroy_v2"])
def test_a_graph_outlives_what_could_not_be_freed(driver, name):
    driver.failing.add(name)
    made = path.graph_of(int, STREAM)
    assert made.launch(7) and len(driver.alive) == 2  # one is what is still there
    del made
    gc.collect()
    assert driver.handle not in driver.alive and driver.mode == THREAD_LOCAL


def test_who_interrupts_a_capture_is_heard(driver):
    driver.failing.add("cuStreamEndCapture")

    def launches(stream):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        path.graph_of(launches, STREAM)
    assert not driver.alive and driver.mode == THREAD_LOCAL


def test_without_a_driver_there_is_no_graph(monkeypatch):
    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    path.driver.cache_clear()
    assert path.graph_of(print, STREAM) is None
