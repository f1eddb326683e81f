"""`ladder list` and `ladder doctor`: the stages, and which of them run on this machine."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness.isolation.roster import BadStage, StageInfo, describe_files, read_stages
from harness.problems.problem import DEVICES, PEERS_FROM, YARDSTICK
from harness.records import checkout, environment
from harness.records.code import built_in_files, label, peer_files, read_declared, twin_files
from harness.records.units import clean
from harness.views.table import NO_BREAK, Cell, Column, Table, make_page
from ladder.arguments import prepare_children
from ladder.help import as_typed

# stages/common/tuner.py; importing it here would import torch
TUNER = (
    "tuner: on a GPU, stages 6 and 7 time two or three launch configurations at the first call of "
    "each kind, in each process. They take the first that is within 2% of the fastest. Nothing is "
    "kept on disk; a file of choices that an older version left in ~/.cache is not read."
)
PRODUCTS = (
    "half: 16 bits on the matrix unit. bf16x6: float32 as six products of bfloat16. tf32: as "
    "torch's switch allows. ieee: on no matrix unit; Triton knows none before compute capability "
    "8.0, nor bfloat16. Sizes are those of an H200, smaller where they don't fit."
)
PACKAGES = ("torch", "triton", "numpy", "matplotlib", "rich", "typer", "psutil")


def list_command() -> int:
    """List the stages: number, name and idea."""
    rows = []
    for path in [*sorted([*built_in_files(), *twin_files()], key=label), *peer_files()]:
        try:
            stage = read_declared(path)
        except (SyntaxError, ValueError):  # not declared by literals: import the file
            stage = vars(describe_files([path])[0])
        texts = (stage["title"], stage["idea"], stage.get("still_hurts", ""))
        rows.append([str(stage["number"]), *texts])
    headers = ("stage", "the one idea", "still hurts")
    columns = [Column("#"), *(Column(header, left=True, wraps=True) for header in headers)]
    page = make_page()
    page.print(Table(columns, rows, gap=2))
    said = f"From {PEERS_FROM} on: peers, others' kernels to compare with. "
    page.print(Text(f"{said}What runs here: {as_typed('doctor')}", style="dim"))
    return 0


def doctor_command() -> int:
    """Say what runs on this machine and what doesn't, and why."""
    prepare_children(None)
    try:
        stages = read_stages(absent=True)
    except BadStage as error:
        show([], make_page())
        print(f"no stage runs here: {error}", file=sys.stderr)
        return 1
    show(stages, make_page())
    return 0 if healthy(stages) else 1


def findings(stages: Sequence[StageInfo]) -> list[tuple[StageInfo, str, str | None]]:
    """(stage, device, reason) for each stage and device; the reason is None where it runs."""
    return [(stage, device, stage.unavailable[device]) for stage in stages for device in DEVICES]


def healthy(stages: Sequence[StageInfo]) -> bool:
    """Whether stage 3 runs on some device here; without it nothing can be measured."""
    return any(
        stage.number == YARDSTICK and reason is None for stage, _, reason in findings(stages)
    )


def show(stages: Sequence[StageInfo], console: Console) -> None:
    """Print the machine, the versions, and how each stage runs here."""
    card = environment.gpu()
    console.print(Text("machine", style="bold"))
    console.print(
        f"  cpu     {environment.cpu_model()}, {environment.cores()} cores", highlight=False
    )
    console.print(f"  gpu     {f'{card[0]}, driver {card[1]}' if card else 'none found'}")
    console.print(Text(f"  c++     {compiler()}"), soft_wrap=True)
    versions = [f"{name} {environment.version(name) or 'missing'}" for name in PACKAGES]
    for line in filled([f"  python  {environment.platform.python_version()}", *versions], console):
        console.print(Text(line), soft_wrap=True)
    where = literal(from_home(environment.ROOT))
    where.append("" if checkout.is_checkout(environment.ROOT) else ", installed from a wheel")
    console.print(Text("  code    ").append(where), soft_wrap=True)
    if other := checkout.warning():
        console.print(literal(other), style="yellow", soft_wrap=True)
    console.print()
    columns = [Column(device, left=True, wraps=True) for device in DEVICES]
    said = Counter(reason for *_, reason in findings(stages) if reason is not None)
    shared = [reason for reason, times in said.items() if times > 1]  # each said once, below
    rows: list[list[Cell]] = [
        [str(stage.number), stage.title, *(ability(stage, device, shared) for device in DEVICES)]
        for stage in stages
    ]
    console.print(Table([Column("#"), Column("stage", left=True), *columns], rows, gap=2))
    for number, reason in enumerate(shared, 1):
        console.print(Text(f"({number}) {reason}", style="yellow"))
    console.print(
        Text(f"From {PEERS_FROM} on: peers, others' kernels to compare with.", style="dim")
    )
    console.print()
    show_card(stages, console)
    console.print(Text(TUNER))


def show_card(stages: Sequence[StageInfo], console: Console) -> None:
    """Print what the GPU is and how the stages in Triton run on it; nothing without one."""
    tiled = [stage for stage in stages if stage.here]
    if not tiled:
        return
    said = f"This GPU: {tiled[0].here['card']}. Products of each dtype, and BLOCK_M x BLOCK_N"
    console.print(Text(f"{said} at d = 64, 128, 256:"))
    dtypes = ("float16", "float32")
    columns = [Column("#"), *(Column(dtype, left=True, wraps=True) for dtype in dtypes)]
    rows: list[list[Cell]] = [
        [str(stage.number), *(stage.here[dtype] for dtype in dtypes)] for stage in tiled
    ]
    console.print(Table(columns, rows, gap=2))
    console.print(Text(PRODUCTS))
    console.print()


def ability(stage: StageInfo, device: str, shared: Sequence[str] = ()) -> Text:
    """How a stage runs on a device and which dtypes it doesn't take there, or why it can't run.

    Of a reason in `shared`, only its number there, from 1.
    """
    if (reason := stage.unavailable[device]) is not None:
        short = f"no ({shared.index(reason) + 1})" if reason in shared else reason
        return Text(short, style="yellow")
    refused = [f"no {dtype}" for dtype, why in stage.refused[device].items() if why is not None]
    return Text(", ".join([stage.modes[device], *refused]), style="green")


def compiler() -> str:
    """The C++ compiler that would build stage 2, as it names itself, or that there is none."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++", "cl")):
        if (path := shutil.which(name)) is not None:
            with suppress(OSError, subprocess.SubprocessError):
                asked = subprocess.run([path, "--version"], capture_output=True, timeout=10)
                said = (asked.stdout or asked.stderr).decode(errors="replace").splitlines()
                return clean(said[0]) if said else name
    return "no compiler found: stage 2 needs one, and Python's headers, to be built"


def filled(parts: Sequence[str], console: Console) -> list[str]:
    """`parts` with commas between them, none of them broken, in lines that fit the console."""
    text = ", ".join(part.replace(" ", NO_BREAK) for part in parts)
    lines = textwrap.wrap(text, console.width, subsequent_indent=10 * " ", break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in lines]


def literal(value: object) -> Text:
    """`value` as plain text, since a file may contain markup or control characters."""
    return Text(clean(str(value)))


def from_home(path: Path) -> str:
    """`path`, with a ~ for the user's home."""
    # without a home, as in containers, this is "~"; with an empty HOME it is "/"
    home = os.path.expanduser("~")  # noqa: PTH111
    if home != "/" and path.is_relative_to(home):
        return f"~/{path.relative_to(home)}"
    return str(path)
