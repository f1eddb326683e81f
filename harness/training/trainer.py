"""`ladder train`: a small GPT learns with stages as its attention, and with SDPA beside them.

A contestant, a stage or one of SDPA's backends, has a process of its own, where
harness/training/loop.py trains the model of harness/training/gpt.py seed after seed; a record is
what came of one seed. Whether the curves agree is told from the records alone, by
harness/training/curves.py.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.isolation.child import NO_MESSAGE, START_LIMIT, Child, ChildFailed
from harness.records.jsonl import Writer
from harness.records.schema import check_record
from harness.runs.runner import Record, expect
from harness.training.loop import contest
from harness.training.plan import Contestant, Plan

STEP_LIMIT = 300.0  # seconds between two messages: a step, or all that the first one compiles


def run(
    contestants: Sequence[Contestant],
    plan: Plan,
    memory: int,
    writer: Writer,
    progress: Callable[[Record], None],
    report: Callable[[Record, str], None],
) -> list[Record]:
    """Train each contestant from each seed, and write a record of each. Returns the records.

    `progress` is shown the record under way as its losses come in; `report` is told of each that is
    done, with what its stage printed. `memory`: bytes that a contestant may take.
    """
    records = []
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        for contestant in contestants:
            with Trainee(contestant, plan, memory, Path(folder) / "log") as trainee:
                for seed in plan.seeds:
                    record = trainee.train(seed, progress)
                    writer.append(record)
                    records.append(record)
                    report(record, trainee.printed())
    return records


def blank_record(contestant: Contestant, plan: Plan, seed: int) -> Record:
    """The record of a contestant and a seed before anything is done."""
    return {
        "kind": "train",
        "stage": contestant.stage,
        "name": contestant.name,
        "reference": contestant.backend is not None,
        "device": plan.problem.device,
        "dtype": plan.problem.dtype,
        "mode": contestant.mode,
        "size": plan.size,
        "seed": seed,
        "steps": plan.steps,
        "parameters": None,
        "status": "crashed",
        "reason": "",
        "losses": [],
        "val_loss": None,
        "tokens_per_s": None,
    }


class Trainee:
    """A contestant's process: started when the first seed is due, and anew after it has failed."""

    def __init__(self, contestant: Contestant, plan: Plan, memory: int, log: Path) -> None:
        self.contestant = contestant
        self.plan = plan
        self.memory = memory
        self.log = log
        self.read = 0  # bytes of the log that were shown
        self.child: Child | None = None
        self.parameters: int | None = None
        self.skip = contestant.skip  # why its next seeds aren't tried

    def train(self, seed: int, progress: Callable[[Record], None]) -> Record:
        """The record of one seed, whatever happens."""
        record = blank_record(self.contestant, self.plan, seed)
        if self.skip is not None:
            return record | {"status": "skipped", "reason": self.skip}
        try:
            self.follow(record, progress)
            check_record(record)
        except ChildFailed as error:
            self.end()
            record |= {"status": error.status, "reason": error.reason}
            if error.status == "skipped":
                self.skip = error.reason
            elif error.status == "timeout":  # minutes a seed, all to the same end
                self.skip = f"seed {seed} ended in a timeout: {error.reason}"
        except (KeyError, TypeError, ValueError):  # messages that are none of ours; BadRecord too
            self.end()
            record = blank_record(self.contestant, self.plan, seed)
            record["reason"] = NO_MESSAGE
        return record

    def follow(self, record: Record, progress: Callable[[Record], None]) -> None:
        """Train from the seed of `record`, and fill it. Raises ChildFailed, or as `train` says."""
        child = self.ready()
        record["parameters"] = self.parameters
        child.send({"seed": record["seed"]})
        while True:
            message = child.receive(STEP_LIMIT, f"no step was done in {STEP_LIMIT:g} s")
            if message["event"] != "losses":
                break
            record["losses"] += [figure(loss) for loss in message["losses"]]
            if len(record["losses"]) > record["steps"]:
                raise ValueError("more losses than steps")
            progress(record)
        message = expect(message, "done")
        if len(record["losses"]) != record["steps"]:
            raise ValueError("fewer losses than steps")
        record["val_loss"] = figure(message["val_loss"])
        if record["mode"] != "interpreted":  # whose time is no speed
            speed = message["tokens_per_s"]
            record["tokens_per_s"] = None if speed is None else figure(speed)
        record["status"] = "ok"

    def ready(self) -> Child:
        """Its process, started where none runs, the stage loaded."""
        if self.child is None:
            self.read = 0
            path = self.contestant.path
            order: dict[str, Any] = {
                "path": None if path is None else str(path),
                "backend": self.contestant.backend,
                "problem": self.plan.problem.to_json(),
                "size": self.plan.size,
                "steps": self.plan.steps,
                "dtype": self.plan.problem.dtype,
            }
            self.child = Child(contest, order, log=self.log)
            late = f"did not load in {START_LIMIT:g} s"
            message = expect(self.child.receive(START_LIMIT, late), "ready")
            self.parameters = message["parameters"]
            self.child.limit_memory(self.memory)
        return self.child

    def printed(self) -> str:
        """What the stage has printed since the last time; of torch's backends it is no matter."""
        if self.contestant.path is None or not self.log.exists():
            return ""
        data = self.log.read_bytes()[self.read :]
        self.read += len(data)
        return data.decode(errors="replace")

    def end(self) -> None:
        """End its process."""
        if self.child is not None:
            self.child.end()
            self.child = None

    def __enter__(self) -> "Trainee":
        self.log.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def figure(value: object) -> float:
    """A figure of a child's message; ValueError where it is none."""
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"got {value!r}, expected a finite number")
    return value
