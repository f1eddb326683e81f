"""Stage 2: what only the C++ graph has. Its outputs and gradients are held to the truth together
with stage 0's, in test_s00_scalar_autograd.py.

Without the extension these tests fail, as they should: `make test` builds it.
"""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ladder_value_graph
import numpy as np
import psutil
import pytest
from stage_checks import normal, printed

from stages import s02_cpp_value_graph as stage


def inputs(N, d):
    return [x.requires_grad_() for x in normal((1, 1, N, N, d), 0)[:3]]


def live():
    return ladder_value_graph.arena_stats()["chunks_live"]


@pytest.fixture
def only_this_thread_unless_it_lets_go():
    """Python takes the GIL from nobody; a thread gets it when another gives it away."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    yield
    sys.setswitchinterval(before)


def test_the_gil_is_released(only_this_thread_unless_it_lets_go):
    q, k, v = (x.detach().double().numpy() for x in inputs(256, 16))
    ticks, done = 0, False

    def tick():
        nonlocal ticks
        while not done:
            ticks += 1
            time.sleep(1e-5)

    def progress_during(call):
        # a busy machine may give the other thread no core for one call, but not for a hundred
        for _ in range(100):
            before = ticks
            result = call()
            if ticks > before:
                return result
        pytest.fail("no other Python thread ran while it computed")

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        o, graph = progress_during(lambda: ladder_value_graph.attend(q, k, v, 0.25))
        progress_during(lambda: graph.backward(o))
    finally:
        done = True
        thread.join()


def in_two_threads(work):
    together = threading.Barrier(2)

    def start(i):
        together.wait()
        return work(i)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


def test_graphs_in_two_threads_share_no_chunk():
    # in a process of its own: a free list that two threads have torn may also go round for ever
    said = printed(
        "import ladder_value_graph as graph\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "n = 3 * 16384\n"  # three chunks each
        "work = lambda i: [graph.chain(n - i) for _ in range(1000)] == [n - i] * 1000\n"
        "with ThreadPoolExecutor(2) as pool: print(*pool.map(work, range(2)))\n"
        "stats = graph.arena_stats()\n"
        "print(stats['chunks_live'], 3 <= stats['chunks_free'] <= 6)\n"
    )
    assert said == ["True", "True", "0", "True"]


def test_two_threads_through_one_graph_wait_for_each_other():
    q, k, v = (x.detach().double().numpy() for x in inputs(64, 16))
    o, graph = ladder_value_graph.attend(q, k, v, 0.25)
    want = graph.backward(o)
    for answers in in_two_threads(lambda i: [graph.backward(o) for _ in range(200)]):
        for got in answers:
            assert all(map(np.array_equal, got, want))


def test_memory_is_flat_over_100_calls():
    q, k, v = inputs(64, 16)
    one_graph = 48 * stage.node_count(1, 1, 64, 64, 16)

    def call():
        stage.attend(q, k, v).sum().backward()

    for _ in range(5):
        call()
    arena, rss = ladder_value_graph.arena_stats()["bytes"], psutil.Process().memory_info().rss
    for _ in range(100):
        call()
    assert ladder_value_graph.arena_stats()["bytes"] <= arena
    assert psutil.Process().memory_info().rss - rss < one_graph


def test_the_graph_lives_as_long_as_the_output():
    q, k, v = inputs(64, 16)
    before = live()
    o = stage.attend(q, k, v)
    o.sum().backward()
    assert live() - before == -(-stage.node_count(1, 1, 64, 64, 16) // 16384)
    del o
    assert live() == before


def test_a_huge_graph_does_not_pin_its_memory():
    kept = ladder_value_graph.MAX_FREE_CHUNKS
    chunk_bytes = ladder_value_graph.CHUNK_BYTES
    ladder_value_graph.arena_trim()
    rss = psutil.Process().memory_info().rss
    for _ in range(2):  # malloc would give the first one back, and keep the second
        ladder_value_graph.chain(2 * kept * 16384)
        stats = ladder_value_graph.arena_stats()
        assert stats["chunks_free"] == kept
        assert psutil.Process().memory_info().rss - rss < 1.2 * kept * chunk_bytes
    ladder_value_graph.arena_trim()
    stats = ladder_value_graph.arena_stats()
    assert stats["chunks_free"] == 0
    assert stats["bytes"] == stats["chunks_live"] * chunk_bytes
    assert psutil.Process().memory_info().rss - rss < 0.2 * kept * chunk_bytes


@pytest.mark.parametrize("n", [1, 2, 16383, 16384, 16385, 32768, 32769])
def test_a_chain_across_the_borders_of_chunks(n):
    assert ladder_value_graph.chain(n) == n


def test_a_chain_of_a_million_nodes_goes_backward_and_dies():
    said = printed(
        "import threading, ladder_value_graph as graph\n"
        "threading.stack_size(1 << 18)\n"  # far less than a frame a node
        "work = lambda: print(graph.chain(1_000_000), graph.arena_stats()['chunks_live'])\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    assert said == ["1000000.0", "0"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to RLIMIT_AS")
def test_a_graph_that_does_not_fit_is_a_memory_error_and_leaves_nothing():
    said = printed(
        "import resource, torch, ladder_value_graph as graph\n"
        "from stages import s02_cpp_value_graph as stage\n"
        "q, k, v = (torch.randn(1, 1, 1024, 32, requires_grad=True) for _ in range(3))\n"
        "stage.attend(q[:, :, :8], k, v)\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 29),) * 2)\n"
        "try:\n"
        "    stage.attend(q, k, v)\n"
        "except MemoryError:\n"
        "    print('MemoryError', graph.arena_stats()['chunks_live'])\n"
        "print(stage.attend(q[:, :, :8], k, v).shape[2])\n"
    )
    assert said == ["MemoryError", "0", "8"]


@pytest.mark.parametrize(
    ("q", "k", "v", "named"),
    [
        ((1, 1, 2), (1, 1, 3, 4), (1, 1, 3, 4), "q"),
        ((1, 1, 0, 4), (1, 1, 3, 4), (1, 1, 3, 4), "q"),
        ((1, 1, 2, 4), (1, 1, 3, 5), (1, 1, 3, 5), "k"),
        ((1, 2, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4), "k"),
        ((1, 1, 2, 4), (1, 1, 0, 4), (1, 1, 0, 4), "k"),
        ((1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 2, 4), "v"),
    ],
)
def test_the_module_itself_stays_in_bounds(q, k, v, named):
    with pytest.raises(ValueError, match=rf"^{named}: "):
        ladder_value_graph.attend(np.zeros(q), np.zeros(k), np.zeros(v), 1.0)


def test_the_graph_refuses_a_gradient_of_another_shape():
    x = np.zeros((1, 1, 2, 3))
    _, graph = ladder_value_graph.attend(x, x, x, 1.0)
    assert graph.nodes == stage.node_count(1, 1, 2, 2, 3)
    with pytest.raises(ValueError, match=r"^dO: "):
        graph.backward(np.zeros((1, 1, 3, 2)))
