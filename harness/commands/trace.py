"""`ladder trace`: one query row through the online softmax, tile by tile."""

from typing import Annotated

import typer

from harness.commands.options import MAX_D, MAX_SEED, UserError, one_of, whole

FORMATS = ("text", "json")
INPUTS = ("normal", "peaky")
MAX_N = 1024
TEXT_N, TEXT_D = 64, 16  # more than these nobody reads
SEED = 0  # with it the running max moves in some tiles and stays in others


def trace_command(
    n: Annotated[int, typer.Option(help="number of keys, and of queries")] = 8,
    tile: Annotated[int, typer.Option(help="keys a tile")] = 2,
    row: Annotated[int, typer.Option(help="the query row, 0 to n - 1")] = 0,
    d: Annotated[int, typer.Option(help="head dimension")] = 4,
    seed: Annotated[int, typer.Option(help="the one seed of q, k and v")] = SEED,
    inputs: Annotated[str, typer.Option(help="normal or peaky")] = "normal",
    causal: Annotated[bool, typer.Option("--causal", help="row i sees keys 0 to i only")] = False,
    form: Annotated[str, typer.Option("--format", help="text or json")] = "text",
) -> int:
    """Walk one query row through the online softmax by tiles."""
    # NumPy is loaded by who asks for this command alone
    from harness.lessons.trace_inputs import make_trace
    from harness.lessons.trace_text import to_json, to_text

    one_of(inputs, "--inputs", INPUTS)
    one_of(form, "--format", FORMATS)
    for option, value, most in (("--n", n, MAX_N), ("--tile", tile, MAX_N), ("--d", d, MAX_D)):
        whole(value, option, 1, most)
    whole(seed, "--seed", 0, MAX_SEED)
    whole(row, "--row", 0, n - 1)
    for option, value, most in (("--n", n, TEXT_N), ("--d", d, TEXT_D)):
        if form == "text" and value > most:
            raise UserError(
                f"{option}: got {value}, expected {most} or fewer as text; --format json takes more"
            )
    trace = make_trace(n, d, tile, row, inputs=inputs, seed=seed, causal=causal)
    print(to_json(trace) if form == "json" else to_text(trace))
    return 0
