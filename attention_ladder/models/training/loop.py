"""Train a GPT with one attention, seed after seed, in the process of one stage or backend.

Everything but the attention is the same for all: for one seed the same initial weights, the same
batches in the same order, the same optimiser and learning rates. On a GPU in bfloat16 the model is
float32 under torch.autocast, so that a stage gets bfloat16 q, k, v, as in usual training. The
parent process, which doesn't import torch, never imports this module.
"""

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import stages
from attention_ladder.models.training.gpt import GPT, Attend
from attention_ladder.models.training.plan import SHAPES, UNTIMED_STEPS, Shape
from harness.isolation.call import WrongOutput, blame, check_like
from harness.isolation.child import hear, say
from harness.measures.accuracy import set_precision
from harness.measures.timing import synchronize
from harness.problems.problem import Problem
from harness.records.files import whole
from stages.contract import StageUnavailable

TEXT = Path(__file__).parents[3] / "harness" / "data" / "train_text.txt"
HELD_OUT = 0.1  # of the text, its end: never trained on
VAL_BATCHES = 8  # of held-out text; no more than there were steps

WARM_UP = 0.1  # of the steps: the learning rate rises to its peak, then decays as a cosine
LAST_RATE = 0.1  # of the peak, at the last step
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # of matrices; norms and biases have none
MAX_NORM = 1.0  # the gradient is clipped to this norm

MOST_CHUNKS = 10  # messages with losses per seed, unless they would have more than MOST_LOSSES
MOST_LOSSES = 1000


def train_seeds(connection: Connection, order: dict[str, Any]) -> None:
    """Train with the stage in the file order['path'], or with the SDPA backend order['backend'].

    Sends 'ready' with the number of parameters; then for each {'seed'} several 'losses', which
    together have the loss of each step, and 'done' with the loss on held-out text. Or 'failed'. The
    first seed's model is kept in the file order['save'], if that is not None.
    """
    problem = Problem.from_json(order["problem"])
    try:
        torch.set_num_threads(1)  # timing.py says why
        set_precision("ieee")
        if order["path"] is None:
            attend = sdpa(order["backend"])
        else:
            module = stages.load(order["path"], sha256=order.get("sha256"))
            masked = "causal" in module.STAGE.options
            attend = checked(module.attend if masked else row_by_row(module.attend))
        run = Run(attend, SHAPES[order["size"]], order["steps"], problem.dtype, problem.device)
        parameters = sum(weight.numel() for weight in run.new_model(0).parameters())
        if order["path"] is None:
            refuse_early(run)
        say(connection, "ready", parameters=parameters)
        while True:
            seed = hear(connection)["seed"]
            for losses in run.train(seed):
                say(connection, "losses", losses=losses)
            unsaved = ""
            if path := order.pop("save", None):  # the first seed's alone
                try:
                    save(run.model, run.alphabet, path)
                except OSError as error:  # the disk's fault, not the stage's
                    unsaved = error.strerror or str(error)
            say(connection, "done", val_loss=run.val_loss, unsaved=unsaved)
    except BaseException as error:
        say(connection, "failed", **blame(error))


def save(model: GPT, alphabet: Sequence[str], path: str) -> None:
    """Keep a model and its characters in a file that `ladder generate --load` reads."""
    kept = {"shape": asdict(model.shape), "alphabet": "".join(alphabet)}
    data = io.BytesIO()  # torch's own writing doesn't say that a disk is full
    torch.save({**kept, "weights": model.state_dict()}, data)
    with whole(Path(path), new=True) as draft:
        draft.write_bytes(data.getvalue())


class Run:
    """Trains models of one `shape` for `steps` steps in `dtype`, their attention `attend`.

    They learn from `text`, that of the file TEXT unless another is given.
    After `train` has ended, `model` is trained, and `val_loss` is its loss on held-out text in nats
    per character.
    """

    def __init__(
        self, attend: Attend, shape: Shape, steps: int, dtype: str, device: str,
        text: str | None = None,
    ) -> None:  # fmt: skip
        self.attend, self.shape, self.steps, self.device = attend, shape, steps, device
        self.dtype = getattr(torch, dtype)
        text = text or TEXT.read_text(encoding="utf-8")
        self.alphabet = sorted(set(text))
        alphabet = {character: index for index, character in enumerate(self.alphabet)}
        ids = torch.tensor([alphabet[character] for character in text], device=device)
        self.characters = len(alphabet)
        held_out = int(HELD_OUT * len(ids))
        self.text, self.held_out = ids[:-held_out], ids[-held_out:]
        self.val_loss: float | None = None

    def new_model(self, seed: int) -> GPT:
        """A model with the initial weights of `seed`: made on the CPU, the same on each device."""
        torch.manual_seed(seed)
        return GPT(self.characters, self.shape, self.attend).to(self.device)

    def train(self, seed: int) -> Iterator[list[float]]:
        """Train from `seed`; yields the losses of all steps in order, several at a time.

        UNTIMED_STEPS and the last one each end what is yielded: the parent times what lies between.
        Raises WrongOutput at a loss that is NaN or infinite, after yielding those before it.
        """
        model = self.model = self.new_model(seed)
        optimizer = self.make_optimizer(model)
        starts = self.draw(self.text, self.steps, seed)  # (steps, batch)
        losses = torch.zeros(self.steps, device=self.device)
        done, every = 0, min(MOST_LOSSES, max(1, self.steps // MOST_CHUNKS))
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.shape.lr * rate(step, self.steps)
            loss = self.loss(model, self.text, starts[step])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            # kept on the device: reading it now would make a GPU wait for Python at each step
            losses[step] = loss.detach()
            if step + 1 - done >= every or step + 1 in (UNTIMED_STEPS, self.steps):
                yield from finite(losses[done : step + 1].tolist(), done)
                done = step + 1
        self.val_loss = self.validate(model)

    def loss(self, model: GPT, text: Tensor, starts: Tensor) -> Tensor:
        """The model's loss () on the windows of `text` that begin at `starts` (batch,)."""
        offsets = torch.arange(self.shape.block + 1, device=self.device)
        window = text[starts[:, None] + offsets]  # (batch, block + 1)
        mixed = self.dtype != torch.float32
        with torch.autocast(self.device, dtype=self.dtype if mixed else None, enabled=mixed):
            loss: Tensor = model(window[:, :-1], window[:, 1:])
        return loss

    def draw(self, text: Tensor, count: int, seed: int) -> Tensor:
        """Draw where the windows of `count` batches begin, (count, batch), uniform over `text`."""
        generator = torch.Generator().manual_seed(seed)
        most = len(text) - self.shape.block
        starts = torch.randint(most, (count, self.shape.batch), generator=generator)
        return starts.to(self.device)

    @torch.no_grad()
    def validate(self, model: GPT) -> float:
        """The mean loss on held-out windows, the same ones for every seed, stage and backend."""
        batches = self.draw(self.held_out, min(VAL_BATCHES, self.steps), 0)
        losses = [self.loss(model, self.held_out, starts) for starts in batches]
        mean = float(torch.stack(losses).mean())
        if not math.isfinite(mean):
            raise WrongOutput(f"the loss on held-out text is {mean}")
        return mean

    def make_optimizer(self, model: GPT) -> torch.optim.Optimizer:
        """AdamW with weight decay on matrices alone."""
        groups = [
            {
                "params": [w for w in model.parameters() if w.dim() > 1],
                "weight_decay": WEIGHT_DECAY,
            },
            {"params": [w for w in model.parameters() if w.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, betas=BETAS, fused=self.device == "cuda")


def rate(step: int, steps: int) -> float:
    """The learning rate at `step` of `steps`, as a share of the peak: a ramp, then a cosine."""
    ramp = max(1, round(WARM_UP * steps))
    if step < ramp:
        return (step + 1) / ramp
    progress = (step - ramp) / max(1, steps - 1 - ramp)  # 0 ... 1
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2


def finite(losses: list[float], done: int) -> Iterator[list[float]]:
    """Yield `losses`, which follow step `done`, up to the first that isn't finite: WrongOutput."""
    good = list(itertools.takewhile(math.isfinite, losses))
    if good:
        yield good
    if len(good) < len(losses):
        raise WrongOutput(f"the loss is {losses[len(good)]} at step {done + len(good) + 1}")


def sdpa(backend: str) -> Attend:
    """torch's SDPA with one backend alone, such as 'FLASH_ATTENTION', called as a stage is."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.__members__[backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def refuse_early(run: Run) -> None:
    """Raise StageUnavailable where torch's own backend refuses a step of `run`.

    Which shapes, strides and dtypes a backend takes, forward and backward, depends on torch, cuDNN
    and the GPU: a refusal is no failure.
    """
    try:
        run.loss(run.new_model(0), run.text, run.draw(run.text, 1, 0)[0]).backward()
        synchronize(run.device)  # on a GPU errors appear at synchronisation
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        raise StageUnavailable(f"torch's backend does not take this problem: {why}") from error


def row_by_row(attend: Attend) -> Attend:
    """Make causal attention from a stage that takes no mask, by one call per query row.

    Row i gets the keys up to i and no others. There must be as many queries as keys.
    """

    def call(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        N = q.shape[2]
        assert causal and k.shape[2] == N, "a GPT asks for nothing else"
        rows = [attend(q[:, :, i - 1 : i], k[:, :, :i], v[:, :, :i]) for i in range(1, N + 1)]
        return torch.cat(rows, dim=2)

    return call


def checked(attend: Attend) -> Attend:
    """Make an `attend` that checks its output; WrongOutput where no model could train with it."""

    def call(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        o = attend(q, k, v, causal=causal)
        check_like(o, q)
        if q.requires_grad and not o.requires_grad:
            raise WrongOutput("returned an output that carries no gradient")
        return o

    return call
