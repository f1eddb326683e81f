"""The stages available to a run: their declarations, read in a child process for safety.

The harness names no stage: a new file in stages/, or one given by --stage, becomes a new row.
"""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

from harness.isolation.child import START_LIMIT, ChildFailed, one_line, say
from harness.isolation.session import Session
from harness.problems.problem import DEVICES, DTYPES, Problem
from harness.records.code import (
    FIRST,
    PEERS,
    STAGES,
    built_in_files,
    code_of,
    first_file,
    label,
    peer_files,
    rank_peer_files,
    read_declared,
    twin_files,
)
from harness.records.values import Count, check, rules

OURS = STAGES, PEERS  # folders

LEAST_LOAD = 10.0  # seconds, also where a cell's budget is smaller: importing Triton takes some

YOURS = "yours"  # the name of a user's stage whose file declares a built-in one's number and name

# an option of a stage (stages/common/contract.py) -> an explanation, where the name isn't enough
OPTIONS = {
    "gqa": " (grouped heads: fewer heads of k and v than of q)",
    "seqlens_k": " (valid key lengths)",
    "paged": " cache (it has no attend_paged)",
    "world": " (several processes, each with a part of the sequence)",
}


class BadStage(ValueError):
    """A stage's file can't be loaded; the message names the file and says why."""


@dataclass(frozen=True)
class Bad:
    """The child's message about a file that can't be loaded."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The child's message about a stage: its declaration, and what it can do on this machine."""

    number: Count
    name: str
    title: str
    idea: str
    still_hurts: str
    needs: list[str]
    devices: list[str]
    options: list[str]
    gradients: bool
    few_queries: bool
    exact_up_to: Count | None
    rounds_scores: bool
    worth_up_to: dict[str, Count]
    traffic: str  # how the bytes that it moves are counted (harness/problems/cost.py)
    sha256: str  # of its files' bytes
    code: str  # the digest of all code behind its results (harness/records/code.py)
    modes: Annotated[dict[str, str], DEVICES]  # device -> native, compiled or interpreted
    unavailable: Annotated[dict[str, str | None], DEVICES]  # device -> why it can't run there
    # device -> dtype -> why it won't take it
    refused: Annotated[dict[str, Annotated[dict[str, str | None], DTYPES]], DEVICES]
    splits_keys: bool = False
    at_most: Count | None = None  # the largest number of batch entries, and of heads
    only_major: Count | None = None  # the one major compute capability that it is made for
    here: dict[str, str] = field(
        default_factory=dict
    )  # how it runs on the GPU (stages/common/fit.py)


@dataclass(frozen=True, kw_only=True)
class StageInfo(Stage):
    """A stage (stages/common/contract.py), in the file `path`."""

    path: Path
    failed: tuple[str, str] | None = None  # status and reason, if it could not be loaded

    @staticmethod
    def from_text(path: Path, failed: tuple[str, str]) -> "StageInfo | None":
        """A stage that could not be loaded, from its file's text; None where that names none."""
        with contextlib.suppress(Exception):
            text, declared = path.read_bytes(), read_declared(path)
            known = {name: declared[name] for name in ("number", "name", "title", "idea")}
            known = {name: check(value, rules(Stage)[name], name) for name, value in known.items()}
            sha256 = hashlib.sha256(text).hexdigest()
            no_reason = dict.fromkeys(DEVICES)
            return StageInfo(
                path=path, **known, still_hurts="", needs=[], devices=[*DEVICES], traffic="fused",
                options=[*OPTIONS], gradients=True, few_queries=False, exact_up_to=None,
                rounds_scores=False, worth_up_to={}, sha256=sha256, code=code_of(path),
                unavailable=no_reason, modes=dict.fromkeys(DEVICES, "native"), failed=failed,
                refused=dict.fromkeys(DEVICES, dict.fromkeys(DTYPES)),
            )  # fmt: skip
        return None

    @property
    def ours(self) -> bool:
        """Whether its file is one of the ladder's stages or peers."""
        return any(folder in self.path.resolve().parents for folder in OURS)

    @property
    def twin(self) -> bool:
        """Whether it is one of the ladder's stages, written once more for a CPU."""
        return self.path.resolve().parent == STAGES / "cpu"

    def to_json(self) -> dict[str, Any]:
        """The stage's entry in an env line, which is all that tables and plots need. No path."""
        return {
            "stage": self.number,
            "name": self.name,
            "title": self.title,
            "exact_up_to": self.exact_up_to,
            "few_queries": self.few_queries,
            "sha256": self.sha256,
            "code": self.code,
        }

    def why_skip(self, problem: Problem) -> str | None:
        """Why this stage can't compute `problem` on this machine, or None where it can."""
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
        """Why this stage declares itself inexact on `problem`, or None where it is exact."""
        if self.exact_up_to is not None and problem.nk > self.exact_up_to:
            return f"declared exact up to Nk = {self.exact_up_to} only"
        half = problem.dtype in ("float16", "bfloat16")
        if self.rounds_scores and half and problem.inputs == "peaky":
            return f"declared to round its scores: inexact in {problem.dtype} where they are large"
        return None

    def exact(self, problem: Problem) -> bool:
        """Whether this stage declares itself exact on `problem`."""
        return self.inexact(problem) is None


def why_absent(number_or_name: str) -> str | None:
    """Why `read_stages` leaves out the peer with that number or name on this machine.

    None where there is no such peer, or no reason to leave it out.
    """
    for path in peer_files():
        declared = read_declared(path)
        if number_or_name in (str(declared["number"]), declared["name"]):
            [peer] = describe_files([path])
            # the device that it declares first is its main one
            return peer.unavailable[peer.devices[0]]
    return None


def read_stages(
    own: Sequence[Path] = (), load: float = START_LIMIT, memory: int | None = None,
    absent: bool = False,
) -> list[StageInfo]:  # fmt: skip
    """Read the built-in stages, those in the files `own`, and the peers that run here, by number.

    `absent`: the other peers, too. `load` and `memory`: seconds and bytes that each of `own` may
    take to load. A stage that hangs or ends its process gets rows with that status, if its text
    declares its name. Raises BadStage where a file raises an error or is no stage's, or two stages
    have the same number and name.
    """
    load = min(START_LIMIT, max(LEAST_LOAD, load))
    built_in = [*built_in_files(), *twin_files()]
    described = describe_files([*built_in, *peer_files()])
    stages, peers = described[: len(built_in)], described[len(built_in) :]
    stages += [peer for peer in peers if absent or None in peer.unavailable.values()]
    ours = {(stage.number, stage.name) for stage in stages}
    for path in own:
        # one process each, so that a bad file fails alone
        [stage] = describe_files([path], load, memory)
        if (stage.number, stage.name) in ours:  # so does a stub of `ladder lab`
            stage = replace(stage, name=YOURS, title=f"{stage.title}, yours")
        stages.append(stage)
    seen: dict[tuple[int, str], Path] = {}
    for stage in stages:
        if other := seen.get((stage.number, stage.name)):
            raise BadStage(
                f"{label(stage.path)}: number {stage.number}, name {stage.name!r} are those of "
                f"{label(other)} too; give it another number or name"
            )
        seen[stage.number, stage.name] = stage.path
    return sorted(stages, key=lambda stage: (stage.number, stage.name))


def read_rank_peers() -> list[StageInfo]:
    """Read the peers that several ranks compute together; other commands don't load them."""
    return describe_files(rank_peer_files())


def unwatched(connection: Connection, path: str) -> AbstractContextManager[None]:
    """Let a file be loaded freely."""
    return contextlib.nullcontext()


def describe_files(
    paths: Sequence[Path], load: float = START_LIMIT, memory: int | None = None,
    watch: Callable[[Connection, str], AbstractContextManager[None]] = unwatched,
) -> list[StageInfo]:  # fmt: skip
    """Load the files `paths` in a child process and return the stages that they declare.

    Each is loaded in the context that `watch` makes there; it may send Bad itself.
    """
    for path in paths:
        if not first_file(path).is_file():
            what = "not a file" if path.exists() else "no such file"
            if path.is_dir():
                what = f"no {FIRST} in it, the first file of a stage that is a folder"
            raise BadStage(f"{path}: {what}; a stage is a .py file, or a folder of them")
    stages: list[StageInfo] = []
    files = [str(path.resolve()) for path in paths]
    with Session(describe, files, watch, memory=memory) as session:
        for path in paths:
            try:
                session.ready()
                late = f"took more than {load:g} s"
                message: Stage | Bad = session.receive(Stage, Bad, seconds=load, late=late)
            except ChildFailed as error:
                known = StageInfo.from_text(path, (error.status, f"while it was loaded: {error}"))
                if known is not None and not known.ours:
                    return [*stages, known]
                raise BadStage(f"{label(path)}: while it was loaded: {error.reason}") from None
            if isinstance(message, Bad):
                reason = message.reason.replace(f" {label(path)}: ", " ", 1)  # it is named already
                raise BadStage(f"{label(path)}: {reason}")
            stages.append(StageInfo(path=path, **vars(message)))
    return stages


def describe(
    connection: Connection,
    paths: list[str],
    watch: Callable[[Connection, str], AbstractContextManager[None]] = unwatched,
) -> None:
    """In a child: load the stages in `paths` and describe each: its STAGE and where it runs.

    Sends 'ready', then for each 'stage' with the description, or 'bad' with a reason.
    """
    say(connection, "ready")
    try:
        import stages
        from stages.common.contract import most_on_an_axis, why_not, why_not_dtype
        from stages.common.fit import told
    except ImportError as error:
        say(connection, "bad", reason=f"nothing runs without {error.name}: {error}")
        return
    for path in paths:
        try:
            with watch(connection, path):
                module = stages.load(path, alone=watch is not unwatched)
                stage = module.STAGE
                fields = asdict(stage)
                fields.pop("files")
                fields |= {
                    "worth_up_to": dict(stage.worth_up_to),
                    "sha256": stages.digest(first_file(Path(path)), stage.files),
                    "code": code_of(Path(path)),
                    "modes": {device: stage.mode(device) for device in DEVICES},
                    "unavailable": {device: why_not(stage, device) for device in DEVICES},
                    "refused": {
                        device: {dtype: why_not_dtype(stage, dtype, device) for dtype in DTYPES}
                        for device in DEVICES
                    },
                    "at_most": most_on_an_axis(stage),
                    "here": told(module) if STAGES.resolve() in Path(path).parents else {},
                }
            say(connection, "stage", **fields)
        except BaseException as error:
            say(connection, "bad", reason=one_line(error))
