"""What the parent believes of a child's messages, and what becomes of a child that fails."""

import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from harness.isolation import session
from harness.isolation.child import NO_MESSAGE, ChildFailed
from harness.isolation.session import Session, believe
from harness.records.schema import FAILURES
from harness.records.values import Count, Time


@dataclass(frozen=True)
class Done:
    time_ms: Time
    samples: Count
    iqr: float | None


DONE = {"event": "done", "time_ms": 1.5, "samples": 3, "iqr": None}
BELIEVED = Done(1.5, 3, None)


def failure(message):
    """Status and reason of the failure that `message` comes to."""
    with pytest.raises(ChildFailed) as raised:
        believe(message, Done)
    return raised.value.status, raised.value.reason


@pytest.mark.parametrize("status", [*FAILURES, "skipped"])
def test_a_child_may_say_that_it_failed_and_why(status):
    assert failure({"event": "failed", "status": status, "reason": "so"}) == (status, "so")


@pytest.mark.parametrize(
    "said",
    [{"status": "ok", "reason": ""}, {"status": "wrong-by-design", "reason": ""}, {"reason": "so"},
     {"status": "wrong"}, {"status": "wrong", "reason": 7}, {"status": ["wrong"], "reason": "so"}],
    ids=str,
)  # fmt: skip
def test_a_child_that_claims_another_status_has_crashed(said):
    assert failure({"event": "failed", **said}) == ("crashed", NO_MESSAGE)


@pytest.mark.parametrize(
    "changes",
    [{"time_ms": value} for value in (math.nan, math.inf, 0, -1.0, True, "1.5", None, [1.5])]
    + [{"time_ms": 10**400}]
    + [{"samples": value} for value in (1.5, -1, None, False)]
    + [{"iqr": value} for value in ("0", {}, math.nan)],
    ids=lambda changes: str(changes)[:30],
)
def test_a_message_with_a_false_figure_is_a_crash(changes):
    assert believe(DONE, Done) == BELIEVED
    assert failure(DONE | changes) == ("crashed", NO_MESSAGE)


def test_a_message_without_a_field_or_out_of_turn_is_a_crash():
    assert failure({"event": "done", "time_ms": 1.5}) == ("crashed", NO_MESSAGE)
    said = f"its process said {'x' * 40!r} out of turn"
    assert failure(DONE | {"event": "x" * 1000}) == ("crashed", said)


@dataclass(frozen=True)
class Listed:
    times: list[Time]
    modes: Annotated[dict[str, str | None], ("cpu", "cuda")]


LISTED = {"event": "listed", "times": [1.0, 2], "modes": {"cpu": "native", "cuda": None}}


@pytest.mark.parametrize(
    "changes",
    [{"times": value} for value in (None, {}, [{}], [1.0, "2"], "", [1.0, 0])]
    + [{"modes": value} for value in ({"cpu": "native"}, {"cpu": "", "cuda": 1}, [], None)]
    + [{"modes": {"cpu": "", "cuda": "", "tpu": ""}}],
    ids=str,
)
def test_lists_and_objects_are_checked_throughout(changes):
    assert believe(LISTED, Listed) == Listed(LISTED["times"], LISTED["modes"])
    with pytest.raises(ChildFailed, match=NO_MESSAGE):
        believe(LISTED | changes, Listed)


def test_a_field_that_is_not_asked_for_is_left_out():
    assert believe(DONE | {"more": 1}, Done) == BELIEVED


class FakeChild:
    """Says its messages one after another; counts those that were started and ended."""

    started, ended, limits = [], [], []

    def __init__(self, target, *arguments):
        self.messages, self.read = iter(arguments), 0
        self.started.append(self)
        self.said = f"child {len(self.started)}\n"

    def printed(self):
        said, self.said = self.said, ""
        return said

    def next_message(self):
        self.read += 1
        return next(self.messages)

    def receive(self, seconds, late):
        return self.next_message()

    def send(self, message):
        pass

    def limit_memory(self, memory):
        self.limits.append((memory, self.read))

    def end(self):
        self.ended.append(self)


def test_a_session_waits_once_and_starts_anew_after_a_failure(monkeypatch):
    monkeypatch.setattr(session, "Child", FakeChild)
    bad = {"event": "failed", "status": "ok", "reason": ""}
    said = {"event": "loads"}, {"event": "ready"}, DONE, DONE, bad
    with Session(None, *said, memory=5) as asked:
        assert asked.printed() == "" and FakeChild.started == []  # nothing runs before it is due
        for _ in range(2):
            assert asked.ask({}, Done, seconds=1.0, late="late") == BELIEVED
        assert asked.printed() == "child 1\n" and asked.printed() == ""
        with pytest.raises(ChildFailed, match=NO_MESSAGE):
            asked.ask({}, Done, seconds=1.0, late="late")
        assert FakeChild.ended == FakeChild.started
        assert asked.ask({}, Done, seconds=1.0, late="late") == BELIEVED
        assert asked.printed() == "child 2\n"
    assert FakeChild.limits == [(5, 1)] * 2  # before it loads other people's code, and not again
    assert FakeChild.ended == FakeChild.started and len(FakeChild.started) == 2


@pytest.mark.parametrize(("greetings", "seconds"), [(0, 20), (1, 10)])
def test_the_time_that_a_child_has_is_the_time_that_its_reason_says(
    greetings, seconds, monkeypatch
):
    """To start, then to load a stage; each begins where the last one ended."""
    now = 0.0

    class Silent(FakeChild):
        def next_message(self):
            nonlocal now
            now += 1.0
            return None if now % 8 else next(self.messages, None)

    monkeypatch.setattr(session, "Child", Silent)
    monkeypatch.setattr(session.time, "monotonic", lambda: now)
    said = [{"event": "loads"}][:greetings]
    late = pytest.raises(ChildFailed, match=f"^did not load in {seconds} s$")
    with Session(None, *said, load=10.0) as asked, late:
        asked.ready(20.0)
    assert now == 8 * greetings + seconds + 1
