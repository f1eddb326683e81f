"""The stages that a run knows: what each declares, read in a child, so that no file can harm us.

The harness knows no stage by name: a new file in stages/, or one named by --stage, is a new row.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.isolation.child import START_LIMIT, ChildFailed, Message, say
from harness.isolation.declared import read_declared
from harness.isolation.session import (
    Events,
    Session,
    has,
    is_bool,
    is_count,
    is_text,
    list_of,
    optional,
)
from harness.problems.problem import DEVICES, DTYPES, Problem
from harness.records.syntax import digest

STAGES = Path(__file__).parents[2] / "stages"
PEERS = Path(__file__).parents[1] / "peers"
OURS = STAGES, PEERS

LEAST_LOAD = 10.0  # seconds: importing Triton takes some, whatever a cell's budget is

YOURS = "yours"  # the name of a file that declares itself by the number and name of one of ours

# what the child may say of a file
SAID: Events = {
    "stage": {
        "number": is_count,
        **dict.fromkeys(("name", "title", "idea", "still_hurts", "traffic"), is_text),
        **dict.fromkeys(("sha256", "syntax_sha256"), is_text),
        **dict.fromkeys(("needs", "devices", "options"), list_of(is_text)),
        **dict.fromkeys(("gradients", "few_queries", "rounds_scores"), is_bool),
        **dict.fromkeys(("exact_up_to", "at_most", "only_major"), optional(is_count)),
        "worth_up_to": lambda value: isinstance(value, dict) and all(map(is_count, value.values())),
        "modes": has(dict.fromkeys(DEVICES, is_text)),
        "unavailable": has(dict.fromkeys(DEVICES, optional(is_text))),
        "refused": has(dict.fromkeys(DEVICES, has(dict.fromkeys(DTYPES, optional(is_text))))),
    },
    "bad": {"reason": is_text},
}


# an option of the contract (stages/contract.py) whose name doesn't say it -> what it is
OPTIONS = {
    "gqa": " (grouped heads: fewer heads of k and v than of q)",
    "seqlens_k": " (valid key lengths)",
    "paged": " cache (it has no attend_paged)",
}


class BadStage(ValueError):
    """A stage's file can't be loaded; the message names the file and says why."""


@dataclass(frozen=True)
class StageInfo:
    """A stage as its file declares it (stages/contract.py), and what it can do on this machine."""

    path: Path
    number: int
    name: str
    title: str
    idea: str
    still_hurts: str
    needs: Sequence[str]
    devices: Sequence[str]
    options: Sequence[str]
    gradients: bool
    few_queries: bool
    exact_up_to: int | None
    rounds_scores: bool
    worth_up_to: Mapping[str, int]
    traffic: str  # what it moves through memory at the least (harness/problems/cost.py)
    sha256: str  # of the file's bytes
    syntax_sha256: str  # of its code (harness/records/syntax.py)
    modes: Mapping[str, str]  # device -> native, compiled or interpreted
    unavailable: Mapping[str, str | None]  # device -> why it can't run there
    refused: Mapping[str, Mapping[str, str | None]]  # device -> dtype -> why it won't take it
    at_most: int | None = None  # batch entries, and heads
    only_major: int | None = None  # the one major compute capability that it is made for
    failed: tuple[str, str] | None = None  # status and reason, where it could not be loaded

    @staticmethod
    def from_message(path: Path, message: Message) -> "StageInfo":
        """A stage from what the child said of it."""
        names = {field.name for field in fields(StageInfo)} - {"path", "failed"}
        return StageInfo(path=path, **{name: message[name] for name in names})

    @staticmethod
    def from_text(path: Path, failed: tuple[str, str]) -> "StageInfo | None":
        """A stage that could not be loaded, from its text; None where that names no stage."""
        with contextlib.suppress(Exception):
            text, declared = path.read_bytes(), read_declared(path)
            said = {name: declared[name] for name in ("number", "name", "title", "idea")}
            if all(check(said[name]) for name, check in SAID["stage"].items() if name in said):
                sha256, code = hashlib.sha256(text).hexdigest(), digest(text.decode())
                free = dict.fromkeys(DEVICES)
                return StageInfo(
                    path=path, **said, still_hurts="", needs=(), devices=DEVICES, traffic="fused",
                    options=tuple(OPTIONS), gradients=True, few_queries=False, exact_up_to=None,
                    rounds_scores=False, worth_up_to={}, sha256=sha256, syntax_sha256=code,
                    unavailable=free, modes=dict.fromkeys(DEVICES, "native"), failed=failed,
                    refused=dict.fromkeys(DEVICES, dict.fromkeys(DTYPES)),
                )  # fmt: skip
        return None

    @property
    def ours(self) -> bool:
        """Whether its file is one of the ladder's stages or peers."""
        return self.path.resolve().parent in OURS

    def to_json(self) -> dict[str, Any]:
        """What records keep of a stage, so that tables and plots need no stage's file. No path."""
        return {
            "stage": self.number,
            "name": self.name,
            "title": self.title,
            "exact_up_to": self.exact_up_to,
            "few_queries": self.few_queries,
            "sha256": self.sha256,
            "syntax_sha256": self.syntax_sha256,
        }

    def why_skip(self, problem: Problem) -> str | None:
        """Why this stage can't be asked `problem` on this machine, or None where it can."""
        if reason := self.unavailable[problem.device]:
            return reason
        if problem.direction != "fwd" and not self.gradients:
            return "carries no gradients"
        if problem.precision == "tf32" and problem.device == "cpu":
            return "tf32 is a GPU's way to multiply float32: a CPU has only ieee"
        if reason := self.refused[problem.device][problem.dtype]:
            return reason
        if self.at_most and max(problem.b, problem.h) > self.at_most:
            return f"takes at most {self.at_most} batch entries, and as many heads"
        for option in problem.options:
            if option not in self.options:
                return f"takes no {option}{OPTIONS.get(option, '')}"
        return None

    def inexact(self, problem: Problem) -> str | None:
        """What this stage declares of itself that makes it inexact on `problem`, or None."""
        if self.exact_up_to is not None and problem.nk > self.exact_up_to:
            return f"declared exact up to Nk = {self.exact_up_to} only"
        half = problem.dtype in ("float16", "bfloat16")
        if self.rounds_scores and half and problem.inputs == "peaky":
            return f"declared to round its scores: inexact in {problem.dtype} where they are large"
        return None

    def exact(self, problem: Problem) -> bool:
        """Whether this stage declares itself exact on `problem`."""
        return self.inexact(problem) is None


def built_in_files() -> list[Path]:
    """The files of the stages in stages/, lowest first."""
    return sorted(STAGES.glob("s[0-9][0-9]_*.py"))


def peer_files() -> list[Path]:
    """The files of the peers, lowest first."""
    return sorted(PEERS.glob("p[0-9]*_*.py"))


def why_absent(asked: str) -> str | None:
    """Why the peer of that number or name is not among those of `read_stages` here.

    None where there is no such peer, or nothing that speaks against it.
    """
    for path in peer_files():
        declared = read_declared(path)
        if asked in (str(declared["number"]), declared["name"]):
            [peer] = describe_files([path])
            # the device that it declares first is the one that it is for
            return peer.unavailable[peer.devices[0]]
    return None


def read_stages(
    own: Sequence[Path] = (), load: float = START_LIMIT, memory: int | None = None
) -> list[StageInfo]:
    """The built-in stages, those in the files `own`, and the peers that run here, by number.

    `load` and `memory`: seconds and bytes that one of `own` may take to load. One that hangs or
    ends its process has rows that say so, where its text names it. Raises BadStage where a file
    raises an error or is no stage's, or two stages share number and name.
    """
    load = min(START_LIMIT, max(LEAST_LOAD, load))
    stages = describe_files(built_in_files())
    peers = describe_files(peer_files())
    stages += [peer for peer in peers if None in peer.unavailable.values()]
    ours = {(stage.number, stage.name) for stage in stages}
    for path in own:
        # a process each: one bad file blames itself alone
        [stage] = describe_files([path], load, memory)
        if (stage.number, stage.name) in ours:  # a stub of `ladder lab` keeps the stage's own
            stage = replace(stage, name=YOURS, title=f"{stage.title}, yours")
        stages.append(stage)
    seen: dict[tuple[int, str], Path] = {}
    for stage in stages:
        if other := seen.get((stage.number, stage.name)):
            raise BadStage(
                f"{stage.path.name}: number {stage.number}, name {stage.name!r} are those of "
                f"{other.name} too; give it another number or name"
            )
        seen[stage.number, stage.name] = stage.path
    return sorted(stages, key=lambda stage: (stage.number, stage.name))


def describe_files(
    paths: Sequence[Path], load: float = START_LIMIT, memory: int | None = None
) -> list[StageInfo]:
    """Load `paths` in a child and return what they declare."""
    for path in paths:
        if not path.is_file():
            raise BadStage(f"{path}: no such file; a stage is one .py file")
    stages: list[StageInfo] = []
    with Session(describe, [str(path.resolve()) for path in paths], memory=memory) as session:
        for path in paths:
            try:
                session.ready()
                late = f"took more than {load:g} s"
                message = session.receive(SAID, load, late)
            except ChildFailed as error:
                known = StageInfo.from_text(path, (error.status, f"while it was loaded: {error}"))
                if known is not None and not known.ours:
                    return [*stages, known]
                raise BadStage(f"{path.name}: while it was loaded: {error.reason}") from None
            if message["event"] == "bad":
                raise BadStage(f"{path.name}: {message['reason']}")
            stages.append(StageInfo.from_message(path, message))
    return stages


def describe(connection: Connection, paths: list[str]) -> None:
    """In a child: load the stages in `paths` and say what each is and what it can do here.

    Says 'ready', and 'stage' for each, with its STAGE, where it runs and why not, or 'bad' with
    the reason.
    """
    say(connection, "ready")
    try:
        import stages
        from stages.contract import most_on_an_axis, why_not, why_not_dtype
    except ImportError as error:
        say(connection, "bad", reason=f"nothing runs without {error.name}: {error}")
        return
    for path in paths:
        try:
            stage = stages.load(path).STAGE
            fields = asdict(stage)
            fields["worth_up_to"] = dict(stage.worth_up_to)
            say(
                connection, "stage", **fields,
                sha256=hashlib.sha256(Path(path).read_bytes()).hexdigest(),
                syntax_sha256=digest(Path(path).read_text(encoding="utf-8")),
                modes={device: stage.mode(device) for device in DEVICES},
                unavailable={device: why_not(stage, device) for device in DEVICES},
                refused={
                    device: {dtype: why_not_dtype(stage, dtype, device) for dtype in DTYPES}
                    for device in DEVICES
                },
                at_most=most_on_an_axis(stage),
            )  # fmt: skip
        except BaseException as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            say(connection, "bad", reason=text)
