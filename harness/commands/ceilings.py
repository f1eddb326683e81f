"""`ladder ceilings`: what this machine does at its best, measured."""

import sys
from dataclasses import asdict

from rich.text import Text

from harness.commands import options
from harness.commands.arguments import check_out, create, default_out, hide_gpus
from harness.commands.options import UserError
from harness.isolation.child import ChildFailed
from harness.records import environment, units
from harness.runs import ceilings
from harness.views import machine, table


def ceilings_command(device: options.Device = None, out: options.Out = None) -> int:
    """Measure this machine's best: matrix products, copies, reading."""
    check_out(out)
    hide_gpus(device)
    try:
        reason = ceilings.why_no_gpu() if device != "cpu" else None
    except ChildFailed as error:
        reason = f"the GPU can't be asked: {error.reason}"
    if device == "cuda" and reason:
        raise UserError(f"--device: got cuda, but {reason}")
    device = device or ("cpu" if reason else "cuda")
    env = environment.make_env(device, [], [], {"command": "ceilings", "device": device})
    out = out or default_out("ceilings")
    writer = create(out, env)
    wanted = ceilings.plan(device)
    records = []
    with writer:
        for index, (ceiling, found) in enumerate(zip(wanted, ceilings.measure(wanted)), start=1):
            if isinstance(found, str):
                said = f"failed: {found}"
            else:
                writer.append(found)
                records.append(found)
                said = units.show_rate(found["value"], found["unit"])
            title = machine.ceiling_title(asdict(ceiling))
            print(f"[{index}/{len(wanted)}] {title}: {said}", file=sys.stderr, flush=True)
    console = table.page()
    machine.show_ceilings(env, records, console)
    console.print(Text(f"records: {out}"), soft_wrap=True)
    return int(len(records) < len(wanted))
