"""The messages between a parent and a child, as dataclasses; a message's event is its class's name.

All messages of a comparison's process are here. ComparisonProcess (harness/runs/process.py) is the
parent and `compete` (contestant.py) the child; they speak in this order:

    parent                     child
    Order, an argument    ->
                          <-   Loads      before it loads other people's code
                          <-   Ready      the stages are loaded
    Start                 ->
                          <-   Checked    or Out; one for each stage, in order
    Sample                ->
                          <-   Done       where processes take turns: warmed up; or Out
    Turn                  ->
                          <-   Done       for each Turn: one sample is taken
    Turn, over            ->
                          <-   Timed      or Out; one for each stage that is sampled, in order
    Repeat                ->
                          <-   Done       for each Repeat: the calls are made
    CountTiles            ->
                          <-   Counted    the child ends

The child may send Failed instead of any of its messages, and then ends. Fields are checked against
their annotations where the parent receives a message (session.believe).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal, TypeVar

from harness.isolation.child import hear, say
from harness.problems.problem import Problem
from harness.records.schema import Configs, Meter
from harness.records.values import Count, Size, Spread, Time

LEAST_ROUNDS = 5  # where no number of rounds is given

M = TypeVar("M")


@dataclass(frozen=True)
class Order:
    """What the process of a comparison is to do. `problems`: as each of the stages is asked.

    `sha256`: of the stages' files, as the records have them. `outs`: the stages' files for their
    outputs. `apart`: each stage has its own process, and these take turns. `strided`: each is also
    called with strided inputs. `graph`: calls are replayed as CUDA graphs. `rounds`: at least so
    many. `budget`: seconds; `memory`: bytes.
    """

    problem: Problem
    problems: Sequence[Problem]
    paths: Sequence[str]
    sha256: Sequence[str]
    outs: Sequence[str]
    alone: bool
    apart: bool
    strided: bool
    graph: bool
    warmup: int
    rounds: int
    budget: float
    memory: int


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
    interpreted: bool


@dataclass(frozen=True)
class Sample:
    """Time the stages with the indices `going`, for at least so many `seconds`."""

    going: Sequence[int]
    seconds: float


class Done(Signal):
    """What was asked for is done."""


@dataclass(frozen=True)
class Turn:
    """Take one sample; `over`: there are no more turns."""

    over: bool = False


@dataclass(frozen=True)
class Timed:
    """The timing of a stage, ms; `change`: of one element, for the outputs of one timed call."""

    time_ms: Time
    time_iqr_ms: Spread | None
    samples: Size
    sm_clock_mhz: Count | None
    rounds_ms: list[Time] | None
    launch_ms: Time | None
    change: list[Count]


@dataclass(frozen=True)
class Repeat:
    """Make `calls` calls of the stage at `place` among those sampled: the parent times them."""

    place: int
    calls: int


class CountTiles(Signal):
    """Count the tiles that each sampled stage skips."""


@dataclass(frozen=True)
class Counted:
    """The share of tiles that each sampled stage skips, None where it doesn't count them."""

    skip_ratios: list[float | None]


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


def told(connection: Connection, *kinds: type[M]) -> M:
    """Wait for the parent's next message, one of `kinds`; a child trusts its parent."""
    message = hear(connection)
    event = message.pop("event")
    [kind] = (kind for kind in kinds if event_of(kind) == event)
    return kind(**message)
