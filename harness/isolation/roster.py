"""The rungs that a run knows: what each declares, read in a child, so that no file can harm us.

The harness knows no rung by name: a new file in stages/, or one named by --stage, is a new row.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness.isolation.child import START_LIMIT, Child, ChildFailed, Message
from harness.isolation.worker import describe
from harness.problems.problem import Problem

STAGES = Path(__file__).parents[2] / "stages"
PEERS = Path(__file__).parents[1] / "peers"
PEERS_FROM = 100  # rungs from this number on are peers: others' kernels, no steps of the ladder


class BadRung(ValueError):
    """A rung's file can't be loaded; the message names the file and says why."""


@dataclass(frozen=True)
class Rung:
    """A rung as its file declares it (stages/contract.py), and what it can do on this machine."""

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
    exact_up_to: int | None
    worth_up_to: Mapping[str, int]
    traffic: str  # what it moves through memory at the least (harness/problems/cost.py)
    sha256: str
    modes: Mapping[str, str]  # device -> native, compiled or interpreted
    unavailable: Mapping[str, str | None]  # device -> why it can't run there
    refused: Mapping[str, Mapping[str, str | None]]  # device -> dtype -> why it won't take it
    at_most: int | None = None  # batch entries, and heads

    @staticmethod
    def from_message(path: Path, message: Message) -> "Rung":
        """A rung from what the child said of it."""
        names = [field.name for field in fields(Rung) if field.name != "path"]
        return Rung(path=path, **{name: message[name] for name in names})

    def to_json(self) -> dict[str, Any]:
        """What records keep of a rung, so that tables and plots need no rung's file. No path."""
        return {
            "stage": self.number,
            "name": self.name,
            "title": self.title,
            "exact_up_to": self.exact_up_to,
            "sha256": self.sha256,
        }

    def why_skip(self, problem: Problem) -> str | None:
        """Why this rung can't be asked `problem` on this machine, or None where it can."""
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
                return f"takes no {option}"
        return None

    def exact(self, problem: Problem) -> bool:
        """Whether this rung declares itself exact on `problem`."""
        return self.exact_up_to is None or problem.nk <= self.exact_up_to


def built_in_files() -> list[Path]:
    """The files of the rungs in stages/, lowest first."""
    return sorted(STAGES.glob("s[0-9][0-9]_*.py"))


def read_rungs(own: Sequence[Path] = ()) -> list[Rung]:
    """The built-in rungs, those in the files `own`, and the peers that run here, by number.

    Raises BadRung where a file can't be loaded, or two rungs share number and name.
    """
    rungs = describe_files(built_in_files())
    peers = describe_files(sorted(PEERS.glob("p*.py")))
    rungs += [peer for peer in peers if None in peer.unavailable.values()]
    for path in own:
        rungs += describe_files([path])  # a process each: one bad file blames itself alone
    seen: dict[tuple[int, str], Path] = {}
    for rung in rungs:
        if other := seen.get((rung.number, rung.name)):
            raise BadRung(
                f"{rung.path.name}: number {rung.number}, name {rung.name!r} are those of "
                f"{other.name} too; give it another number or name"
            )
        seen[rung.number, rung.name] = rung.path
    return sorted(rungs, key=lambda rung: (rung.number, rung.name))


def describe_files(paths: Sequence[Path]) -> list[Rung]:
    """Load `paths` in a child and return what they declare."""
    for path in paths:
        if not path.is_file():
            raise BadRung(f"{path}: no such file; a rung is one .py file")
    rungs: list[Rung] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with Child(describe, [str(path.resolve()) for path in paths], log=log) as child:
            for path in paths:
                try:
                    message = child.receive(START_LIMIT, f"took more than {START_LIMIT:g} s")
                except ChildFailed as error:
                    raise BadRung(f"{path.name}: while it was loaded: {error.reason}") from None
                if message["event"] == "failed":
                    raise BadRung(f"{path.name}: {message['reason']}")
                rungs.append(Rung.from_message(path, message))
    return rungs
