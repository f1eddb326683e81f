"""Shared by the commands that measure: the file of records, progress, and the end of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from harness.ending import INTERRUPTED
from harness.records import environment
from harness.records.files import whole
from harness.records.jsonl import WriteFailed, Writer, read
from harness.records.schema import Record
from harness.records.units import clean
from harness.views.table import make_page
from ladder.options import UserError

RUNS = Path("runs")
PRINTED_LINES = 20  # of what a stage prints, shown for each cell


# ---- files


@contextmanager
def writing(path: Path, option: str = "--out") -> Iterator[None]:
    """Turn errors of writing into `path`, given by `option`, into UserError."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"plots need matplotlib: {error}; pip install matplotlib") from None
    except OSError as error:
        what = error.filename or path  # a full disk names no file
        reason = error.strerror or error
        raise UserError(f"{option}: {what}: {reason}: it can't be written") from None


def open_results(file: Path, kind: str | None = "cell") -> tuple[Record, list[Record]]:
    """The env and the records of `kind` of a results file; UserError where it can't be read."""
    try:
        return read(file, kind)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None


def check_out(out: Path | None, instead: str = "name another", option: str = "--out") -> None:
    """Raise UserError where the file given by `option` exists already, or can't be created."""
    if out is not None:
        with writing(out, option):
            if out.exists():
                raise UserError(f"{option}: {out} is there already: {instead}")


def check_save(path: Path | None) -> None:
    """Raise UserError where the file that --save names exists already, or can't be written."""
    check_out(path, option="--save")
    check_writable(path, "--save")  # now, not when minutes of training are done


def check_writable(path: Path | None, option: str) -> None:
    """Raise UserError where the file that an option names, or a draft beside it, can't be written.

    It stays as it is: absent, or with what is in it.
    """
    if path is not None:
        with writing(path, option), suppress(Unwritten), whole(path) as draft:
            draft.open("ab").close()
            raise Unwritten


class Unwritten(Exception):
    """Raised to drop a draft."""


def begin(
    command: str, out: Path | None, device: str, arguments: Mapping[str, Any],
    stages: Sequence[Record] = (), plan: Sequence[Record] = (),
    check: Callable[[Record], object] = dict,
) -> Writer:  # fmt: skip
    """Create a results file, by default under runs/, with its env line; UserError on failure.

    `stages` and `plan` go into the env line; `check` is called with that line before it is written.
    """
    env = environment.make_env(device, list(plan), list(stages), dict(arguments))
    check(env)
    if out is not None:
        with writing(out):
            try:
                return Writer.create(out, env)
            except FileExistsError:
                check_out(out)  # another command, begun at the same moment, has made it
                raise
    stem = f"{command}{datetime.now():%Y%m%d-%H%M%S}"
    for end in ("", *(f"-{index}" for index in range(2, 100))):
        path = RUNS / f"{stem}{end}.jsonl"
        with writing(path), suppress(FileExistsError):  # of another, begun in the same second
            return Writer.create(path, env)
    raise UserError(f"--out: {path} is there already: name another")


# ---- from the first measurement to the exit code


@contextmanager
def ended_early() -> Iterator[list[BaseException]]:
    """Let a Ctrl-C, or a file that can't be written any more, end the measuring done here.

    The list then holds that error. The records so far are shown all the same.
    """
    errors: list[BaseException] = []
    try:
        yield errors
    except (KeyboardInterrupt, WriteFailed) as error:
        errors.append(error)


def exit_code(errors: Sequence[BaseException], failed: bool) -> int:
    """The exit code once the records are shown. Raises the WriteFailed among `errors`."""
    for error in errors:
        if isinstance(error, WriteFailed):
            raise error
    return INTERRUPTED if errors else int(failed)


def note(what: str, said: object) -> None:
    """Print a line below the tables, such as the file of the records."""
    make_page().print(Text(f"{what + ':':<9}{said}"), soft_wrap=True)


def draw(what: str, plot: Callable[[], Sequence[Path]]) -> None:
    """Plot, and print the files; or print why not, which is no failure of the run."""
    try:
        note(what, ", ".join(map(str, plot())) or "nothing to plot")
    except (ImportError, OSError) as error:
        make_page().print(Text(f"no plot: {error}"), soft_wrap=True)


class Progress:
    """Progress on stderr: a bar on a terminal, a line for each finished part, stages' output.

    `quiet`: only the bar on a terminal. Errors of writing to stderr are ignored.
    """

    def __init__(self, total: int, done: int = 0, quiet: bool = False) -> None:
        self.total, self.done = total, done
        self.console = Console(stderr=True)
        self.quiet = quiet and self.console.is_terminal
        self.bar = Bar(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=self.console, transient=True,
            disable=not self.console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("measuring", total=total, completed=done)

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begun(self, what: str, line: bool = True) -> None:
        """Show that `what` has begun: as the bar's text, or as a `line` where there is no bar."""
        self.bar.update(self.task, description=what)
        if line and not self.console.is_terminal:
            self.say(f"[{self.done + 1}/{self.total}] {what} ...")

    def finished(self, what: str, result: str, name: str = "", printed: str = "") -> None:
        """Show that a part is finished, with its result, and the last lines printed by `name`."""
        self.done += 1
        self.bar.update(self.task, completed=self.done, description=what)
        if not self.quiet:
            self.say(f"[{self.done}/{self.total}] {what}: {result}")
        lines = printed.splitlines()
        if len(lines) > PRINTED_LINES:
            lines = [f"... {len(lines) - PRINTED_LINES} lines before", *lines[-PRINTED_LINES:]]
        for line in lines:
            self.say(f"{name} | {line}", style="dim")

    def say(self, line: str, style: str = "") -> None:
        """Print a line, without control characters."""
        with suppress(OSError):
            self.console.print(Text(clean(line), style=style), soft_wrap=True)
            self.console.file.flush()
