"""What runs on this machine and what doesn't, and why."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness import environment
from harness.problem import DEVICES
from harness.roster import Rung
from harness.table import YARDSTICK

PACKAGES = ("torch", "triton", "numpy", "matplotlib", "rich", "typer", "psutil")


def findings(rungs: Sequence[Rung]) -> list[tuple[Rung, str, str | None]]:
    """(rung, device, reason) for each rung and device; a reason of None: it runs there."""
    return [(rung, device, rung.unavailable[device]) for rung in rungs for device in DEVICES]


def healthy(rungs: Sequence[Rung]) -> bool:
    """Whether stage 3 runs on some device here: without it nothing can be compared."""
    return any(rung.number == YARDSTICK and reason is None for rung, _, reason in findings(rungs))


def show(rungs: Sequence[Rung], console: Console) -> None:
    """Print the machine, the versions, and what each rung can do here."""
    card = environment.gpu()
    console.print(Text("machine", style="bold"))
    console.print(
        f"  cpu     {environment.cpu_model()}, {environment.cores()} cores", highlight=False
    )
    console.print(f"  gpu     {f'{card[0]}, driver {card[1]}' if card else 'none found'}")
    versions = (f"{name} {environment.version(name) or 'missing'}" for name in PACKAGES)
    console.print(f"  python  {environment.platform.python_version()}; {', '.join(versions)}",
                  highlight=False, soft_wrap=True)  # fmt: skip
    console.print()
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="underline")
    table.add_column("#", justify="right")
    table.add_column("rung", no_wrap=True)
    for device in DEVICES:
        table.add_column(device, overflow="fold")
    for rung in rungs:
        texts = []
        for device in DEVICES:
            reason = rung.unavailable[device]
            notes = [rung.modes[device]]
            notes += [
                f"no {dtype}" for dtype, why in rung.refused[device].items() if why is not None
            ]
            good = Text(", ".join(notes), style="green")
            texts.append(good if reason is None else Text(reason, style="yellow"))
        table.add_row(str(rung.number), rung.title, *texts)
    console.print(table)
