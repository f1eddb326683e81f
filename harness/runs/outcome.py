"""The outcome of one stage in a comparison, and the records made from outcomes."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields

from harness.isolation.judge import ERRORS
from harness.isolation.roster import StageInfo
from harness.problems import cost
from harness.problems.problem import PEERS_FROM, Problem
from harness.records.schema import Record
from harness.runs.plan import Limits

TIMING = ("time_ms", "time_iqr_ms", "samples", "sm_clock_mhz", "rounds_ms")
CHECKED = ("first_call_ms", "peak_bytes", "memory_meter")


@dataclass
class Outcome:
    """The verdict on a stage on a problem, and its measurements.

    The measured fields are those of a record. `dropped`: it has failed and is not measured further.
    `refused`: it raised a ValueError.
    """

    stage: StageInfo
    problem: Problem
    status: str = "crashed"
    reason: str = ""
    dropped: bool = False
    refused: bool = False
    interpreted: bool = False  # whether any kernel ran in Triton's interpreter
    waited: float = 0.0  # seconds of its check, by the parent's clock
    first_call_ms: float | None = None
    call_ms: float = 0.0  # of the last call of its check
    peak_bytes: int | None = None
    memory_meter: str | None = None
    launch_configs: Record | None = None
    time_ms: float | None = None
    time_iqr_ms: float | None = None
    samples: int = 0
    sm_clock_mhz: int | None = None
    rounds_ms: list[float] | None = None
    skip_ratio: float | None = None
    err_stage3_max: float | None = None
    err_stage3_rel: float | None = None
    err_f64_max: float | None = None
    err_f64_rel: float | None = None

    @property
    def mode(self) -> str:
        """'native', 'compiled' or 'interpreted'."""
        return "interpreted" if self.interpreted else self.stage.modes[self.problem.device]

    def forget(self) -> None:
        """Reset all fields to their defaults."""
        for each in fields(self):
            if each.default is not MISSING:
                setattr(self, each.name, each.default)

    def drop(self, status: str, reason: str) -> None:
        """Note that the stage failed: its times are deleted, and it is not measured further."""
        self.status, self.reason, self.dropped = status, reason, True
        self.time_ms = self.time_iqr_ms = self.sm_clock_mhz = self.skip_ratio = None
        self.rounds_ms = self.launch_configs = None
        self.samples = 0

    def note(self, message: Record, names: Sequence[str]) -> None:
        """Copy the fields `names` from a message."""
        for name in names:
            setattr(self, name, message[name])

    def note_verdict(self, verdict: Record) -> None:
        """Note the judge's verdict on the first outputs."""
        self.note(verdict, ERRORS)
        declared = self.stage.inexact(self.problem)
        if declared and verdict["finite"]:
            self.status, self.reason = "wrong-by-design", declared
        elif verdict["exact"]:
            self.status = "ok"
        else:
            self.status, self.reason = "wrong", verdict["why"]

    def values(self, names: Sequence[str]) -> Record:
        """The fields `names`, by name."""
        return {name: getattr(self, name) for name in names}


def common_fields(outcome: Outcome, kind: str) -> Record:
    """The fields that records of both kinds have."""
    stage, problem = outcome.stage, outcome.problem
    lengths = problem.seqlens_k
    return {
        "kind": kind,
        "stage": stage.number,
        "name": stage.name,
        **problem.to_json(),
        "seqlens_k": None if lengths is None else list(lengths),
        **outcome.values(("mode", "status", "reason", "launch_configs", *TIMING)),
        "flops": cost.flops(problem),
    }


def cell_record(outcome: Outcome, paired: bool) -> Record:
    """Make the record of a cell of `ladder run`; a paired one has no memory and no first call."""
    checked = dict.fromkeys(CHECKED) if paired else outcome.values(CHECKED)
    return common_fields(outcome, "cell") | {
        "paired": paired,
        **checked,
        **outcome.values(ERRORS),
        "hbm_bytes": cost.hbm_bytes(outcome.problem, outcome.stage.traffic),
    }


def bench_records(outcomes: Sequence[Outcome], limits: Limits) -> list[Record]:
    """Make the records of one comparison of `ladder bench`.

    A speed-up is a peer's median time over the stage's own, from the same rounds.
    """
    peers = [
        each for each in outcomes if each.stage.number >= PEERS_FROM and each.time_ms is not None
    ]
    records = []
    for outcome in outcomes:
        record = common_fields(outcome, "bench")
        time_ms, ok = outcome.time_ms, outcome.status == "ok"
        if outcome.refused and outcome.stage.number >= PEERS_FROM:
            record["status"] = "skipped"  # a peer refuses a problem by a ValueError
        record |= {
            **(outcome.values(CHECKED) if ok else dict.fromkeys(CHECKED)),
            **outcome.values(("err_f64_max", "err_f64_rel", "skip_ratio")),
            "tflops": None,
            "tokens_per_s": None,
            "speedup": {},
            "warmup": limits.warmup,
            "repeat": limits.rounds,
            "hbm_bytes": cost.hbm_bytes(outcome.problem),
        }
        if time_ms is not None:
            record["tflops"] = record["flops"] / (1e-3 * time_ms) / 1e12
            record["tokens_per_s"] = outcome.problem.b * outcome.problem.nq / (1e-3 * time_ms)
            record["speedup"] = {
                peer.stage.name: peer.time_ms / time_ms
                for peer in peers
                if peer is not outcome and peer.time_ms is not None
            }
        records.append(record)
    return records
