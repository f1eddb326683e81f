"""Several ranks measured as one stage: what is right, what fails, and what a failure costs."""

import os
import re
import socket
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up import make_cell, problem
from stage_files import Table

from harness.isolation import ranks
from harness.isolation.child import ChildFailed
from harness.isolation.fork_server import server_pid
from harness.isolation.judge import Judge
from harness.isolation.messages import Checked, Failed, Loads, Order, Out, Ready, tell
from harness.isolation.processes import descendants
from harness.isolation.roster import describe_files
from harness.measures.samples import Sampled
from harness.problems.ring_cost import sent_bytes
from harness.records.files import write
from harness.runs import process
from harness.runs.comparison import compare, make_record, note_one_gpu
from harness.runs.plan import Cell, Comparison, Limits

STAGES = Table(Path(__file__).parents[1] / "ranks.toml")
READY = ranks.Ranks.ready
BUDGET = 4.0  # seconds of a call: only the stage that hangs takes them


def outcomes(folder, names, given):
    """name -> the outcome of each of the stages `names` of ranks.toml, measured in turns."""
    stages = describe_files([STAGES.write(folder, name) for name in names])
    cells = [Cell(stage, given, paired=True) for stage in stages]
    with Judge(given) as judge:
        found = compare(Comparison(cells, Limits(budget=BUDGET, warmup=1, rounds=2)), judge)
    return {outcome.stage.name: outcome for outcome in found}


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The outcomes of those of ranks.toml that fail when they are called, and of a right one."""
    names = [name for name in STAGES.entries if name in ENDS]
    given = problem(h=2, nq=48, nk=48, d=8, causal=True, world=3)
    patience, ranks.PATIENCE = ranks.PATIENCE, 3.0
    yield outcomes(tmp_path_factory.mktemp("ranks"), names, given)
    ranks.PATIENCE = patience


# name -> status, and what the reason says
ENDS = {
    "own_keys": ("wrong", "max error"),
    "one_number": ("wrong", "max error"),
    "dies": ("crashed", "^rank 2: its process ended .exit code 3."),
    "dies_in_turns": ("crashed", "^rank [12]: its process ended .exit code 3."),
    "hangs": ("timeout", "^rank 1: took more than its budget of 4 s"),
    "no_memory": ("out-of-memory", "^rank 1: MemoryError: no room"),
    "refuses": ("skipped", "^ValueError: N: got another one"),
    "stale": ("wrong", "after v changed is not the new v's"),
    "hurries": ("wrong", "of a call that was timed is not that call's own"),
    "right": ("ok", process.SHARED_CORES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_a_rank_that_fails_ends_all_and_is_named_and_others_are_measured_all_the_same(failed, name):
    record = make_record(failed[name], paired=True)
    status, reason = ENDS[name]
    assert record["status"] == status and re.search(reason, record["reason"]), record["reason"]
    assert record["world"] == 3 and record["time_ms"] is None


def test_a_file_that_ranks_can_not_load_fails_alone(tmp_path):
    names = ["right", "at_import", "dies_beside"]  # the last one where others are
    found = outcomes(tmp_path, names, problem(h=1, nq=8, nk=8, d=8, world=2))
    assert [found[name].status for name in names] == ["ok", "crashed", "crashed"]
    assert found["at_import"].reason == "rank 0: RuntimeError: no"


def test_where_no_ranks_can_be_they_are_started_once(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(process.Ranks, "ready", lambda ranks: started.append(ranks) or READY(ranks))
    found = outcomes(tmp_path, ["right", "no_gpus"], problem(h=1, nq=8, nk=8, d=8, world=2))
    assert {each.status for each in found.values()} == {"skipped"} and len(started) == 1


@pytest.mark.slow
def test_nothing_is_left_running(failed):
    assert descendants(server_pid()) == set()


@pytest.mark.parametrize("direction", ["fwd", "train"])
def test_the_bytes_are_those_that_stage_10_sends(tmp_path, direction):
    given = problem(h=2, hk=1, nq=48, nk=48, d=8, causal=True, world=3, direction=direction)
    outcome = outcomes(tmp_path, ["counts"], given)["counts"]
    assert outcome.status == "ok", outcome.reason
    first = outcome.printed.split("call")[1]  # the first rank's; the link is measured after it
    sent = [int(size) for size in re.findall(r"sent (\d+)\.", first)]
    assert sum(sent[: sent.index(ranks.LINK_BYTES["cpu"])]) == sent_bytes(given, "ring")


# ---- how ranks start


def start(target, meeting, patience):
    """Two ranks that run `target` are ready; they are ended then."""
    orders = [
        Order(problem(world=2), (), True, False, False, 1 << 30, rank, str(meeting), patience)
        for rank in range(2)
    ]
    together = ranks.Ranks(target, orders, 1 << 30, ranks.START_LIMIT)
    try:
        together.ready()
        assert [type(session.greeted) for session in together.sessions] == [Ready] * 2
        assert all(session.child.memory == 1 << 30 for session in together.sessions)
    finally:
        together.end()


def join_or_fail(how, connection, order):
    """A rank; the second one fails before it has met the other."""
    if order.rank == 1 and how == "says why":
        tell(connection, Failed("out-of-memory", "no room"))
        time.sleep(ranks.MEETING)
    if order.rank == 1:
        os._exit(3)
    ranks.join(order)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("says why", "rank 1: no room"),
     ("ends", r"rank 1: its process ended \(exit code 3\) before it answered")],
)  # fmt: skip
def test_a_rank_that_fails_at_its_start_is_named_and_not_the_one_that_waits(tmp_path, how, reason):
    with pytest.raises(ChildFailed, match=f"^{reason}$"):
        start(partial(join_or_fail, how), tmp_path / "meeting", 1.0)


def join_late(connection, order):
    """A rank; the first one's store is there long after its port is, and then there is no group."""
    from torch import distributed

    plain, stores = distributed.TCPStore, []

    def store(host, port, *more, **options):
        if order.rank == 0:
            bound = socket.socket()  # nobody else gets the port, and nobody listens yet
            bound.bind((host, 0))
            port = bound.getsockname()[1]
            options["master_listen_fd"] = bound.detach()
            write(Path(order.meeting), str(port))  # at once: the other rank reads what is there
            time.sleep(10 * order.patience)
        stores.append(plain(host, port, *more, **options))
        return stores[0]

    distributed.TCPStore = store
    distributed.init_process_group = lambda *_, **__: None
    ranks.join(order)
    assert stores[0].timeout == timedelta(seconds=order.patience)  # of all that follows
    tell(connection, Loads())
    tell(connection, Ready())
    time.sleep(ranks.MEETING)


def test_ranks_may_meet_later_than_their_group_has_patience_for(tmp_path):
    start(join_late, tmp_path / "meeting", 0.2)


def fail_first(connection, order):
    """A rank; the first one ends as soon as it may load stages, the other is slow to get there."""
    from torch import distributed

    def join_slowly(*_, store, **__):
        if order.rank == 1:
            time.sleep(10 * order.patience)
            store.get("1 is at the store")  # what the first rank's process keeps

    distributed.init_process_group = join_slowly
    ranks.join(order)
    tell(connection, Loads())
    if order.rank == 0:
        os._exit(3)
    time.sleep(ranks.MEETING)


def test_the_first_rank_that_ends_is_named_and_not_one_that_still_joins(tmp_path):
    reason = r"rank 0: its process ended \(exit code 3\) before it answered"
    with pytest.raises(ChildFailed, match=f"^{reason}$"):
        start(fail_first, tmp_path / "meeting", 0.1)


# ---- what they answer


class Saying:
    """A session whose child says one thing, or nothing; `ended` is whether it was ended."""

    def __init__(self, message):
        self.message, self.ended = message, False

    def next_message(self, *_):
        return self.message

    def end(self):
        self.ended = True


CHECKED = Checked(1.0, 2.0, None, None, None, None, interpreted=False)
REFUSED = Out("crashed", "no", refused=True)


@pytest.mark.parametrize(
    ("said", "seconds", "reason"),
    [([CHECKED, Out("crashed", "so", refused=False)], 9.0, "rank 1: so"),
     # its time was over: it had waited for another, which was only late
     ([CHECKED, Out("crashed", "so", refused=False)], 0.0, "rank 1: so"),
     ([Out("crashed", "gave up", refused=False), None], 0.0, "rank 1: late"),
     ([None, None], 0.0, "ranks 0, 1: late"),
     ([REFUSED, CHECKED], 9.0, "rank 0: no")],
)  # fmt: skip
def test_who_is_named_where_ranks_answer_differently(monkeypatch, said, seconds, reason):
    monkeypatch.setattr(ranks, "PATIENCE", 0.1)
    together = ranks.Ranks(print, [], 0, 0.0)
    together.sessions = [Saying(message) for message in said]
    with pytest.raises(ChildFailed, match=f"^{reason}$"):
        together.receive(Checked, Out, seconds=seconds, late="late")
    assert all(session.ended for session in together.sessions)


def test_what_all_ranks_refuse_ends_none():
    for message in (REFUSED, Out("skipped", "no", refused=False)):
        together = ranks.Ranks(print, [], 0, 0.0)
        together.sessions = [Saying(message), Saying(message)]
        assert together.receive(Out, seconds=9.0, late="late") == message
        assert not together.sessions[0].ended


def test_the_rank_with_the_store_ends_last():
    """While others use it, NCCL's threads print pages of what they lost."""
    ended = []
    world = ranks.Ranks.__new__(ranks.Ranks)
    world.sessions = [SimpleNamespace(end=partial(ended.append, rank)) for rank in range(3)]
    world.end()
    assert ended == [2, 1, 0]


def test_the_slowest_rank_and_the_largest_peak_count():
    answers = [
        Checked(1.0, 2.0, peak, "cuda-allocator", None, None, interpreted=False)
        for peak in (5, 7, 6)
    ]
    assert ranks.largest(answers).peak_bytes == 7
    late = ranks.largest([Sampled(1.0, late=True), Sampled(3.0)])
    assert (late.time_ms, late.late) == (3.0, True)


def test_one_gpu_is_what_others_are_compared_with():
    records = [make_cell(10, "ring", world=2, time_ms=2.0), make_cell(116, "one_gpu", time_ms=3.0)]
    note_one_gpu(records)
    assert [record["x_one_gpu"] for record in records] == [1.5, None]
    note_one_gpu(records[:1])
    assert records[0]["x_one_gpu"] is None


@pytest.mark.parametrize(
    ("card", "ms", "says"),
    [("NVIDIA H200", 0.14, "1964 TFLOP/s, and 1 x NVIDIA H200 does 989 at most"),
     ("NVIDIA H200", 0.28, ""), ("a card", 1e-3, "")],
)  # fmt: skip
def test_a_time_that_no_gpu_can_reach_is_wrong(monkeypatch, card, ms, says):
    monkeypatch.setattr(process, "card", lambda: card)
    half = {"dtype": "bfloat16", "precision": "bfloat16", "device": "cuda"}
    given = problem(h=16, d=128, nq=8192, nk=8192, causal=True, **half)
    said = process.faster_than_possible(given, ms)
    assert says in said and bool(said) == bool(says)
    assert not process.faster_than_possible(problem(world=2), 1e-9)  # a CPU's peak isn't known
