"""`ladder trace`: trace one query row through the online softmax, tile by tile."""

from ladder import options
from ladder.options import UserError, whole

TEXT_N, TEXT_D = 64, 16  # larger ones are too long to read
SEED = 0  # with this seed the running max changes in some tiles only


def trace_command(
    n: options.TraceN = 8,
    tile: options.Tile = 2,
    row: options.TraceRow = 0,
    d: options.OneD = 4,
    seed: options.TraceSeed = SEED,
    inputs: options.Synthetic = "normal",
    causal: options.TraceCausal = False,
    form: options.TraceFormat = "text",
) -> int:
    """Walk one query row through the online softmax by tiles."""
    # imports NumPy, for this command only
    from course.lessons.trace import make_trace
    from course.lessons.trace_text import to_json, to_text

    whole(0, n - 1)(row, "--row")
    for option, value, most in (("--n", n, TEXT_N), ("--d", d, TEXT_D)):
        if form == "text" and value > most:
            raise UserError(
                f"{option}: got {value}, expected {most} or fewer as text; --format json takes more"
            )
    trace = make_trace(n, d, tile, row, inputs=inputs, seed=seed, causal=causal)
    print(to_json(trace) if form == "json" else to_text(trace))
    return 0
