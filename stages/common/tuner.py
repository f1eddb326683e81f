"""Find the fastest launch configuration of a kernel here: tried once, then kept on disk.

Triton's own autotuner needs a driver even where kernels are interpreted, times with a buffer of its
own (which the harness's memory meter would count as the stage's) and keeps its choices where nobody
looks. So a kernel's candidates are timed in turns at the first call of their kind, on the caller's
own tensors, and the choice goes to a small JSON file, which `ladder doctor` shows; the harness,
with one process per cell, doesn't tune again. Where nothing can be timed (in the interpreter, while
a CUDA graph is captured) the first candidate runs.
"""

import contextlib
import json
import os
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

Config = dict[str, int]  # BLOCK_M, ..., num_warps, num_stages: keyword arguments of a launch
Launch = Callable[[Config], None]

ROUNDS = 7
# the GPU is busy while Python launches: see harness/measures/timing.py
HEAD_START_CYCLES = 1_000_000

chosen: dict[tuple[Any, ...], Config] = {}  # of this process
latest: dict[str, Config] = {}  # kernel -> what `choose` last gave, for whoever keeps records


def cache_file() -> Path:
    """Return the folder of the choices: $LADDER_CACHE_DIR, else the user's cache folder.

    A variable that is empty counts as unset, so that nothing lands in the current folder.
    """
    if ours := os.environ.get("LADDER_CACHE_DIR"):
        return Path(ours) / "autotune.json"
    base = os.environ.get("XDG_CACHE_HOME") or home_cache()
    return Path(base) / "attention-ladder" / "autotune.json"


def home_cache() -> Path:
    """The cache folder in the user's home; for a user without one, as containers have, /tmp."""
    try:
        if os.name == "posix" and os.environ.get("HOME") == "":
            import pwd  # where Path.home() looks when HOME is unset; an empty one it takes for "/"

            return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache"
        return Path.home() / ".cache"
    except (RuntimeError, KeyError):
        return Path(tempfile.gettempdir())


def bucket(n: int) -> int:
    """The power of two that is at least `n`: sizes that share a choice."""
    return 1 << (n - 1).bit_length()


def choose(
    kernel: Any, candidates: Sequence[Config], launch: Launch, *,
    like: torch.Tensor, precision: str, d: int, causal: bool, n: int,
    heads: int | None = None, nq: int | None = None,
) -> Config:  # fmt: skip
    """Return the configuration to launch `kernel` with, one of `candidates`; noted in `latest`.

    kernel     the Triton kernel; a change of its source voids what was chosen for it
    candidates the safest first: the one that runs where nothing can be timed
    launch     runs the kernel with a configuration, its outputs the same for each
    like       q (B, H, Nq, d), on the device and of the dtype in question
    n          the number of keys
    heads      how many heads the grid has, all batch entries together; B H unless given
    nq         how many queries there are to each of them; Nq unless given
    Of the last three, sizes up to the same power of two share a choice.
    """
    B, H, Nq = like.shape[:3]
    kind = {
        "dtype": str(like.dtype).removeprefix("torch."),
        "precision": precision,
        "d": d,
        "causal": causal,
        "heads": bucket(B * H if heads is None else heads),
        "nq": bucket(Nq if nq is None else nq),
        "n": bucket(n),
    }
    config = look_up(kernel, candidates, launch, like.device, kind)
    latest[kernel.__name__] = config
    return config


def look_up(
    kernel: Any,
    candidates: Sequence[Config],
    launch: Launch,
    device: torch.device,
    kind: dict[str, Any],
) -> Config:
    """The choice for a `kind` of call: known to this process, found on disk, or made now."""
    if device.type != "cuda" or len(candidates) == 1:
        return candidates[0]
    key = (kernel, device.index, *kind.values())
    if key in chosen:
        return chosen[key]
    if torch.cuda.is_current_stream_capturing():
        return candidates[0]
    kept = {
        "kernel": kernel.__name__,
        "source": kernel.cache_key[:16],
        "device": torch.cuda.get_device_name(device),
        "triton": triton_version(),
        **kind,
    }
    for choice in read():
        if all(choice.get(name) == value for name, value in kept.items()):
            for config in candidates:  # it may be none of them: they have changed since
                if config == choice.get("config"):
                    chosen[key] = config
                    return config
    with torch.cuda.device(device):
        times = time_each(candidates, launch)
    best = min(times, key=lambda index: times[index])
    chosen[key] = candidates[best]
    tried = [{"config": candidates[i], "time_ms": round(ms, 5)} for i, ms in times.items()]
    keep(kept, kept | {"config": candidates[best], "time_ms": round(times[best], 5), "of": tried})
    return candidates[best]


def time_each(candidates: Sequence[Config], launch: Launch) -> dict[int, float]:
    """Index of each candidate that this GPU can launch -> median of its times in turns, ms."""
    from triton.runtime.errors import OutOfResources, PTXASError

    able, refusals = [], []
    for index, config in enumerate(candidates):
        try:
            launch(config)  # compiles
            able.append(index)
        except (OutOfResources, PTXASError) as error:  # too large for this GPU
            refusals.append(str(error))
    if not able:
        raise RuntimeError(f"none of {len(candidates)} configurations fits this GPU: {refusals[0]}")
    samples: dict[int, list[float]] = {index: [] for index in able}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(ROUNDS):
        for index in able:
            torch.cuda._sleep(HEAD_START_CYCLES)
            start.record()
            launch(candidates[index])
            end.record()
            end.synchronize()
            samples[index].append(start.elapsed_time(end))
    return {index: statistics.median(times) for index, times in samples.items()}


def triton_version() -> str:
    """Return Triton's version: with another compiler another configuration may be the fastest."""
    import triton

    return str(triton.__version__)


def read() -> list[dict[str, Any]]:
    """The choices kept on disk; none where there is no file, or one that isn't ours."""
    try:
        choices = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(choices, list):
        return []
    return [choice for choice in choices if isinstance(choice, dict)]


def keep(identity: dict[str, Any], choice: dict[str, Any]) -> None:
    """Write `choice` in place of any with the same `identity`; a failed write is no error.

    Choices that lack a field of `identity`, as those of older versions do, are dropped.
    """
    path = cache_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            ours = [choice for choice in read() if choice.keys() >= identity.keys()]
            others = [c for c in ours if any(c[k] != v for k, v in identity.items())]
            # whole or not at all: another process may be reading. A plain open, for the umask's
            # mode: tempfile's 0600 would hide the choices from all others who share the folder
            draft = path.with_name(f"{uuid.uuid4().hex}.draft")
            try:
                with draft.open("x", encoding="utf-8") as file:
                    json.dump([*others, choice], file, indent=1)
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, where the system has such locks."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+") as file:
        try:
            import fcntl
        except ImportError:  # Windows: the last one to write wins
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
