"""`ladder model`: its arguments, what it says on the way, and its tables."""

import sys

from rich.console import Console
from rich.text import Text

from harness.commands import options
from harness.commands.arguments import (
    check_numbers,
    check_out,
    create,
    default_out,
    hide_gpus,
    known_device,
    numbers_and_files,
    show_printed,
)
from harness.commands.options import UserError, long_dtype
from harness.isolation.roster import read_stages
from harness.minilm import run as model_run
from harness.minilm import weights as model_weights
from harness.records import environment
from harness.records.schema import FAILURES, Record
from harness.records.units import show_time
from harness.runs.plan import default_memory
from harness.views import table, training


def model_command(
    stage: options.StageOrFile,
    device: options.Device = None,
    dtype: options.ModelDtype = "float32",
    text: options.TextFile = None,
    weights: options.Weights = None,
    out: options.Out = None,
) -> int:
    """Put a stage into a real model, MiniLM, as its attention."""
    dtype = long_dtype(dtype)
    numbers, own = numbers_and_files(stage)
    check_out(out)
    if text is not None and weights is not None:
        raise UserError("--text: got --weights too, whose file has our texts and no tokenizer")
    hide_gpus(device)
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
            time = show_time(record["time_ms"])
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
