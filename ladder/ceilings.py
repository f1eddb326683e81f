"""`ladder ceilings`: measure the highest rates of this machine."""

from dataclasses import asdict

from harness.records import units
from harness.runs import ceilings
from harness.views import machine
from harness.views.table import make_page
from ladder import options
from ladder.arguments import stages_and_device
from ladder.measuring import (
    Progress,
    begin,
    check_out,
    ended_early,
    exit_code,
    note,
    open_results,
)


def ceilings_command(device: options.Device = None, out: options.Out = None) -> int:
    """Measure this machine's best: matrix products, copies, reading."""
    check_out(out)
    _, device = stages_and_device(device)
    wanted = ceilings.plan(device)
    progress = Progress(len(wanted))

    arguments = {"command": "ceilings", "device": device}
    with begin("ceilings-", out, device, arguments) as writer:
        with ended_early() as errors, progress:
            for ceiling, found in zip(wanted, ceilings.measure_ceilings(wanted)):
                if isinstance(found, str):
                    result = f"failed: {found}"
                else:
                    writer.append(found)
                    result = units.show_rate(found["value"], found["unit"])
                progress.finished(machine.ceiling_title(asdict(ceiling)), result)
        env, records = open_results(writer.path, "ceiling")
        machine.show_ceilings(env, records, make_page())
        note("records", writer.path)
        return exit_code(errors, len(records) < len(wanted))
