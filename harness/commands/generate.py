"""`ladder generate`: its arguments, and what it shows."""

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
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
    open_results,
    refuse_others,
)
from harness.commands.options import UserError, integers
from harness.isolation.child import ChildFailed
from harness.isolation.roster import StageInfo, read_stages
from harness.problems.problem import PEERS_FROM
from harness.records import environment
from harness.records.schema import Record
from harness.training import generate
from harness.training.plan import make_problem
from harness.views import generated, table

CONTEXTS = {"cpu": "32,64,128,256", "cuda": "256,1024,4096"}
INTERPRETED_CONTEXTS, TOKENS, INTERPRETED_TOKENS = "16", 32, 4


def generate_command(
    given: typer.Context,
    stage: options.GenerateStage = None,
    tokens: options.NewTokens = None,
    context: options.Contexts = None,
    prompt: options.Prompt = "attention ",
    device: options.Device = None,
    load: options.Load = None,
    save: options.Save = None,
    out: options.Out = None,
    show: options.GenerateShow = None,
) -> int:
    """Write text with a small GPT, with and without a cache."""
    if show is not None:
        refuse_others(given, ("show",), "--show writes nothing")
        return finish(*open_results(show, "generate"), show)
    check_out(out)
    if save is not None and save.exists():
        raise UserError(f"--save: {save} is there already: name another")
    if load is not None and not load.is_file():
        raise UserError(f"--load: {load}: no such file")
    hide_gpus(device)
    chosen, device = choose(stage, device)
    interpreted = chosen.modes[device] == "interpreted"
    usual = INTERPRETED_CONTEXTS if interpreted else CONTEXTS[device]
    lengths = integers(context or usual, "--context", 1)
    if len(prompt) > min(lengths):
        raise UserError(
            f"--prompt: got {len(prompt)} characters, expected at most {min(lengths)}, the "
            "shortest context"
        )
    order = generate.Order(
        path=str(chosen.path), device=device, interpreted=interpreted, contexts=lengths,
        tokens=tokens or (INTERPRETED_TOKENS if interpreted else TOKENS), prompt=prompt,
        load=str(load) if load else None, save=str(save) if save else None,
    )  # fmt: skip
    arguments = {"command": "generate", "stage": chosen.name, "device": device, "prompt": prompt}
    plan = [{"stage": chosen.number, "name": chosen.name, "context": each} for each in lengths]
    env = environment.make_env(device, plan, [chosen.to_json()], arguments)
    said = {
        "stage": chosen.number, "name": chosen.name, "device": device,
        "mode": chosen.modes[device],
        "page_size": generate.PAGE_SIZE if "paged" in chosen.options else None,
    }  # fmt: skip
    out = out or default_out("generate")
    with create(out, env) as writer:
        try:
            for record in generate.run(order, said):
                writer.append(record)
        except generate.NoModel as error:
            raise UserError(f"generate: {error}") from None
        except ChildFailed as error:
            who = f"{chosen.number} {chosen.name}"
            print(f"ladder: {who} {error.status}: {error.reason}", file=sys.stderr)
            return 1
    return finish(*open_results(out, "generate"), out)


def choose(asked: str | None, device: str | None) -> tuple[StageInfo, str]:
    """The stage of --stage, 8 on a GPU and 3 on a CPU by default, and the device."""
    numbers, own = numbers_and_files([asked] if asked is not None else [])
    stages = [stage for stage in read_stages(own) if stage.number < PEERS_FROM]
    device = known_device(device, stages)
    if asked is None:
        numbers = [8 if device == "cuda" else 3]
    check_numbers(numbers, [stage.number for stage in stages], "--stage", "a file or one of")
    chosen = [stage for stage in stages if stage.number in numbers or stage.path in own]
    if len(chosen) != 1:
        raise UserError(f"--stage: got {asked}, expected one stage's number or file")
    problem = make_problem("tiny", "float32", device)
    if reason := chosen[0].why_skip(generate.replace(problem, direction="fwd")):
        raise UserError(f"--stage: {chosen[0].number} {chosen[0].name}: {reason}")
    return chosen[0], device


def finish(env: Record, records: Sequence[Record], path: Path) -> int:
    """Print the table and the text, draw the plot; 1 where a text differs without the cache."""
    if not records:
        raise UserError(f"{path}: no record in it: nothing was written to its end")
    page = table.page()
    page.print(generated.make_table(env, records))
    page.print(Text(f"written: {records[-1]['text']!r}"), soft_wrap=True)
    page.print(Text(f"records: {path}"), soft_wrap=True)
    picture = path.with_name(f"{path.stem}-plots") / "generate.png"
    try:
        generated.plot(records, picture)
        page.print(Text(f"plot:    {picture}"), soft_wrap=True)
    except (ImportError, OSError) as error:
        page.print(Text(f"no plot: {error}"), soft_wrap=True)
    return int(not all(record["same"] for record in records))
