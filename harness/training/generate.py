"""`ladder generate`: the small GPT writes text with a stage, with and without a cache.

Without a cache each new token asks the model for all tokens before it again. With one, the keys and
values of each layer are kept, contiguous or (where the stage has `attend_paged`) in pages, and a
token asks for one query row. Both take the likeliest token each time, in float32.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.isolation.call import blame
from harness.isolation.child import ChildFailed, hear, say
from harness.isolation.session import Session, is_count, is_text, is_time, list_of, optional
from harness.problems import cost
from harness.problems.problem import Problem
from harness.records.schema import Record
from harness.training.loop import TEXT, Run
from harness.training.plan import DEFAULT_SIZES, DEFAULT_STEPS, SHAPES, Shape, make_problem

if TYPE_CHECKING:
    import torch

    from harness.training.gpt import GPT

PAGE_SIZE = 16
UNTIMED = 2  # tokens
LIMIT = 600.0  # seconds for the training, and for each context
WROTE = {"wrote": {"tokens": list_of(list_of(is_count)), "text": is_text,
                   "seconds": list_of(optional(is_time))}}  # fmt: skip
READY = dict.fromkeys(("parameters", *Shape.__dataclass_fields__), is_count) | {"lr": is_time}


class NoModel(Exception):
    """The model can't be trained, read or kept, or it does not know the text; says why."""


@dataclass(frozen=True)
class Order:
    """What is written: `tokens` after each of `contexts`, which end with `prompt`, by a stage.

    The model is trained, or read from the file `load`; and kept in the file `save`.
    """

    path: str
    device: str
    interpreted: bool
    contexts: Sequence[int]
    tokens: int
    prompt: str
    load: str | None
    save: str | None


def run(order: Order, said: Record) -> Iterator[Record]:
    """A record for each context; `said` has what they share.

    Raises NoModel where there is none to write with, ChildFailed where the stage fails.
    """
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        session = Session(write_texts, asdict(order), log=Path(folder) / "log", greeting=READY)
        with session:
            try:
                model = session.ready(LIMIT, "the model took more than {:g} s")
            except ChildFailed as error:
                raise NoModel(error.reason) from None
            for context in order.contexts:
                late = f"writing took more than {LIMIT:g} s"
                message = session.ask({"context": context}, WROTE, LIMIT, late)
                (plain, cached), seconds = message["tokens"], message["seconds"]
                timed = order.tokens - UNTIMED
                speeds = [None if each is None else timed / each for each in seconds]
                yield {
                    **said, "kind": "generate", "parameters": model["parameters"],
                    "context": context, "tokens": order.tokens, "text": message["text"],
                    "same": plain == cached, "tokens_per_s": speeds[0],
                    "cached_tokens_per_s": speeds[1],
                    "bytes_per_token": bytes_per_token(model, context, context),
                    "cached_bytes_per_token": bytes_per_token(model, 1, context),
                }  # fmt: skip


def bytes_per_token(model: Record, nq: int, nk: int) -> int:
    """Counted: the weights once, and in each layer q, k, v and o of `nq` rows and `nk` keys."""
    problem = replace(
        make_problem("tiny", "float32", "cpu"), b=1, h=model["heads"], hk=model["heads"],
        d=model["head_dim"], nq=nq, nk=nk, direction="fwd",
    )  # fmt: skip
    return int(4 * model["parameters"] + model["layers"] * cost.hbm_bytes(problem))


def write_texts(connection: Connection, order: Record) -> None:
    """In a child: say 'ready' with the model's shape, then 'wrote' for each {'context'} asked."""
    problem: Problem = make_problem("tiny", "float32", order["device"])
    try:
        import stages

        module = stages.load(order["path"])
        import torch

        from harness.measures.accuracy import set_precision

        torch.set_num_threads(1)  # timing.py says why
        set_precision("ieee")
        model, alphabet = load(order) if order["load"] else train(order)
        if order["save"]:
            kept = {"shape": asdict(model.shape), "alphabet": alphabet}
            torch.save({**kept, "weights": model.state_dict()}, order["save"])
        before = (TEXT.read_text(encoding="utf-8") + order["prompt"])[-max(order["contexts"]) :]
        if strange := sorted(set(before) - set(alphabet)):
            raise ValueError(f"{strange[0]!r} is none of the model's characters")
        parameters = sum(weight.numel() for weight in model.parameters())
        say(connection, "ready", parameters=parameters, **asdict(model.shape))
        while True:
            text = before[-hear(connection)["context"] :]
            ids = torch.tensor([[alphabet.index(c) for c in text]], device=order["device"])
            found = [write(model, module, ids, order, cached) for cached in (False, True)]
            tokens, seconds = [each[0] for each in found], [each[1] for each in found]
            written = "".join(alphabet[token] for token in tokens[1])
            say(connection, "wrote", tokens=tokens, seconds=seconds, text=written)
    except BaseException as error:
        say(connection, "failed", **blame(error, problem))


def train(order: Record) -> "tuple[GPT, str]":
    """A model with room for the longest context, trained with stage 3; and its characters."""
    import stages

    shape, block = SHAPES[DEFAULT_SIZES[order["device"]]], max(order["contexts"]) + order["tokens"]
    batch = max(1, shape.batch * shape.block // block)  # as many characters a step
    steps = DEFAULT_STEPS[order["device"]]
    run = Run(
        stages.by_number(3).attend, replace(shape, block=block, batch=batch), steps, "float32",
        order["device"],
    )  # fmt: skip
    for _ in run.train(0):
        pass
    return run.model, "".join(run.alphabet)


def load(order: Record) -> "tuple[GPT, str]":
    """The model in a file that was saved, and its characters. Raises ValueError on another file."""
    import torch

    from harness.training.gpt import GPT

    try:
        kept = torch.load(order["load"], map_location=order["device"], weights_only=True)
        model = GPT(len(kept["alphabet"]), Shape(**kept["shape"]), torch.add)  # no attention yet
        model.load_state_dict(kept["weights"])
    except Exception as error:
        raise ValueError(f"{order['load']}: no model that --save has written: {error}") from error
    if (needed := max(order["contexts"]) + order["tokens"]) > model.shape.block:
        raise ValueError(f"the model has {model.shape.block} positions, and {needed} are asked for")
    return model.to(order["device"]), kept["alphabet"]


class Cache:
    """One layer's keys and values, with room for `room` tokens; called in place of `attend`."""

    def __init__(self, module: ModuleType, shape: Shape, room: int, device: str) -> None:
        import torch

        self.module, self.length, self.pages = module, 0, None
        if "paged" in module.STAGE.options:
            self.pages = module.PagedCache(
                -(-room // PAGE_SIZE), PAGE_SIZE, shape.heads, shape.head_dim, torch.float32,
                device, sequences=1,
            )  # fmt: skip
        else:
            size = (1, shape.heads, room, shape.head_dim)
            self.k, self.v = (torch.empty(size, device=device) for _ in range(2))

    def __call__(self, q: Any, k: Any, v: Any, *, causal: bool) -> Any:
        """Keep k and v (1, H, n, d); the attention of q (1, H, n, d) to all that is kept."""
        first, self.length = self.length, self.length + k.shape[2]
        if self.pages is not None:
            self.pages.append(0, k[0], v[0])
            return self.module.attend_paged(q, self.pages, [0], causal=causal)
        self.k[:, :, first : self.length], self.v[:, :, first : self.length] = k, v
        kept = (x[:, :, : self.length] for x in (self.k, self.v))
        return self.module.attend(q, *kept, causal=causal)


def write(
    model: "GPT", module: ModuleType, ids: "torch.Tensor", order: Record, cached: bool
) -> tuple[list[int], float | None]:
    """The tokens that follow `ids` (1, N), and the seconds of those after the first two.

    The first fills the cache, the second may compile. None: interpreted, which is no speed.
    """
    import torch

    layers: Any = model.layers
    for layer in layers:
        room = ids.shape[1] + order["tokens"]
        cache = Cache(module, model.shape, room, order["device"])
        layer.attention.attend = cache if cached else module.attend
    given, first, begun = ids, 0, 0.0
    new: list[torch.Tensor] = []
    with torch.no_grad():
        for _ in range(order["tokens"]):
            if len(new) == UNTIMED:
                new[-1].item()  # waits for the device
                begun = time.perf_counter()
            new.append(model.logits(given, first)[:, -1].argmax(-1, keepdim=True))  # (1, 1)
            ids = torch.cat([ids, new[-1]], 1)
            first = ids.shape[1] - 1 if cached else 0
            given = ids[:, first:]
        tokens = torch.cat(new, 1)[0].tolist()
    return tokens, None if order["interpreted"] else time.perf_counter() - begun
