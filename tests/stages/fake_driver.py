"""A Hopper GPU's driver that is not there: stage 9's whole way to a launch, which is noted.

A script of its own, since kernels are interpreted in the tests' process: for each line of stdin,
``[d, causal, lengths, train]`` in JSON or ``[..., file]``, it calls attend twice, stage 9's or the
file's, and goes back where `train` is 1; it prints a line, the list of the launches: the kernel,
its grid, and its arguments that are numbers, by name.

Kernels in Gluon are compiled as far as their launch depends on it: to shared memory and warps. What
comes after takes most of the time, and test_cubins.py looks at that.
"""

import json
import os
import sys
from types import SimpleNamespace

SHAPES = (2, 4, 300), (2, 2, 260)  # of q and of k and v, without d
LAUNCHES = []  # of the job


class Utils:
    """What Triton asks of a driver."""

    def load_binary(self, *_):
        return "module", "function", 168, 0, 1024  # registers, spills, threads

    def get_device_properties(self, _):
        return {"max_shared_mem": 232_448}


class Launcher:
    """Stands in for what a compiled kernel is launched by."""

    def __init__(self, src, metadata):
        self.kernel, self.names = src.fn.__name__, src.fn.arg_names

    def __call__(self, *args):
        named = dict(zip(self.names, args[-len(self.names) :], strict=True))
        numbers = {
            n: x
            for n, x in named.items()
            if isinstance(x, (bool, int, float)) and not n.endswith("_ptr")  # no addresses
        }
        LAUNCHES.append({"kernel": self.kernel, "grid": args[:3], **numbers})


class Driver:
    utils, launcher_cls = Utils(), Launcher

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def leave_out_machine_code(_=None, steps=None, *more):
    """Triton's hook: take the last of `steps` out of the compiler, where a kernel is in Gluon.

    Returns what tells the kernels so compiled from others, in caches.
    """
    if steps and "ttir" not in steps:  # which Triton's own language has
        steps["ptx"] = lambda module, metadata: metadata.setdefault("name", "unnamed")
        steps["cubin"] = lambda module, metadata: b""
    return "no machine code", "no machine code"


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before stages sets it: there is no GPU here
    os.environ["DISABLE_LLVM_OPT"] = "1"
    import torch
    import triton

    import stages
    from stages.common import inputs

    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.add_stages_inspection_hook = leave_out_machine_code
    inputs.why_not = inputs.why_not_dtype = lambda *_: None
    torch.cuda.is_current_stream_capturing = lambda: False
    gpu = SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_properties = lambda device: gpu
    for line in sys.stdin:
        d, causal, lengths, train, *path = json.loads(line)
        stage = stages.load(path[0]) if path else stages.by_number(9)
        q, k, v = (torch.zeros(*shape, d).bfloat16() for shape in (SHAPES[0], *SHAPES[1:] * 2))
        seqlens_k = torch.tensor([3, 200], dtype=torch.int32) if lengths else None
        for _ in range(2):
            leaves = [x.requires_grad_(bool(train)) for x in (q, k, v)]
            o = stage.attend(*leaves, causal=bool(causal), seqlens_k=seqlens_k)
            if train:
                torch.autograd.grad(o, leaves, torch.ones_like(o))
        print(json.dumps(LAUNCHES), flush=True)
        LAUNCHES.clear()
