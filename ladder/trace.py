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
    causal: options.TraceCausal = "off",
    splits: options.TraceSplits = None,
    form: options.TraceFormat = "text",
) -> int:
    """Walk one query row through the online softmax by tiles."""
    # imports NumPy, for this command only
    from course.tracing import merge_views, trace_text
    from course.tracing.trace import make_trace

    whole(0, n - 1)(row, "--row")
    for option, value, most in (("--n", n, TEXT_N), ("--d", d, TEXT_D)):
        if form == "text" and value > most:
            raise UserError(
                f"{option}: got {value}, expected {most} or fewer as text; --format json takes more"
            )
    trace = make_trace(n, d, tile, row, inputs=inputs, seed=seed, causal=causal == "on")
    if splits is not None:
        print((merge_views.to_json if form == "json" else merge_views.to_text)(trace, splits))
    else:
        print((trace_text.to_json if form == "json" else trace_text.to_text)(trace))
    return 0
