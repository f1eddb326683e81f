"""`ladder model`: its arguments, what it says on the way, and its tables."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from harness.commands.options import (
    SHORT_DTYPES,
    UserError,
    check_numbers,
    check_out,
    create,
    default_out,
    known_device,
    numbers_and_files,
    one_of,
    settle_device,
)
from harness.commands.printed import show_printed
from harness.isolation.roster import read_stages
from harness.minilm import run as model_run
from harness.minilm import weights as model_weights
from harness.records import environment
from harness.records.schema import FAILURES, Record
from harness.runs.plan import default_memory
from harness.views import cell_tables, table, training


def model_command(
    stage: Annotated[
        list[str],
        typer.Option(help="the stage to put in: its number, or its file", metavar="N"),
    ],
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; cuda by default where there is a GPU")
    ] = None,
    dtype: Annotated[str, typer.Option(help=", ".join(model_run.DTYPES))] = "float32",
    text: Annotated[
        Path | None, typer.Option(help="a text, its first 512 tokens, instead of ours")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="the model from a file that tools/pack_model_weights.py made"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="where the records go; a new file under runs/ by default")
    ] = None,
) -> int:
    """Put a stage into a real model, MiniLM, as its attention."""
    dtype = one_of(SHORT_DTYPES.get(dtype, dtype), "--dtype", model_run.DTYPES)
    numbers, own = numbers_and_files(stage)
    check_out(out)
    if text is not None and weights is not None:
        raise UserError("--text: got --weights too, whose file has our texts and no tokenizer")
    device = settle_device(device)
    try:
        version = model_weights.check_transformers()
        found = (
            model_weights.packed_weights(weights) if weights else model_weights.package_weights()
        )
        given = [model_weights.text_of(text)] if text is not None else None
        stages = read_stages(own)
        device = known_device(device, stages)
        known = [info.number for info in stages]
        check_numbers(numbers, known, "--stage", "a file or some of")
        chosen = [info for info in stages if info.number in numbers or info.path in own]
        texts = given or model_weights.our_texts(found, device)
        cells = model_run.make_cells(chosen, texts, dtype, device)
        env = environment.make_env(
            device,
            [cell.to_json() for cell in cells],
            [info.to_json() for info in chosen],
            {
                "stage": [info.name for info in chosen], "device": device, "dtype": dtype,
                "text": "ours" if text is None else "given",
                "weights": found.origin, "transformers": version,
            },
        )  # fmt: skip
        out = out or default_out("model")
        console = Console(stderr=True)

        def tell(record: Record, printed: str) -> None:
            what = f"{record['stage']} {record['name']}, {record['tokens']} tokens"
            time = cell_tables.show_time(record["time_ms"])
            print(f"{what}: {record['status']} {time}", file=sys.stderr, flush=True)
            show_printed(console, record["name"], printed)

        memory = default_memory(environment.memory_bytes())
        records = model_run.run(cells, found, memory, lambda: create(out, env), tell)
    except model_weights.ModelError as error:
        raise UserError(str(error)) from None
    page = table.page()
    page.print(training.model_tables(env, records))
    page.print(Text(f"records: {out}"), soft_wrap=True)
    return 1 if any(record["status"] in FAILURES for record in records) else 0
