"""What runs on this machine and what doesn't, and why."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.isolation.roster import StageInfo
from harness.problems.problem import DEVICES, YARDSTICK
from harness.records import checkout, environment

TILE = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
SIZES = {"heads": "heads", "nq": "Nq", "n": "N up to"}  # of a tuned call, each the most of its kind
PACKAGES = ("torch", "triton", "numpy", "matplotlib", "rich", "typer", "psutil")


def findings(stages: Sequence[StageInfo]) -> list[tuple[StageInfo, str, str | None]]:
    """(stage, device, reason) for each stage and device; a reason of None: it runs there."""
    return [(stage, device, stage.unavailable[device]) for stage in stages for device in DEVICES]


def healthy(stages: Sequence[StageInfo]) -> bool:
    """Whether stage 3 runs on some device here: without it nothing can be compared."""
    return any(
        stage.number == YARDSTICK and reason is None for stage, _, reason in findings(stages)
    )


def show(stages: Sequence[StageInfo], console: Console) -> None:
    """Print the machine, the versions, and what each stage can do here."""
    card = environment.gpu()
    console.print(Text("machine", style="bold"))
    console.print(
        f"  cpu     {environment.cpu_model()}, {environment.cores()} cores", highlight=False
    )
    console.print(f"  gpu     {f'{card[0]}, driver {card[1]}' if card else 'none found'}")
    versions = (f"{name} {environment.version(name) or 'missing'}" for name in PACKAGES)
    console.print(f"  python  {environment.platform.python_version()}; {', '.join(versions)}",
                  highlight=False, soft_wrap=True)  # fmt: skip
    where = literal(from_home(environment.ROOT))
    where.append("" if checkout.is_checkout(environment.ROOT) else ", installed from a wheel")
    console.print(Text("  code    ").append(where), soft_wrap=True)
    if other := checkout.warning():
        console.print(literal(other), style="yellow", soft_wrap=True)
    console.print()
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="underline")
    table.add_column("#", justify="right")
    table.add_column("stage", no_wrap=True)
    for device in DEVICES:
        table.add_column(device, overflow="fold")
    for stage in stages:
        texts = []
        for device in DEVICES:
            reason = stage.unavailable[device]
            notes = [stage.modes[device]]
            notes += [
                f"no {dtype}" for dtype, why in stage.refused[device].items() if why is not None
            ]
            good = Text(", ".join(notes), style="green")
            texts.append(good if reason is None else Text(reason, style="yellow"))
        table.add_row(str(stage.number), stage.title, *texts)
    console.print(table)
    console.print()
    show_choices(console)


def show_choices(console: Console) -> None:
    """Print the launch configurations that stages have chosen here, and where they are kept."""
    try:
        from stages import autotune
    except ImportError:  # no torch: nothing was ever tuned
        return
    choices = autotune.read()
    where = literal(from_home(autotune.cache_file()))
    if not choices:
        console.print(Text("tuned: nothing yet, a kernel's first call on a GPU does (").append(
            where).append(")"), soft_wrap=True)  # fmt: skip
        return
    console.print(Text("tuned launch configurations, kept in ").append(where), soft_wrap=True)
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="underline")
    for header in ("kernel", "device", "dtype", "d", "mask"):
        table.add_column(header, justify="right" if header == "d" else "left")
    for header in SIZES.values():
        table.add_column(header, justify="right")
    table.add_column("M x N, warps, stages")
    for choice in sorted(choices, key=lambda c: [str(c.get(k)) for k in ("kernel", "device")]):
        config = choice.get("config")
        if not isinstance(config, dict):
            continue
        said = [config.get(name, "?") for name in TILE]
        dtype, precision = choice.get("dtype"), choice.get("precision")
        row = (
            choice.get("kernel"), choice.get("device"),
            f"{dtype} tf32" if precision == "tf32" else dtype, choice.get("d"),
            "causal" if choice.get("causal") else "", *map(choice.get, SIZES),
            "{} x {}, {}, {}".format(*said),
        )  # fmt: skip
        table.add_row(*(literal(value) for value in row))
    console.print(table)


def literal(value: object) -> Text:
    """`value` as it stands: anybody may have written the file, and what it says is no markup."""
    return Text("".join(c if c.isprintable() else "?" for c in str(value)))


def from_home(path: Path) -> str:
    """`path`, with a ~ for the user's home."""
    # who has no home, as in containers, has "~" for one; who has an empty one has "/"
    home = os.path.expanduser("~")  # noqa: PTH111
    if home != "/" and path.is_relative_to(home):
        return f"~/{path.relative_to(home)}"
    return str(path)
