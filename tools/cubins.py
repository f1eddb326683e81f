"""Compile a stage's kernel for a GPU that is not here, and read what the compiler says of it.

Triton decides on TRITON_INTERPRET when a kernel is defined, so this runs as a script of its own,
with interpretation off: for each line of stdin, ``[stage, kernel, d, dtype, sm, flags]`` in JSON,
it prints one, an object. A kernel with several configurations is asked for by ``..., flags, rows,
several]`` too; a stage in Gluon by ``[stage, "gluon", d, dtype, configuration, flags]``, where the
stage may be the path of a file or a folder.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from machine_code import (
    barrier_numbers,
    exponents,
    product_loops,
    reads_before_writes,
    register_budgets,
    unset_registers,
)

TYPES = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
# sm -> bytes of shared memory that a program may have there
SHARED_LIMIT = {
    75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376,
}  # fmt: skip
OPTIONS = "num_warps", "num_stages", "maxnreg"  # of a launch: no arguments of a kernel


def dump(cubin: bytes, what: str) -> str:
    """What the wheel's own cuobjdump prints of a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes a thread, from the cubin."""
    text = dump(cubin, "--dump-resource-usage")
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {name: int(found[name]) for name in ("REG", "STACK", "LOCAL")}


FLOAT32 = dict.fromkeys(("lse_ptr", "delta_ptr", "checked_ptr", "parts_ptr", "stats_ptr"), "*fp32")
INT32 = dict.fromkeys(("seqlens_ptr", "skipped_ptr", "table_ptr", "rows_ptr"), "*i32")
POINTERS = FLOAT32 | INT32
# what the flags of a kernel are where no mask is asked for, and where all are
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {
        "CAUSAL": False, "HAS_SEQLENS": False, "LSE": False, "COUNT": False, "EVEN_M": True,
        "SPLIT": True, "PAGE_SIZE": 0, "PDL": False, "REDO": False,
        "group": 1, "lse_ptr": None, "seqlens_ptr": None, "skipped_ptr": None,
        "table_ptr": None, "rows_ptr": None,
    },
    "masked": {
        "CAUSAL": True, "HAS_SEQLENS": True, "LSE": True, "COUNT": True, "EVEN_M": False,
        "SPLIT": False, "PAGE_SIZE": 16, "PDL": False, "REDO": False,
    },
}  # fmt: skip
FLAGS["redo"] = FLAGS["masked"] | {"REDO": True}  # float32 alone


def kernels(stage: str) -> dict[str, Any]:
    """name -> kernel of a stage's file, those with a launch configuration."""
    module = import_module(f"stages.{stage}")
    return {name: kernel for name, kernel in vars(module).items() if name.endswith("_kernel")}


def card_of(sm: int) -> Any:
    """A card of capability `sm`, as the stages' launch configurations ask for it."""
    from stages.common.fit import Card

    return Card(divmod(sm, 10), SHARED_LIMIT[sm], 132)


def launch_config(
    stage: str, kernel: str, d: int, dtype: str, precision: str, sm: int, *more: int
) -> dict[str, int]:
    """The configuration that `kernel` runs in untuned on `sm`; `more` for stage's launch_config."""
    import torch

    module, card = import_module(f"stages.{stage}"), card_of(sm)
    arguments = d, getattr(torch, dtype), precision
    if hasattr(module, "launch_configs") and not more:
        return dict(module.launch_configs(*arguments, card)[kernel])
    return dict(module.launch_config(*arguments, *more, card=card))


def compile_for(
    stage: str, name: str, d: int, dtype: str, sm: int, flags: str, *more: int
) -> dict[str, Any]:
    """Compile a stage's kernel for capability `sm`, as a launch on contiguous tensors would.

    `dtype` 'tf32' or 'bf16x6' is float32, multiplied so; `flags` is one of FLAGS.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    precision = "ieee"
    if dtype in ("tf32", "bf16x6"):
        dtype, precision = "float32", dtype
    config = launch_config(stage, name, d, dtype, precision, sm, *more)
    said = {"config": dict(config)}
    options = {key: config.pop(key) for key in OPTIONS if key in config}
    kernel = kernels(stage)[name]
    constants = {"PRECISION": precision, "EVEN_D": d == config["BLOCK_D"], **config, **FLAGS[flags]}
    if "delta_ptr" in kernel.arg_names:
        constants.pop("lse_ptr", None)  # the backward pass always has it
    signature, constexprs, attrs = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], constexprs[argument] = "constexpr", constants[argument]
        elif argument.endswith("_ptr"):
            signature[argument] = POINTERS.get(argument, TYPES[dtype])
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif re.fullmatch(r"stride_d?[qkvo]d", argument):
            signature[argument], constexprs[argument] = "constexpr", 1  # a launch specialises on 1
        else:
            signature[argument] = "fp32" if argument.endswith("scale") else "i32"
            # a launch specialises on multiples of 16: wider loads, and more of them in flight
            sizes = ("d", "Nq", "Nk") if flags == "plain" else ()
            if (argument.startswith("stride_") or argument in sizes) and d % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constexprs, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    # at one size, for one card: to disassemble takes as long as to compile
    made = d == 64 and (dtype == "float32" or sm == 80)
    in_place = stage == "s10_ring.merge_kernel"  # it writes where it reads
    sass = dump(compiled.asm["cubin"], "--dump-sass") if made or in_place else ""
    return {
        "stage": stage, "kernel": name, "d": d, "dtype": dtype, "precision": precision, "sm": sm,
        "flags": flags, "shared": compiled.metadata.shared, "tmem": compiled.metadata.tmem_size,
        "cubin_bytes": len(compiled.asm["cubin"]),
        "ptx_target": re.findall(r"\.target (\w+)", compiled.asm["ptx"])[0],
        "exponents": exponents(sass) if made else None,
        "reads_before_writes": in_place and reads_before_writes(sass),
        **said, **resources(compiled.asm["cubin"]),
    }  # fmt: skip


# no mask, a last tile, lengths, a causal mask that needs one masked tile, or more; and no dQ wanted
GLUON_FLAGS: dict[str, dict[str, Any]] = {
    "plain": {"CAUSAL": False, "HAS_SEQLENS": False, "MASKED_TILES": 0, "LSE": False},
    "ragged": {"CAUSAL": False, "HAS_SEQLENS": False, "MASKED_TILES": 1, "LSE": True},
    "lengths": {"CAUSAL": False, "HAS_SEQLENS": True, "MASKED_TILES": 1, "LSE": True},
    "causal": {"CAUSAL": True, "HAS_SEQLENS": False, "MASKED_TILES": 1, "LSE": True},
    "masked": {"CAUSAL": True, "HAS_SEQLENS": True, "MASKED_TILES": 2, "LSE": True},
    "keys": {"CAUSAL": False, "HAS_SEQLENS": False, "DQ": False},
}
GLUON_TYPES = {
    "lse_ptr": "*fp32", "sums_ptr": "*fp32", "seqlens_ptr": "*i32", "counter_ptr": "*i32",
    "qk_scale": "fp32", "scale": "fp32",
}  # fmt: skip


def find_module(stage: str) -> ModuleType:
    """A module of stages/ by its name, or the stage in any file, such as a variant's."""
    import stages

    return stages.load(stage) if os.sep in stage else import_module(f"stages.{stage}")


def gluon_kernel(module: Any, name: str, d: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A Gluon stage's kernel, its configuration `name` and its descriptors' (block, swizzle).

    'plan' is the configuration that the stage itself chooses at N = 4096 without a mask; 'BACKWARD'
    are those of its backward pass, above d = 128 'VALUES' and 'KEYS'; 'FIRST' is the one of the
    smallest kernel.
    """
    if name == "FIRST":
        rows = dict.fromkeys("qo", 64) | dict.fromkeys("kv", 128)
        descriptors = {x: ((1, 1, n, d), 128) for x, n in rows.items()}
        return module.attention_kernel, {"SLOTS": 2}, descriptors
    module = getattr(module, "launch", module)
    blocks: dict[str, Any]
    two_passes = getattr(module, "TWO_PASS", {}).get(d, {})
    if name in two_passes:
        config = two_passes[name] | module.REGISTERS | {"VALUES": name == "VALUES"}
        BLOCK_D, rows = d // config["PARTS"], config.pop("BLOCK_M")
        blocks = dict.fromkeys(("q", "do"), ((1, 1, rows, BLOCK_D), 128))
        blocks |= dict.fromkeys("kv", ((1, 1, 128, BLOCK_D), 128)) | {"rows": ((1, 1, 2, rows), 0)}
        blocks |= {"sums": ((16, 256), 0)}
        return module.two_pass_kernel, config, blocks
    if name != "BACKWARD":
        chosen = module.plan(d, False, 4096) if name == "plan" else getattr(module, name)
        config = chosen._asdict()
        config.pop("ctas")
        rows = dict.fromkeys("qo", 64) | dict.fromkeys("kv", config["BLOCK_N"])
        blocks = {x: ((1, 1, n, config["BLOCK_D"]), 128) for x, n in rows.items()}
        return module.attention_kernel, config, blocks
    rows, BLOCK_D, _ = module.backward_tile(d)
    config = module.BACKWARD[BLOCK_D] | module.REGISTERS | {"D": d}
    config.pop("BLOCK_M")
    blocks = dict.fromkeys(("q", "do"), ((1, 1, rows, BLOCK_D), 128))
    blocks |= dict.fromkeys("kv", ((1, 1, 128, BLOCK_D), 128))
    blocks |= {"rows": ((1, 1, 2, rows), 0), "sums": ((module.rows_of_sums(d), 256), 0)}
    return module.backward_kernel, config, blocks


def compile_gluon(stage: str, d: int, dtype: str, name: str, flags: str) -> dict[str, Any]:
    """Compile a Gluon stage's kernel for sm_90 in the configuration that it calls `name`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    module = find_module(stage)
    kernel, config, blocks = gluon_kernel(module, name, d)
    options = {"num_warps": 4, "maxnreg": config.pop("maxnreg", None)}
    constants = {"DQ": True, **config, **GLUON_FLAGS[flags]}
    constants["EDGE"] = flags in ("ragged", "lengths", "masked")
    for pointer, used in (("lse_ptr", "LSE"), ("seqlens_ptr", "HAS_SEQLENS")):
        if not constants.get(used):
            constants[pointer] = None
    signature, constexprs, attrs = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], constexprs[argument] = "constexpr", constants[argument]
        elif argument.endswith("_desc"):
            shape, swizzle = blocks[argument.removesuffix("_desc")]
            kind = TYPES[dtype][1:] if swizzle else "fp32"
            layout = NVMMASharedLayout(swizzle, 16 if swizzle else 32, rank=len(shape))
            signature[argument] = f"tensordesc<{kind}{list(shape)},{layout!r}>"
        else:
            gradient = argument in ("dk_ptr", "dv_ptr", "gradient_ptr")
            signature[argument] = TYPES[dtype] if gradient else GLUON_TYPES.get(argument, "i32")
            # of which a launch looks at alignment
            if gradient or argument in ("d", "sums_ptr"):
                attrs[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constexprs=constexprs, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin = compiled.asm["cubin"]
    shared = compiled.metadata.shared
    sass = dump(cubin, "--dump-sass")
    return {
        "shared": shared, "config": config, "loops": product_loops(sass),
        "unset": unset_registers(sass), "budgets": register_budgets(sass),
        "barriers": barrier_numbers(sass), "exponents": exponents(sass), **resources(cubin),
    }  # fmt: skip


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before stages sets it: there is no GPU here
    for line in sys.stdin:
        stage, name, *rest = json.loads(line)
        gluon = name == "gluon"
        report = compile_gluon(stage, *rest) if gluon else compile_for(stage, name, *rest)
        print(json.dumps(report), flush=True)
