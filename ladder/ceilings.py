"""`ladder ceilings`: measure the highest rates of this machine."""

from dataclasses import asdict

from harness.records import units
from harness.runs import ceilings
from harness.views import machine
from ladder import measuring, options, show
from ladder.arguments import stages_and_device


def ceilings_command(device: options.Device = None, out: options.Out = None) -> int:
    """Measure this machine's best: matrix products, copies, reading."""
    measuring.check_out(out)
    _, device = stages_and_device(device)
    wanted = ceilings.plan(device)
    progress = measuring.Progress(len(wanted))

    arguments = {"command": "ceilings", "device": device}
    with measuring.begin("ceilings-", out, device, arguments) as writer:
        with measuring.ended_early() as errors, progress:
            for ceiling, found in zip(wanted, ceilings.measure_ceilings(wanted)):
                if isinstance(found, str):
                    result = f"failed: {found}"
                else:
                    writer.append(found)
                    result = units.show_rate(found["value"], found["unit"])
                progress.finished(machine.ceiling_title(asdict(ceiling)), result)
        env, records = measuring.open_results(writer.path, "ceiling")
        show.finish(writer.path, env, records)
        return measuring.exit_code(errors, len(records) < len(wanted))
