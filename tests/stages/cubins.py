"""Compile a rung's kernel for a GPU that is not here, and read what the compiler says of it.

Triton decides on TRITON_INTERPRET when a kernel is defined, so this runs as a script of its own,
with interpretation off: ``python cubins.py s05_triton_online d dtype sm ...`` prints a line of
JSON a kernel.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}  # bytes a program


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes a thread, from the cubin, by the wheel's own cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {name: int(found[name]) for name in ("REG", "STACK", "LOCAL")}


def compile_for(stage: str, d: int, dtype: str, sm: int) -> dict[str, object]:
    """Compile `stage`'s kernel for capability `sm`, as a launch on contiguous tensors would.

    `dtype` 'tf32' is float32 with its dots in TF32.
    """
    import importlib

    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = importlib.import_module(f"stages.{stage}")
    precision = "ieee"
    if dtype == "tf32":
        dtype, precision = "float32", "tf32"
    config = module.launch_config(d, getattr(torch, dtype), precision)
    options = {key: config.pop(key) for key in ("num_warps", "num_stages")}
    pointer = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}[dtype]
    kernel = module.attention_kernel
    constants = {"PRECISION": precision, **config}
    signature, constexprs, attrs = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[name] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            signature[name], attrs[(index,)] = pointer, [["tt.divisibility", 16]]
        elif re.fullmatch(r"stride_[qkvo]d", name):
            signature[name], constexprs[name] = "constexpr", 1  # a launch specialises on 1
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
            # a launch specialises on multiples of 16: wider loads, and more of them in flight
            if (name.startswith("stride_") or name in ("d", "Nq", "Nk")) and d % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constexprs, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    return {
        "stage": stage, "d": d, "dtype": dtype, "precision": precision, "sm": sm,
        "shared": compiled.metadata.shared,
        "cubin_bytes": len(compiled.asm["cubin"]),
        "ptx_target": re.search(r"\.target (\w+)", compiled.asm["ptx"]).group(1),
        **resources(compiled.asm["cubin"]),
    }  # fmt: skip


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before stages sets it: there is no GPU here
    for job in sys.argv[1:]:
        stage, d, dtype, sm = job.split(",")
        print(json.dumps(compile_for(stage, int(d), dtype, int(sm))), flush=True)
