"""Arguments of several commands: options that exclude each other, stages, the device."""

import multiprocessing
import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import typer

from harness.isolation.child import START_LIMIT
from harness.isolation.fork_server import server, server_pid, set_apart
from harness.isolation.roster import StageInfo, read_stages, why_absent
from harness.problems.problem import YARDSTICK
from harness.records.schema import Record
from ladder.options import UserError, integers

# options that describe problems; a --suite has its own problems
SHAPE = ("dtype", "causal", "d", "n", "b", "h", "hk", "seqlens")
RUN_SHAPE = (*SHAPE, "nq", "precision", "inputs")
BENCH_SHAPE = (*SHAPE, "mode", "tokens", "hidden")
SUITE = "a suite's problems are its own"
OWN_FILE = "a resumed run goes on in its own file"
ON_PAPER = "--predict measures nothing, and shows several GPUs, causal and not, forward"
NOT_ON_PAPER = (
    "world", "mode", "causal", "n", "b", "stages", "stage", "warmup", "repeat", "inputs", "seed",
    "device", "budget", "out", "plot", "resume",
)  # fmt: skip
# command -> (an option, another) -> why the first can't be used with the other
EXCLUDED = {
    "run": {
        ("out", "resume"): OWN_FILE,
        **{(name, "suite"): SUITE for name in (*RUN_SHAPE, "mode", "paired")},
    },
    "bench": {
        ("out", "resume"): OWN_FILE,
        **{(name, "suite"): SUITE for name in BENCH_SHAPE},
        ("graph", "suite"): "a suite may read from a paged cache, which is not captured",
        ("tokens", "b"): "--b says the batch size already",
        ("hidden", "h"): "--h says the number of heads already",
    },
    "ring": {
        ("out", "resume"): OWN_FILE,
        **{(name, "predict"): ON_PAPER for name in NOT_ON_PAPER},
    },
    "model": {("text", "weights"): "got --weights too, whose file has our texts and no tokenizer"},
}


def typed(context: typer.Context) -> list[str]:
    """The options that were given on the command line, by name."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def check_together(context: typer.Context) -> None:
    """Raise UserError where two options exclude each other, or a file has the name '-'.

    Standard output has the tables, and standard input is not read.
    """
    command, given = str(context.command.name), typed(context)
    for param in context.command.params:
        value = context.params.get(str(param.name))
        if Path("-") in (value if isinstance(value, (list, tuple)) else [value]):
            named = param.opts[0] if param.param_type_name == "option" else param.metavar
            name = named or str(param.name).upper()
            raise UserError(f"{name}: got -, expected the name of a file or folder")
    for (name, other), why in EXCLUDED.get(command, {}).items():
        if name in given and other in given:
            raise UserError(f"--{name}: {why}; leave it away")


def stages_and_device(
    device: str | None, own: Sequence[Path] = (), load: float = START_LIMIT,
    memory: int | None = None, gradients: bool = False, twins: bool = False,
) -> tuple[list[StageInfo], str]:  # fmt: skip
    """Read all stages, with those in the files `own`, and choose the device to measure on.

    `load` and `memory`: the limits for loading each of `own` (`read_stages`). Where `device` is
    None, it is 'cuda' if the yardstick runs there, else 'cpu'. `gradients`: whether some will be
    computed. `twins`: on a CPU, with the stages that are written once more for one. Raises
    UserError where it is 'cuda' and the yardstick can't run there.
    """
    prepare_children(device, gradients)
    stages = read_stages(own, load, memory)
    reason = why_no_cuda(stages)
    if device == "cuda" and reason:
        raise UserError(f"--device: got cuda, but {reason}")
    device = device or ("cpu" if reason else "cuda")
    return [stage for stage in stages if not stage.twin or (twins and device == "cpu")], device


def why_no_cuda(stages: Sequence[StageInfo]) -> str | None:
    """Why the yardstick can't run on a GPU, or None where it can."""
    yardstick = next(stage for stage in stages if stage.number == YARDSTICK and stage.ours)
    return yardstick.unavailable["cuda"]


def wants_gradients(given: Record) -> bool:
    """Whether the arguments of a run, or of a bench run, ask for more than the forward pass."""
    return given.get("mode", "fwd") != "fwd"


def prepare_children(device: str | None, gradients: bool = False) -> None:
    """Start the fork server, set apart from this process's signals and current folder.

    With --device cpu the processes see no GPU, so that kernels are interpreted. `gradients`:
    whether some will be computed.
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if server(gradients).get_start_method() != "forkserver":  # Windows
        return
    with set_apart():
        forkserver.ensure_running()


def end_children() -> None:
    """Kill the fork server, and with it all running children."""
    for child in multiprocessing.active_children():  # Python would wait for them at its end
        child.kill()
    pid = server_pid()
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def numbers_and_files(values: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Split the values of a --stage that takes both into stages' numbers and stages' files."""
    by_number = [value for value in values if re.fullmatch(r"[\d,\s]*", value)]
    numbers = integers(0)(",".join(by_number), "--stage") if by_number else []
    return list(map(str, numbers)), [Path(value) for value in values if value not in by_number]


def choose(
    stages: Sequence[StageInfo], wanted: Sequence[str], option: str, own: Sequence[Path],
    expected: str = "", named: bool = False,
) -> list[StageInfo]:  # fmt: skip
    """Choose the `stages` whose number or name is in `wanted`, and those in the files `own`.

    Raises UserError, which names `option`, where one isn't known: it says why a peer isn't
    available, or lists the known stages, with names where `named`.
    """
    wanted = [str(int(one)) if one.isdecimal() else one for one in map(str.strip, wanted)]
    for one in wanted:
        if any(one in (str(stage.number), stage.name) for stage in stages):
            continue
        if reason := why_absent(one):
            raise UserError(f"{option}: {one} needs a GPU that it can use; {reason}")
        got = one if one.isdecimal() else repr(one)
        known = [f"{stage.number} ({stage.name})" if named else stage.number for stage in stages]
        listed = ", ".join(map(str, dict.fromkeys(known)))
        raise UserError(f"{option}: got {got}, expected {expected}some of {listed}")
    return [
        stage
        for stage in stages
        if str(stage.number) in wanted or stage.name in wanted or stage.path in own
    ]
