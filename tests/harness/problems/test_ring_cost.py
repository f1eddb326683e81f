"""The cost model of several GPUs, against what can be counted otherwise."""

from dataclasses import replace
from itertools import pairwise

import pytest
from made_up import problem

from harness.problems.cost import flops, visible_pairs
from harness.problems.problem import ONE_GPU
from harness.problems.ring_cost import (
    WAYS,
    Machine,
    hidden_from,
    pairs,
    peak_bytes,
    schedule,
    seconds,
    sent_bytes,
)
from stages.s10_ring.schedule import hop, length, spans

# seconds are as long as they are easy to see: nothing hides what is sent, or everything does
SLOW = Machine(rate=1e12, link=1e6, latency=1e-3, hbm=1e9, launch=1e-4)
FAST = replace(SLOW, rate=1e6, link=1e12, latency=0.0)


def of(world, causal=False, direction="fwd", n=48):
    return problem(h=4, hk=2, nq=n, nk=n, d=8, causal=causal, world=world, direction=direction)


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_slowest_rank_has_as_many_pairs_as_stage_10_gives_it(world, causal, zigzag):
    given = of(world, causal)
    held = spans(given.nk, world, zigzag and causal)
    found = []
    for rank in range(world):
        counts = []
        for step in range(world):
            now = hop(rank, step, held, held, causal)
            rows, keys = now.rows.stop - now.rows.start, length(now.spans)
            counts.append(rows * (rows + 1) / 2 if now.causal else rows * keys)
        found.append(counts)
    assert max(found, key=sum) == pairs(given, zigzag)
    if zigzag or not causal:  # all ranks have as much to do
        assert world * sum(found[0]) == visible_pairs(replace(given, b=1))


@pytest.mark.parametrize("direction", ["fwd", "train"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_does_one_thing_at_a_time_and_all_of_its_work(way, direction):
    given = of(3, causal=True, direction=direction)
    spans = schedule(given, replace(SLOW, launch=0.0), way)
    for lane in ({"send"}, {"compute", "merge"}):
        for before, after in pairwise(span for span in spans if span.what in lane):
            assert before.end <= after.start + 1e-12
    computed = [span for span in spans if span.what == "compute"]
    work = sum(span.end - span.start for span in computed)
    ranks = {ONE_GPU: 1, "ring_in_order": 9 / 5}.get(way, 3)
    # in order the last of three ranks has 5 of 9 parts of a causal mask
    assert work == pytest.approx(flops(given) / ranks / SLOW.rate, rel=0.03)


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_in_place_of_formulas(world):
    n, size = 48 // world, 4
    kv, q = 2 * 2 * n * 8 * size, 4 * n * 8 * size
    gradients = kv  # in float32, too
    assert sent_bytes(of(world), "ring") == sent_bytes(of(world), "gather") == (world - 1) * kv
    training = of(world, direction="train")
    assert sent_bytes(training, "ring") == (world - 1) * (2 * kv + gradients)
    assert sent_bytes(of(world), "ulysses") == (world - 1) * (2 * q + kv) // world
    assert sent_bytes(of(world), ONE_GPU) == 0
    assert sent_bytes(of(world), "context_parallel_alltoall") is None


def test_overlap_hides_the_smaller_of_two():
    for machine in (SLOW, FAST):
        parts = schedule(of(2), machine, "ring_in_turn")
        apart = {what: sum(x.end - x.start for x in parts if x.what == what)
                 for what in ("send", "compute", "merge")}  # fmt: skip
        together = seconds(of(2), machine, "ring")
        assert seconds(of(2), machine, "ring_in_turn") == pytest.approx(sum(apart.values()))
        # the first hop hides what is sent, the second one can't
        hop_seconds = apart["compute"] / 2
        hidden = min(apart["send"], hop_seconds)
        assert together == pytest.approx(sum(apart.values()) - hidden)


@pytest.mark.parametrize("causal", [False, True])
def test_from_so_many_rows_on_nothing_that_is_sent_shows(causal):
    machine = replace(SLOW, rate=1e9, link=1e8, launch=0.0)
    n = hidden_from(of(4, causal), machine)
    for rows, hides in ((n * 1.01, True), (n * 0.99, False)):
        given = replace(of(4, causal), nq=4 * rows, nk=4 * rows)
        sums = schedule(given, replace(machine, hbm=1e30), "ring")
        busy = sum(span.end - span.start for span in sums if span.what != "send")
        assert (max(span.end for span in sums) <= busy * (1 + 1e-9)) == hides


def test_memory_does_not_grow_with_the_number_of_ranks():
    """At as many rows on each."""
    assert peak_bytes(of(4, n=4 * 16)) == peak_bytes(of(8, n=8 * 16)) > peak_bytes(of(2, n=2 * 16))
    assert peak_bytes(of(2)) > peak_bytes(of(2), "engine")
    assert peak_bytes(of(2, direction="train")) > peak_bytes(of(2))
