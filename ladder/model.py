"""`ladder model`: its arguments, its progress, and its tables."""

from collections.abc import Sequence
from pathlib import Path

from attention_ladder.models.minilm import run as model_run
from attention_ladder.models.minilm import weights as model_weights
from harness.records.jsonl import Writer
from harness.records.schema import FAILURES, Record
from harness.records.units import show_time
from harness.runs.plan import default_memory
from ladder import measuring, options, show
from ladder.arguments import choose, numbers_and_files, stages_and_device
from ladder.options import UserError, long_dtype


def model_command(
    stage: options.OneStage,
    device: options.Device = None,
    dtype: options.ModelDtype = "float32",
    text: options.TextFile = None,
    weights: options.Weights = None,
    out: options.Out = None,
) -> int:
    """Put a stage into a real model, MiniLM, as its attention."""
    numbers, own = numbers_and_files(stage)
    measuring.check_out(out)
    try:
        return measure_model(numbers, own, device, long_dtype(dtype), text, weights, out)
    except model_weights.ModelError as error:
        raise UserError(str(error)) from None


def measure_model(
    numbers: Sequence[str], own: Sequence[Path], device: str | None, dtype: str, text: Path | None,
    weights: Path | None, out: Path | None,
) -> int:  # fmt: skip
    """Measure the stages in the model; returns the exit code. ModelError without a model."""
    version = model_weights.check_transformers()
    found = model_weights.packed_weights(weights) if weights else model_weights.package_weights()
    given = [model_weights.text_of(text)] if text is not None else None
    stages, device = stages_and_device(device, own)
    chosen = choose(stages, numbers, "--stage", own, "a file or ")
    cells = model_run.make_cells(
        chosen, given or model_weights.our_texts(found, device), dtype, device
    )
    arguments = {
        "stage": [info.name for info in chosen], "device": device, "dtype": dtype,
        "text": "ours" if text is None else "given",
        "weights": found.origin, "transformers": version,
    }  # fmt: skip
    described, plan = [info.to_json() for info in chosen], [cell.to_json() for cell in cells]
    opened: list[Writer] = []

    def create() -> Writer:
        opened.append(measuring.begin("model-", out, device, arguments, described, plan))
        return opened[0]

    def tell(record: Record, printed: str) -> None:
        what = f"{record['stage']} {record['name']}, {record['tokens']} tokens"
        result = f"{record['status']} {show_time(record['time_ms'])}"
        progress.finished(what, result, record["name"], printed)

    with measuring.Progress(len(cells)) as progress:
        model_run.run(cells, found, default_memory(), create, tell)
    env, records = measuring.open_results(opened[0].path, "model")
    show.finish(opened[0].path, env, records)
    return int(any(record["status"] in FAILURES for record in records))
