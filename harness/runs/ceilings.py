"""Measure the highest rates of a machine: matrix products, copies and reads, no attention.

The matrix rate is 2 n^3 FLOPs over the time of one product of two n x n matrices by torch. The
bandwidth is the bytes read and written over the time of one copy that is too large for the caches.
A GPU reads faster than it copies, so that reading has its own ceiling, the fastest of several
methods. Inputs are randn (a GPU multiplies zeros faster), the result is the median of the samples
of harness/measures/timing.py after a warm-up, and each ceiling is measured in its own process. On a
CPU they are measured with one thread, as stages are, and with all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from harness.isolation.child import ChildFailed, one_line
from harness.isolation.messages import Failed, tell
from harness.isolation.session import Session
from harness.problems.problem import ITEMSIZE
from harness.records import environment
from harness.records.schema import Record
from harness.records.values import Count, Time

GPU_SIDE, CPU_SIDE = 8192, 2048  # of the square matrices
GPU_DTYPES: Final = (
    ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "ieee"), ("float32", "tf32"),
)  # fmt: skip
CPU_DTYPES: Final = (("float32", "ieee"), ("float64", "float64"))
GPU_COPY: Final = 4 << 30  # bytes read, and as many written
GPU_READ: Final = 2 << 30  # bytes: the K and V of a large batch
CACHES: Final = 4  # a copy on a CPU reads this many times the last-level cache
LEAST_CPU_COPY: Final = 256 << 20  # bytes read, where the caches are small
USUAL_CACHE: Final = 32 << 20  # bytes, where the system doesn't say
WARM_UP_CALLS: Final = 3
SECONDS: Final = 1.0  # of sampling a ceiling, or longer, for at least:
LEAST_SAMPLES: Final = 5
LIMIT: Final = 300.0  # seconds for one ceiling; a slow core needs many for a product in float64
CPU_CACHES: Final = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Ceiling:
    """One ceiling to be measured.

    `what` 'matmul': two matrices of `size` x `size` in `dtype`, float32 as `precision` says;
    'copy': `size` bytes, half of them read and half written; 'read': `size` bytes, all read.
    `threads`: of the CPU, None on a GPU.
    """

    what: str
    device: str
    size: int
    dtype: str | None = None
    precision: str | None = None
    threads: int | None = None

    @property
    def work(self) -> int:
        """FLOPs of a product, a multiply and an add counting as two; otherwise bytes."""
        return 2 * self.size**3 if self.what == "matmul" else self.size

    def record(self, timing: "Done") -> Record:
        """Make its record (harness/records/schema.py: Ceiling), in TFLOP/s or TB/s."""
        return {
            "kind": "ceiling",
            **asdict(self),
            "value": self.work / (1e9 * timing.time_ms),
            "unit": "TFLOP/s" if self.what == "matmul" else "TB/s",
            **vars(timing),
        }


@dataclass(frozen=True)
class Done:
    """The message of a ceiling's process: its timing, and the fastest way to read."""

    time_ms: Time
    time_iqr_ms: float | None
    samples: Count
    how: str | None = None


def plan(device: str) -> list[Ceiling]:
    """The ceilings of a machine's GPU ('cuda') or CPU ('cpu')."""
    if device == "cuda":
        copy = Ceiling("copy", device, 2 * GPU_COPY)
        products = [Ceiling("matmul", device, GPU_SIDE, *dtype) for dtype in GPU_DTYPES]
        return [*products, copy, Ceiling("read", device, GPU_READ)]
    copied = max(LEAST_CPU_COPY, CACHES * (last_level_cache() or USUAL_CACHE))
    copied = min(copied, (environment.memory_bytes() or 8 * copied) // 8)
    ceilings = []
    for threads in sorted({1, environment.cores()}):
        ceilings += [
            Ceiling("matmul", device, CPU_SIDE, dtype, precision, threads)
            for dtype, precision in CPU_DTYPES
        ]
        ceilings.append(Ceiling("copy", device, 2 * copied, threads=threads))
    return ceilings


def last_level_cache(folder: Path = CPU_CACHES) -> int | None:
    """The bytes of all last-level caches together (Linux); None where they aren't known."""
    caches: dict[tuple[int, str], int] = {}  # (level, the CPUs that share it) -> bytes
    for cache in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, shared, size = (
                (cache / name).read_text().strip() for name in ("level", "shared_cpu_list", "size")
            )
            caches[int(level), shared] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    last = max((level for level, _ in caches), default=None)
    return sum(size for (level, _), size in caches.items() if level == last) or None


def measure_ceilings(
    ceilings: Sequence[Ceiling], seconds: float = SECONDS
) -> Iterator[Record | str]:
    """Measure each ceiling; yields its record, or the reason why it has none."""
    for ceiling in ceilings:
        with Session(gauge, ceiling, seconds, greeting=Done) as session:
            try:
                yield ceiling.record(session.ready(LIMIT, "took more than {:g} s"))
            except ChildFailed as error:
                yield error.reason


def gauge(connection: Connection, ceiling: Ceiling, seconds: float) -> None:
    """In a child: measure one ceiling. Sends 'done' with its timing, or 'failed'."""
    try:
        from harness.measures.timing import time_call, time_once

        if ceiling.what == "read":
            from harness.measures.bandwidth import fastest

            how, call = fastest(ceiling.size, ceiling.device)
        else:
            how, call = None, prepare(ceiling)
        for _ in range(WARM_UP_CALLS):
            _, once_ms = time_once(call, ceiling.device)
        seconds = max(seconds, 1e-3 * LEAST_SAMPLES * once_ms)
        timing = time_call(call, ceiling.device, seconds)
    except BaseException as error:
        tell(connection, Failed("crashed", one_line(error)))
        return
    tell(connection, Done(timing.median_ms, timing.iqr_ms, len(timing.samples_ms), how))


def prepare(ceiling: Ceiling) -> Callable[[], object]:
    """Make a ceiling's inputs, and return the call to be timed, which allocates nothing."""
    import torch

    from harness.measures.accuracy import set_precision

    if ceiling.what == "matmul":
        if ceiling.device == "cuda" and ceiling.dtype == "float32":
            set_precision(str(ceiling.precision))
        dtype = getattr(torch, str(ceiling.dtype))
        shape = (ceiling.size, ceiling.size)
        a, b = (torch.randn(shape, dtype=dtype, device=ceiling.device) for _ in range(2))
        product = torch.empty_like(a)

        def work() -> object:
            return torch.mm(a, b, out=product)

    else:
        elements = ceiling.size // 2 // ITEMSIZE["float32"]
        source = torch.randn(elements, dtype=torch.float32, device=ceiling.device)
        target = torch.empty_like(source)

        def work() -> object:
            return target.copy_(source)

    threads = ceiling.threads
    if threads is None:
        return work

    def call() -> object:
        torch.set_num_threads(threads)  # each time: torch's Timer sets one thread around its calls
        return work()

    return call
