"""`ladder io`: its arguments, its run under the profiler, its table and plot."""

from dataclasses import replace
from pathlib import Path

from harness.runs import traffic
from harness.views import cell_tables, machine
from ladder import measuring, options, problems, show
from ladder.arguments import choose, stages_and_device, why_no_cuda
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
    measuring.check_out(out)
    arguments = {"n": n, "d": d, "b": b, "h": h, "dtype": dtype}
    base = problems.make_base("cuda", dtype, d=d, b=b, h=h)
    sizes = dict.fromkeys(options.integers(1)(n, "--n"))
    measured = [replace(base, nq=size, nk=size) for size in sizes]
    known, _ = stages_and_device(None)
    if reason := why_no_cuda(known):
        raise UserError(f"io: a GPU is needed, but {reason}")
    chosen = choose(known, stages.split(","), "--stages", ())
    progress = measuring.Progress(len(measured) * len(chosen))

    kept = {"command": "io", **arguments}
    described = [stage.to_json() for stage in chosen]
    with measuring.begin("io-", out, "cuda", kept, described) as writer:
        with measuring.ended_early() as errors, progress:
            for problem in measured:
                for stage in chosen:
                    what, why = f"{stage.number} {stage.name}", stage.why_skip(problem)
                    if not why:
                        try:
                            writer.append(*traffic.profile(stage, problem))
                        except traffic.NoProfiler as error:
                            raise UserError(f"io: {error}") from None
                    progress.finished(what, f"skipped: {why}" if why else "ok")
        env, records = measuring.open_results(writer.path, "io")
        show.finish(writer.path, env, records)
        picture = writer.path.with_suffix(".png")

        def plot() -> list[Path]:
            machine.plot_traffic(records, cell_tables.titles(env), picture)
            return [picture]

        measuring.draw("plot", plot)
        return measuring.exit_code(errors, failed=False)
