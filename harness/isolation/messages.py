"""The messages between a parent and a child, as dataclasses; a message's event is its class's name.

All messages of a comparison's process are here. ComparisonProcess (harness/runs/process.py) is the
parent and `serve` (measured_stage.py) the child; they speak in this order:

    parent                     child
    Order, an argument    ->
                          <-   Loads      before it loads other people's code
                          <-   Ready      the stages are loaded
    Start                 ->
                          <-   Checked    or Out; one for each stage, in order
    Keep                  ->
                          <-   Link       in a world of several ranks
    Turn                  ->
                          <-   Sampled    or Out; the warm-up, too, is such turns
    Finish                ->
                          <-   Finished   or Out

Turn and Finish name one stage each; Turn comes as often as the parent likes. How many calls they
ask for is decided by the parent alone (harness/measures/samples.py). In a world of several ranks
each is a child, all hear the same, and the slowest one's answer counts (ranks.py).

The child may send Failed instead of any of its messages, and then ends. Fields are checked against
their annotations where the parent receives a message (session.believe).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from harness.isolation.child import hear, say
from harness.measures.samples import Plan
from harness.problems.problem import Problem
from harness.records.schema import Configs, Meter, Products
from harness.records.values import Count, Time


@dataclass(frozen=True)
class Asked:
    """A stage of an Order: its file, its files' sha256, its problem, and the file for its outputs.

    The problem has a page size where the stage reads from a paged cache.
    """

    path: str
    sha256: str
    problem: Problem
    out: str


@dataclass(frozen=True)
class Order:
    """What the process of a comparison is to do.

    `alone`: there is one stage, and the process's memory is its own. `strided`: each is also called
    with strided inputs. `graph`: calls are replayed as CUDA graphs. `memory`: bytes. In a world of
    several ranks, this is rank `rank`'s; they meet in the file `meeting`, and wait for each other
    for `patience` seconds at most.
    """

    problem: Problem
    stages: Sequence[Asked]
    alone: bool
    strided: bool
    graph: bool
    memory: int
    rank: int = 0
    meeting: str = ""
    patience: float = 0.0


@dataclass(frozen=True)
class Signal:
    """A message without fields."""


class Loads(Signal):
    """The child is about to load other people's code: its memory is limited from now on."""


class Ready(Signal):
    """The child waits for a request."""


@dataclass(frozen=True)
class Failed:
    """Why the child, or a stage in it, failed; it can never report that a stage is right."""

    status: Literal["wrong", "crashed", "timeout", "out-of-memory", "skipped"]
    reason: str


@dataclass(frozen=True)
class Out(Failed):
    """A stage failed, and takes no further part. `refused`: it raised a ValueError."""

    refused: bool


class Start(Signal):
    """Call each stage for the first time."""


@dataclass(frozen=True)
class Checked:
    """A stage was called, and its outputs are written. `call_ms`: of the last of its calls."""

    first_call_ms: Time
    call_ms: Time
    peak_bytes: Count | None
    memory_meter: Meter | None
    launch_configs: Configs | None
    products: Products | None
    interpreted: bool


@dataclass(frozen=True)
class Keep:
    """Only the stages with the indices `going` are called from now on: free what others hold."""

    going: Sequence[int]


@dataclass(frozen=True)
class Turn(Plan):
    """Take one sample, as planned, of the stage with the index `stage`."""

    stage: int = 0


@dataclass(frozen=True)
class Link:
    """The time in which each rank sends `size` bytes to the next one, and the smallest message."""

    size: Count
    time_ms: Time
    small_ms: Time


@dataclass(frozen=True)
class Finish:
    """The samples of a stage are taken: make the calls that come after them.

    On a GPU also `clock_calls` before its clock is read, and `rows` of `launches` that are timed.
    """

    stage: int
    clock_calls: int
    launches: int
    rows: int


@dataclass(frozen=True)
class Finished:
    """What was measured beside the samples; `change`: of one element, in one of the timed calls.

    `skip_ratio`: the share of tiles that the stage skips, None where it is alone or counts none.
    """

    sm_clock_mhz: Count | None
    launch_ms: Time | None
    change: list[Count]
    skip_ratio: float | None


@dataclass(frozen=True)
class Verdict:
    """The judge's verdict on outputs (judge.py). `why`: the reason where they aren't `exact`."""

    finite: bool
    exact: bool
    why: str
    err_f64_max: float | None = None
    err_f64_rel: float | None = None
    err_stage3_max: float | None = None
    err_stage3_rel: float | None = None


def event_of(kind: type) -> str:
    """The event of a message of that class."""
    return kind.__name__.lower()


def tell(connection: Connection, message: object) -> None:
    """Send the parent a message from a child."""
    say(connection, event_of(type(message)), **vars(message))


def told(connection: Connection, *kinds: type) -> Any:
    """Wait for the parent's next message, one of `kinds`; a child trusts its parent."""
    message = hear(connection)
    event = message.pop("event")
    [kind] = (kind for kind in kinds if event_of(kind) == event)
    return kind(**message)
