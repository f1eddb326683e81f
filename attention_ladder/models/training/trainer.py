"""Carry out `ladder train`: train a small GPT with stages, and with SDPA for comparison.

Each trainee, a stage or one of SDPA's backends, has its own process, where
loop.py trains the model of gpt.py from one seed after another, with
one record per seed. curves.py judges the loss curves, from the records alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from attention_ladder.models.training.plan import SHAPES, UNTIMED_STEPS, Plan, Trainee
from harness.isolation.child import NO_MESSAGE, ChildFailed
from harness.isolation.session import Session
from harness.records.jsonl import Writer
from harness.records.schema import FAILURES, Record
from harness.records.values import Count
from harness.runs.comparison import compare_alone
from harness.runs.plan import Cell, Limits
from harness.runs.process import Outcome

STEP_LIMIT = 300.0  # seconds between two messages: a step, or all that the first one compiles

# ---- the messages of a trainee's process (loop.py)


@dataclass(frozen=True)
class Ready:
    """The model is made, of so many parameters."""

    parameters: Count


@dataclass(frozen=True)
class Losses:
    """The losses of further steps."""

    losses: list[float]


@dataclass(frozen=True)
class Done:
    """The seed is trained; `unsaved`: why its model could not be saved, if it was to be."""

    val_loss: float
    unsaved: str


def run(
    trainees: Sequence[Trainee],
    plan: Plan,
    memory: int,
    writer: Writer,
    progress: Callable[[Record], None],
    report: Callable[[Record, str], None],
    unsaved: Callable[[str], None] = print,
) -> list[Record]:
    """Train with each trainee from each seed, and write one record each. Returns the records.

    `progress` is called with an unfinished record whenever it has new losses; `report` with each
    finished record and its stage's output, `unsaved` with the reason why a model couldn't be saved.
    `memory`: bytes that a trainee may take.
    """
    records = []
    for trainee in trainees:
        with Training(trainee, plan, memory) as training:
            for seed in plan.seeds:
                record = training.train(seed, progress)
                writer.append(record)
                records.append(record)
                report(record, training.printed())
                if training.unsaved:
                    unsaved(training.unsaved)
    return records


def train_record(trainee: Trainee, plan: Plan, seed: int) -> Record:
    """Make the record of a trainee and a seed before training."""
    return {
        "kind": "train", "stage": trainee.stage, "name": trainee.name,
        "reference": trainee.backend is not None, "device": plan.problem.device,
        "dtype": plan.problem.dtype, "mode": trainee.mode, "size": plan.size, "seed": seed,
        "steps": plan.steps, "parameters": None, "status": "crashed", "reason": "", "losses": [],
        "val_loss": None, "tokens_per_s": None,
    }  # fmt: skip


def in_its_process(connection: Connection, order: Record) -> None:
    """In the child: train. The parent never imports torch."""
    from attention_ladder.models.training.loop import train_seeds

    train_seeds(connection, order)


class Training(Session):
    """The process of a trainee, which trains from one seed after another."""

    def __init__(self, trainee: Trainee, plan: Plan, memory: int) -> None:
        self.trainee, self.plan = trainee, plan
        self.limits = Limits(budget=STEP_LIMIT, memory=memory)
        self.wrong: Outcome | None = None  # the outcome of a failed check
        self.unchecked, self.checking = trainee.info is not None, ""  # and what it printed then
        self.skip = trainee.skip  # why its remaining seeds are skipped
        self.unsaved = ""  # why the model of the last seed could not be saved
        order = {
            "path": None if trainee.path is None else str(trainee.path),
            "sha256": trainee.declared.get("sha256"),
            "backend": trainee.backend,
            "problem": plan.problem.to_json(),
            "size": plan.size,
            "steps": plan.steps,
            "save": None if trainee.save is None else str(trainee.save),
        }
        super().__init__(in_its_process, order, memory=memory, greeting=Ready)

    def train(self, seed: int, progress: Callable[[Record], None]) -> Record:
        """Train from one seed; returns its record, also after a failure."""
        record = train_record(self.trainee, self.plan, seed)
        if self.skip is not None:
            return record | {"status": "skipped", "reason": self.skip}
        try:
            if self.unchecked:
                self.wrong, self.unchecked = self.check(), False
            if self.wrong is not None:
                raise ChildFailed(self.wrong.status, f"before it trained: {self.wrong.reason}")
            self.follow(record, progress)
        except ChildFailed as error:
            self.end()
            if error.reason == NO_MESSAGE:  # then its earlier messages can't be trusted either
                record = train_record(self.trainee, self.plan, seed)
            record |= {"status": error.status, "reason": error.reason}
            if error.status == "skipped":
                self.skip = error.reason
            elif error.status == "timeout":  # other seeds would take as long
                self.skip = f"seed {seed} ended in a timeout: {error.reason}"
        return record

    def check(self) -> Outcome | None:
        """Check the stage on one window, in float32; returns the outcome where it fails, or None.

        The loss alone doesn't show a wrong attention: it may decrease with one, too.
        """
        assert self.trainee.info is not None, "only a stage is checked"
        problem = replace(
            self.plan.problem, b=1, dtype="float32", precision="ieee",
            causal=not self.trainee.by_rows, direction="train",
        )  # fmt: skip
        outcome = compare_alone(Cell(self.trainee.info, problem), self.limits)
        self.checking = outcome.printed
        return outcome if outcome.status in FAILURES else None

    def follow(self, record: Record, progress: Callable[[Record], None]) -> None:
        """Train from the seed of `record` and fill it in. Raises ChildFailed where that fails."""
        late = f"no step was done in {STEP_LIMIT:g} s"
        record["parameters"] = self.ready().parameters
        message = self.ask({"seed": record["seed"]}, Losses, Done, seconds=STEP_LIMIT, late=late)
        arrived = {}  # when so many losses had
        while isinstance(message, Losses):
            record["losses"] += message.losses
            arrived[len(record["losses"])] = time.perf_counter()
            if len(record["losses"]) > record["steps"]:
                raise ChildFailed("crashed", NO_MESSAGE)
            progress(record)
            message = self.receive(Losses, Done, seconds=STEP_LIMIT, late=late)
        if len(record["losses"]) < record["steps"]:
            raise ChildFailed("crashed", NO_MESSAGE)
        record["val_loss"] = message.val_loss
        self.unsaved = message.unsaved
        # by this process's clock: a stage may change its own; an interpreted time means nothing
        begun, timed = arrived.get(UNTIMED_STEPS), record["steps"] - UNTIMED_STEPS
        if begun is not None and timed >= UNTIMED_STEPS and record["mode"] != "interpreted":
            shape = SHAPES[self.plan.size]
            tokens = timed * shape.batch * shape.block
            record["tokens_per_s"] = tokens / (arrived[record["steps"]] - begun)
        record["status"] = "ok"

    def printed(self) -> str:
        """The output of a stage since the last call; '' for torch's backends."""
        text, self.checking = self.checking, ""
        return "" if self.trainee.path is None else text + super().printed()
