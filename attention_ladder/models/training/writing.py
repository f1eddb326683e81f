"""Generate text with the small GPT and a stage, in float32, in the process of `ladder generate`.

Without a cache, the model computes all previous tokens again for each new token. With a cache, the
keys and values of each layer are kept, contiguous or (where the stage has `attend_paged`) in pages,
and each token needs one query row only. All take the most likely token each time.

On a GPU and with pages, a CUDA graph may compute the tokens after the first two: what they are
computed from lies on the GPU, and at each replay Python does nothing but count (`Step`).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import stages
from attention_ladder.models.training import plan
from attention_ladder.models.training.gpt import GPT
from attention_ladder.models.training.loop import TEXT, Run, save
from harness.isolation.call import blame
from harness.isolation.child import hear, say
from harness.measures.accuracy import set_precision
from harness.problems.problem import YARDSTICK


def write_texts(connection: Connection, order: dict[str, Any]) -> None:
    """Send 'ready' with the size of the model; then the text for each 'context' that is asked for.

    Asked is {'context', 'cached', 'graph'}: with a cache or without, by replays of a graph or not.
    Each token is a message 'wrote', and an answer asks for the next one: the parent times them.

    `order`: the stage's file 'path'; 'device'; 'contexts'; the 'prompt' at the end of each context;
    the number of 'tokens'; the files to 'load' the model from and to 'save' it in, or None.
    """
    device, longest, count = order["device"], max(order["contexts"]), order["tokens"]
    try:
        torch.set_num_threads(1)  # timing.py says why
        set_precision("ieee")
        module = stages.load(order["path"], sha256=order.get("sha256"))
        model, alphabet = load(order["load"]) if order["load"] else train(longest + count, device)
        if (room := model.shape.block) < longest + count:
            raise ValueError(
                f"the model has {room} positions, and {longest + count} are asked for: "
                "--context and --tokens say how many"
            )
        if order["save"]:
            save(model, alphabet, order["save"])
        before = (text_to_learn() + order["prompt"])[-longest:]
        if strange := sorted(set(before) - set(alphabet)):
            where = "--prompt: " * (strange[0] in order["prompt"])
            raise ValueError(f"{where}{strange[0]!r} is none of the model's characters")
        model, size = model.to(device), sum(weight.numel() for weight in model.parameters())
        say(connection, "ready", parameters=size, layers=len(model.layers), width=model.shape.width)
        while True:
            asked = hear(connection)
            text = before[-asked["context"] :]
            ids = torch.tensor([[alphabet.index(c) for c in text]], device=device)
            way = write if not asked["graph"] else replay
            for token in way(model, module, ids, count, asked["cached"]):
                say(connection, "wrote", token=alphabet[token])
                hear(connection)  # written ahead, tokens would take the time of reading messages
    except BaseException as error:
        say(connection, "failed", **blame(error))


def text_to_learn() -> str:
    """The text of `ladder train` without indentation: else a small model writes spaces only."""
    return re.sub("\n +| {2,}", lambda gap: gap[0][0], TEXT.read_text(encoding="utf-8"))


def train(room: int, device: str) -> tuple[GPT, str]:
    """Train a model of `room` positions with stage 3; returns it and its characters."""
    shape = plan.SHAPES[plan.DEFAULT_SIZES[device]]
    batch = max(1, shape.batch * shape.block // room)  # as many characters per step
    shape, steps = replace(shape, block=room, batch=batch), plan.DEFAULT_STEPS[device]
    attend = stages.by_number(YARDSTICK).attend
    run = Run(attend, shape, steps, "float32", device, text_to_learn())
    list(run.train(0))
    return run.model, "".join(run.alphabet)


def load(path: str) -> tuple[GPT, str]:
    """Load a saved model; returns it and its characters. Raises ValueError on another file."""
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True)
        shape, alphabet = plan.Shape(**kept["shape"]), kept["alphabet"]
        model = GPT(len(alphabet), shape, torch.add)  # its attention is set later
        model.load_state_dict(kept["weights"])
    except Exception as error:
        raise ValueError(f"{path}: no model that --save has written") from error
    return model, alphabet


class Cache:
    """A cache of one layer's keys and values for `room` tokens; called in place of `attend`."""

    def __init__(self, module: ModuleType, shape: plan.Shape, room: int, device: Any) -> None:
        self.module, self.length = module, 0
        if "paged" in module.STAGE.options:
            sizes = (-(-room // plan.PAGE_SIZE), plan.PAGE_SIZE, shape.heads, shape.head_dim)
            self.pages = module.PagedCache(*sizes, torch.float32, device, sequences=1)
        else:
            self.kept = torch.empty(2, 1, shape.heads, room, shape.head_dim, device=device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Any:
        """Append k and v (1, H, n, d); returns the attention of q (1, H, n, d) to all keys kept."""
        if hasattr(self, "pages"):
            if k.shape[2] == 1:
                self.pages.append_many([0], k, v)
            else:
                self.pages.append(0, k[0], v[0])
            return self.module.attend_paged(q, self.pages, [0], causal=causal)
        first, self.length = self.length, self.length + k.shape[2]
        self.kept[:, :, :, first : self.length] = torch.stack((k, v))
        return self.module.attend(q, *self.kept[:, :, :, : self.length], causal=causal)


@torch.no_grad()
def write(model: GPT, module: ModuleType, ids: Tensor, count: int, cached: bool) -> Iterator[int]:
    """Generate `count` tokens after `ids` (1, N), each as soon as it can be read."""
    set_attention(model, module, ids, count, cached)
    first = 0
    for _ in range(count):
        token = model.logits(ids[:, first:], first)[:, -1].argmax(-1, keepdim=True)  # (1, 1)
        first = ids.shape[1] if cached else 0
        ids = torch.cat([ids, token], 1)
        yield int(token)  # waits for the device


def set_attention(
    model: GPT, module: ModuleType, ids: Tensor, count: int, cached: bool
) -> list[Cache]:
    """Have each layer attend by a stage, with a cache for `count` tokens after `ids`, or without.

    Returns the caches.
    """
    layers: Any = model.layers
    caches = [Cache(module, model.shape, ids.shape[1] + count, ids.device) for _ in layers]
    for layer, cache in zip(layers, caches, strict=True):
        layer.attention.attend = cache if cached else module.attend
    return caches


class Step:
    """A step of decoding: it has the device read a token and its position, and write the next ones.

    Called, it does so whatever was written before: a CUDA graph of it writes a token at each
    replay, as long as the caches have room (`advance`).
    """

    def __init__(self, model: GPT, caches: list[Cache], token: Tensor, position: int) -> None:
        self.model, self.caches = model, caches
        self.token = token  # (1, 1)
        self.position = torch.tensor([position], device=token.device)  # of that token

    def __call__(self) -> None:
        logits = self.model.logits(self.token, self.position)  # (1, 1, characters)
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position += 1

    def advance(self) -> None:
        """Before each replay: count its token in the lists that the host keeps of each cache."""
        for cache in self.caches:
            cache.pages.advance([0])


def capture(step: Step) -> Callable[[], None]:
    """Capture a step as a CUDA graph, which computes nothing yet; returns what replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def replay(
    model: GPT, module: ModuleType, ids: Tensor, count: int, cached: bool = True,
    capture: Callable[[Step], Callable[[], None]] = capture,
) -> Iterator[int]:  # fmt: skip
    """Generate as `write` does with a cache in pages; from the third token on by replays."""
    caches = set_attention(model, module, ids, count, cached)
    token = model.logits(ids)[:, -1].argmax(-1, keepdim=True)  # (1, 1)
    yield int(token)
    for cache in caches:
        cache.pages.reserve(0, count)
    step = Step(model, caches, token, ids.shape[1])
    if count > 1:
        step()  # compiles what the graph launches
        yield int(token)
    if count > 2:
        run = capture(step)
    for _ in range(count - 2):
        step.advance()
        run()
        yield int(token)
