"""A problem: everything that defines what a stage computes, as plain values. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

Inputs = Literal["normal", "peaky", "real"]
DType = Literal["float16", "bfloat16", "float32", "float64"]
Device = Literal["cpu", "cuda"]
Direction = Literal["fwd", "bwd", "train"]
INPUTS, DTYPES, DEVICES, DIRECTIONS = map(get_args, (Inputs, DType, Device, Direction))
PRECISIONS: Final = ("ieee", "tf32")
ITEMSIZE: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

REAL_D: Final = 32  # the head dimension of the captured model
SEED: Final = 20_260_101  # of all inputs, by default
YARDSTICK: Final = 3  # the stage that every other is compared with: our own with this number
YARDSTICK_NAME: Final = "torch_three_gemm"
PEERS_FROM: Final = 100  # from this number on, stages are peers: kernels of other projects
ONE_GPU: Final = "one_gpu"  # the peer that several GPUs are compared with: one, with all of it


@dataclass(frozen=True)
class Problem:
    """Attention of q (b, h, nq, d) over k, v (b, hk, nk, d), all made from one seed.

    `inputs` is 'normal', 'peaky' or 'real'; `precision` is 'ieee' or 'tf32' for float32 and the
    dtype's own name for any other; `seqlens_k` None or one valid key length per batch entry;
    `page_size` the keys per page of a paged cache, None where k and v are contiguous; `world` the
    number of processes, each with a GPU of its own, that compute it together. nq and nk are those
    of the whole sequence, of which each has a part.
    """

    inputs: str
    seed: int
    b: int
    h: int
    hk: int
    nq: int
    nk: int
    d: int
    dtype: str
    precision: str
    causal: bool
    seqlens_k: tuple[int, ...] | None
    device: str
    direction: str = "fwd"
    page_size: int | None = None
    world: int = 1

    def to_json(self) -> dict[str, Any]:
        """The fields as a dict for JSON."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Problem":
        """The problem from a dict that `to_json` wrote; other fields in it are ignored."""
        # a plan written before there were pages, or several GPUs, does not name them
        data = {"page_size": None, "world": 1, **data}
        fields = {name: data[name] for name in Problem.__dataclass_fields__}
        if fields["seqlens_k"] is not None:
            fields["seqlens_k"] = tuple(fields["seqlens_k"])
        return Problem(**fields)

    @property
    def options(self) -> tuple[str, ...]:
        """The options of a stage (stages/common/contract.py) that this problem needs."""
        needed = {
            "causal": self.causal,
            "seqlens_k": self.seqlens_k is not None,
            "gqa": self.hk != self.h,
            "paged": self.page_size is not None,
            "world": self.world > 1,
        }
        return tuple(name for name, wanted in needed.items() if wanted)
