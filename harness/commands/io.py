"""`ladder io`: its arguments, the run under the profiler, its table and plot."""

import sys
from dataclasses import replace

from rich.text import Text

from harness.commands import options
from harness.commands.arguments import (
    check_out,
    create,
    default_out,
    why_no_cuda,
)
from harness.commands.options import UserError, integers
from harness.commands.run import DEFAULTS, choose, make_problem
from harness.isolation.roster import read_stages
from harness.records import environment
from harness.records.schema import Record
from harness.runs import traffic
from harness.views import cell_tables, machine, table


def io_command(
    stages: options.IoStages = "3,4,5",
    n: options.IoN = "1024,4096",
    d: options.IoD = 64,
    b: options.IoB = 8,
    h: options.IoH = 12,
    dtype: options.Dtype = "float16",
    out: options.Out = None,
) -> int:
    """Count the bytes that stages move (needs a GPU and ncu)."""
    check_out(out)
    sizes = integers(n, "--n", 1)
    shape = {**DEFAULTS, "d": d, "b": b, "h": h, "dtype": dtype}
    base = make_problem(shape, "cuda")
    infos = read_stages()
    if reason := why_no_cuda(infos):
        raise UserError(f"io: a GPU is needed, but {reason}")
    chosen = choose(infos, stages, (), False)
    arguments = {"command": "io", "n": n, "d": d, "b": b, "h": h, "dtype": dtype}
    env = environment.make_env("cuda", [], [stage.to_json() for stage in chosen], arguments)
    path = out or default_out("io")
    records: list[Record] = []
    with create(path, env) as writer:
        for problem in (replace(base, nq=size, nk=size) for size in sizes):
            for stage in chosen:
                if why := stage.why_skip(problem):
                    print(f"{stage.number} {stage.name}: skipped: {why}", file=sys.stderr)
                    continue
                try:
                    found = list(traffic.profile(stage, problem))
                except traffic.NoProfiler as error:
                    raise UserError(f"io: {error}") from None
                writer.append(*found)
                records += found
    console = table.page()
    names = cell_tables.titles(env)
    console.print(machine.traffic_table(records, names))
    console.print(Text(f"records: {path}"), soft_wrap=True)
    try:
        picture = path.with_suffix(".png")
        machine.plot_traffic(records, names, picture)
        console.print(Text(f"plot:    {picture}"), soft_wrap=True)
    except ImportError as error:
        console.print(Text(f"no plot: {error}"), soft_wrap=True)
    return 0
