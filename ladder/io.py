"""`ladder io`: its arguments, its run under the profiler, its table and plot."""

from dataclasses import replace
from pathlib import Path

from harness.runs import traffic
from harness.views import cell_tables, machine
from harness.views.table import make_page
from ladder import options, problems
from ladder.arguments import choose, stages_and_device, why_no_cuda
from ladder.measuring import (
    Progress,
    begin,
    check_out,
    draw,
    ended_early,
    exit_code,
    note,
    open_results,
)
from ladder.options import UserError


def io_command(
    stages: options.IoStages = "3,4,5",
    n: options.IoNs = "1024,4096",
    d: options.OneD = 64,
    b: options.B = 8,
    h: options.H = 12,
    dtype: options.Dtype = "float16",
    out: options.Out = None,
) -> int:
    """Count the bytes that stages move (needs a GPU and ncu)."""
    check_out(out)
    arguments = {"n": n, "d": d, "b": b, "h": h, "dtype": dtype}
    base = problems.make_base("cuda", dtype, d=d, b=b, h=h)
    sizes = dict.fromkeys(options.integers(1)(n, "--n"))
    measured = [replace(base, nq=size, nk=size) for size in sizes]
    known, _ = stages_and_device(None)
    if reason := why_no_cuda(known):
        raise UserError(f"io: a GPU is needed, but {reason}")
    chosen = choose(known, stages.split(","), "--stages", ())
    progress = Progress(len(measured) * len(chosen))

    kept = {"command": "io", **arguments}
    described = [stage.to_json() for stage in chosen]
    with begin("io-", out, "cuda", kept, described) as writer:
        with ended_early() as errors, progress:
            for problem in measured:
                for stage in chosen:
                    what, why = f"{stage.number} {stage.name}", stage.why_skip(problem)
                    if not why:
                        try:
                            writer.append(*traffic.profile(stage, problem))
                        except traffic.NoProfiler as error:
                            raise UserError(f"io: {error}") from None
                    progress.finished(what, f"skipped: {why}" if why else "ok")
        env, records = open_results(writer.path, "io")
        names, picture = cell_tables.titles(env), writer.path.with_suffix(".png")

        def plot() -> list[Path]:
            machine.plot_traffic(records, names, picture)
            return [picture]

        make_page().print(machine.traffic_table(records, names))
        note("records", writer.path)
        draw("plot", plot)
        return exit_code(errors, failed=False)
