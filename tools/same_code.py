"""Compare the machine code of every stage in Triton with what another checkout's compiles to.

    git worktree add ../before COMMIT
    python tools/same_code.py ../before [--note]

Needs Triton, but no GPU; takes some ten minutes. For each kernel of stages 4 to 9 and each
configuration below, a line says whether the instructions (the cubins' .text sections) and the
shared memory are the same, bit for bit: if so, an edit between the two changed no result, nor the
speed, but for what ptxas makes of the numbers of lines: it orders some instructions by them. Both
checkouts are compiled without those, and names of files, kernels and variables don't count either.
The exit code is 1 where something differs or is in one of the two only. With --note the records
under results/ that have the code of a stage before are given its code of now, where all of its
kernels are the same for the dtypes of the record, float32 in each way of multiplying it apart, for
the widths that stage 9 pads its d to, and for its passes: the pages don't call them edited since.
What launches stage 9's kernels is noted, too, if all its files outside stages 4 to 9 are the same,
and stage 9's launch.py. Stage 9 itself in 16 bits must launch them with the same grids and numbers
for each problem of the record; lines that are no `cell` don't say enough of theirs, but those of
loops in code need none. Else the host's side of stages 4 to 9 isn't compared, nor stage 9's
gradients in float32: after an edit to those --note is no answer. Records of the host's own times
are never noted.
"""

import argparse
import hashlib
import itertools
import json
import os
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
SITE = sysconfig.get_paths()["purelib"]
# where the kernels of stage 9 may be: now, and in checkouts before it was a folder
PLACES = {
    "forward": ("s09_gluon_hopper.launch", "s09_gluon_hopper"),
    "backward": ("s09_gluon_hopper.launch", "hopper_gradients"),
}
FORWARD = {
    (128, "TWO_CONSUMERS"): ("plain", "ragged", "lengths", "causal", "masked"),
    (64, "THREE_CONSUMERS"): ("plain", "ragged", "lengths", "causal", "masked"),
    (64, "THREE_CTAS"): ("causal", "masked"),
    (80, "D_80"): ("plain", "ragged", "lengths", "causal", "masked"),
    (96, "D_96"): ("plain", "ragged", "lengths", "causal", "masked"),
    (192, "D_192"): ("plain", "ragged", "lengths", "causal", "masked"),
    (256, "D_256"): ("plain", "ragged", "lengths", "causal", "masked"),
}
BACKWARD = ("plain", "keys", "causal", "lengths", "masked")
SMALL = ("preprocess", "plain"), ("preprocess", "keys"), ("postprocess", "plain")
WIDTHS = tuple(sorted({d for d, _ in FORWARD}))
FLOAT32 = ("float32", "tf32", "bf16x6")  # 'float32' is that of a CPU, and of old GPUs
TRITON = ("s04_triton_lite", "s05_triton_online", "s06_triton_flash2", "s07_triton_training",
          "s08_triton_split_kv")  # fmt: skip


def text_of(cubin: bytes) -> bytes:
    """The instructions of a cubin, an ELF file: its sections that are called .text.*"""
    [start], [size, count, names] = (
        struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HHH", cubin, 0x3A)
    )  # fmt: skip
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    table = headers[names][4]
    return b"".join(
        cubin[offset : offset + length]
        for name, *_, offset, length in headers
        if cubin[table + name :].startswith(b".text")
    )


def jobs() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(pass or stage, arguments): what to compile, without the names of one checkout."""
    for (d, config), kinds in FORWARD.items():
        yield from (("forward", (d, "bfloat16", config, flags)) for flags in kinds)
    for d in (64, 80, 96, 128):
        yield from (("backward", (d, "bfloat16", "", flags)) for flags in BACKWARD)
    for d, pass_ in ((192, "VALUES"), (192, "KEYS"), (256, "VALUES"), (256, "KEYS")):
        yield from (("backward", (d, "bfloat16", pass_, flags)) for flags in BACKWARD)
    for d in WIDTHS:
        yield from (("backward", (d, "bfloat16", *small)) for small in SMALL)
    for stage in TRITON:
        for d, dtype in ((64, "float16"), (128, "float16"), *((64, how) for how in FLOAT32)):
            yield from ((stage, (d, dtype, 90, flags)) for flags in ("plain", "masked"))


def compile_small(launch: Any, d: int, name: str, flags: str) -> None:
    """Compile what stage 9's backward pass launches before, or after, its main kernels."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launch.multiprocessors = lambda device: 132
    shape = 2, 16, 1024, d
    strides = torch.empty(shape, device="meta").stride()
    given = (shape, shape, torch.device("cpu"), False, False, flags != "keys")
    made = launch.backward_launches(*given, strides, strides, strides[:3])
    one = getattr(made, name)
    constants = {key: x for key, x in one.options.items() if key in one.kernel.arg_names}
    signature, attrs = {}, {}
    for index, argument in enumerate(one.kernel.arg_names):
        if argument.endswith(("_od", "_dod", "_dqd", "_lm")):
            constants[argument] = 1  # a launch specialises on 1
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument == "scale":
            signature[argument] = "fp32"
        else:
            wide = argument in ("lse_ptr", "rows_ptr", "sums_ptr")
            pointer = "*fp32" if wide else "*bf16"
            signature[argument] = pointer if argument.endswith("_ptr") else "i32"
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(one.kernel, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": one.options["num_warps"]}
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def digests() -> None:
    """Compile with the checkout that comes first in sys.path; a line of JSON for each kernel."""
    os.environ |= {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
    from importlib import import_module

    import cubins
    import triton

    import stages

    if Path(str(stages.__file__)).parent.parent != Path.cwd():
        raise SystemExit(f"same_code: got {stages.__file__}, expected it in {Path.cwd()}")
    compiled: list[Any] = []
    compile_ = triton.compile

    def noted(*args: Any, **options: Any) -> Any:
        compiled.append(compile_(*args, **options))
        return compiled[-1]

    triton.compile = noted

    def gluon(which: str, d: int, dtype: str, config: str, flags: str) -> bool:
        """Compile a kernel of stage 9, if the checkout has that configuration."""
        for place in PLACES[which]:
            try:
                module = import_module(f"stages.{place}")
            except ImportError:
                continue
            names = vars(module)
            if (config, flags) in SMALL:
                if "backward_launches" in names:
                    compile_small(module, d, config, flags)
                    return True
                continue
            for name in [config] if config else ["BACKWARD", "CONFIGS"]:
                if name in names or name in names.get("TWO_PASS", {}).get(d, ()):
                    # an older checkout's backward pass has d = 80 and 96 padded to 128
                    if which == "backward" and d in (80, 96) and "rows_of_sums" not in names:
                        return False
                    cubins.compile_gluon(place, d, dtype, name, flags)
                    return True
        return False

    split = Path("stages/common/products.py").exists()  # an older checkout has no such products
    for which, given in jobs():
        if "bf16x6" in given and not split:
            continue
        # delta_kernel has no configuration
        names = [""] if which in PLACES else [*{*cubins.kernels(which)} - {"delta_kernel"}]
        for name in sorted(names):
            if which not in PLACES:
                cubins.compile_for(which, name, *given)
            elif not gluon(which, *given):
                continue
            one = compiled.pop()
            code = hashlib.sha256(text_of(one.asm["cubin"])).hexdigest()[:16]
            what = f"{which} {name} {' '.join(map(str, given))}"
            print(json.dumps([" ".join(what.split()), f"{code} {one.metadata.shared}"]), flush=True)


def compiled_by(checkout: Path) -> dict[str, str]:
    """What `digests` prints for a checkout, by a process of its own."""
    # -S: where a checkout is installed in place, its `stages` would come before this one's
    paths = os.pathsep.join(map(str, (checkout, checkout / "tools", SITE)))
    done = subprocess.run(
        [sys.executable, "-S", "-P", str(Path(__file__).resolve()), "--digests"],
        stdout=subprocess.PIPE, text=True, check=False, cwd=checkout,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"same_code: {checkout}: compiling failed, as said above")
    return dict(json.loads(line) for line in done.stdout.splitlines())


class Code(NamedTuple):
    """The digests of all files behind a stage (harness/records/code.py).

    And of stage 9's launch.py and those outside stages 4 to 9.
    """

    whole: str
    rest: str


ASKED = """
import json
from harness.records import code as c
files = {c.number_of(x): x for x in c.built_in_files()}
files |= {int(x.stem[1:].partition("_")[0]): x for x in c.rank_peer_files()}
kernels = {f"s0{n}" for n in range(4, 10)}
def rest(x):
    launch = "s09_gluon_hopper/launch.py"
    others = sorted(
        y for y in c.behind(x) if c.part_of(y) not in kernels or y.as_posix().endswith(launch)
    )
    return " ".join(c.digest(y.read_bytes(), y.suffix == ".py") for y in others)
print(json.dumps({n: (c.code_of(x), rest(x)) for n, x in files.items()}))
"""


def codes_of(checkout: Path) -> dict[int, Code]:
    """The code behind each stage in a checkout, and behind what several ranks are compared with."""
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", ASKED], stdout=subprocess.PIPE, text=True, check=True,
        cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)},
    )  # fmt: skip
    return {int(number): Code(*code) for number, code in json.loads(done.stdout).items()}


LAUNCHED = """
import json, sys, torch
from stages.s09_gluon_hopper import launch as stage
stage.multiprocessors = lambda device: 132  # of an H100 and an H200
def of(launch):
    return launch.grid, launch.options
def said(b, h, hk, nq, nk, d, causal, lengths, gradients):
    q, k, on = (b, h, nq, d), (b, hk, nk, d), torch.device("cpu")
    config = stage.plan(d, causal, nk)
    launch, numbers = stage.forward_launch(
        q, k, torch.bfloat16, on, causal, lengths, gradients, config
    )
    all_of_it = [of(launch), numbers]
    if gradients:
        rows = torch.empty(q, device="meta").stride()
        made = stage.backward_launches(q, k, on, causal, lengths, True, rows, rows, rows[:3])
        all_of_it += [of(x) for x in (made.preprocess, *made.main, made.postprocess)]
        all_of_it += [made.of_rows, made.sizes, made.of_dq]
    return repr(all_of_it)
print(json.dumps([said(*x) for x in json.load(sys.stdin)]))
"""


def problem_of(cell: dict[str, Any]) -> tuple[Any, ...]:
    """What stage 9's launches depend on."""
    sizes = map(cell.get, ("b", "h", "hk", "nq", "nk", "d", "causal"))
    return *sizes, cell.get("seqlens_k") is not None, cell.get("direction") != "fwd"


def launched_in(checkout: Path, problems: list[tuple[Any, ...]]) -> list[Any]:
    """What stage 9 launches in a checkout for each of the problems; None in an older one."""
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", LAUNCHED], input=json.dumps(problems), cwd=checkout,
        stdout=subprocess.PIPE, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (checkout, SITE)))},
    )  # fmt: skip
    return [None] * len(problems) if done.returncode else json.loads(done.stdout)


def launched_alike(before: Path, now: Path, results: Path) -> set[tuple[Any, ...]]:
    """The problems of all records for which both checkouts launch the same of stage 9."""
    found = set()
    for path in sorted(results.glob("*/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            cell = json.loads(line)
            if of_launches(cell) and cell["kind"] == "cell":
                found.add(problem_of(cell))
    problems = sorted(found)
    both = zip(problems, launched_in(before, problems), launched_in(now, problems), strict=True)
    return {problem for problem, then, here in both if then is not None and then == here}


def of_launches(line: dict[str, Any]) -> bool:
    """Whether a line tells how long launches of stage 9 in 16 bits take."""
    in_16_bits = line.get("stage") == 9 and line.get("dtype") != "float32"
    return in_16_bits and line.get("kind") != "loop"  # which tells what its code is like


Kind = tuple[str, int, str]  # a dtype as `jobs` names it, one of WIDTHS, and one of PLACES


def kinds_of(cells: list[dict[str, Any]]) -> set[Kind]:
    """The kinds of a stage's cells: 16 bits are always 'float16', gradients are of both passes."""
    found = set()
    for cell in cells:
        dtype = cell.get("dtype") or "float16"
        if dtype == "float32" and cell.get("device") == "cuda":
            dtype = "tf32" if cell.get("precision") == "tf32" else "bf16x6"
        dtype = "float16" if dtype == "bfloat16" else dtype
        width = next(x for x in WIDTHS if (cell.get("d") or 64) <= x)
        passes = ("forward",) if cell.get("direction") == "fwd" else PLACES
        found |= {(dtype, width, which) for which in passes}
    return found


def same_kinds(before: dict[str, str], now: dict[str, str]) -> dict[int, set[Kind]]:
    """The kinds for which all that computes a stage's results is the same.

    That is its kernels, and those that it launches of other stages.
    """
    kernels_of = {int(stage[1:3]): {stage} for stage in TRITON}
    kernels_of[7] |= kernels_of[6]
    kernels_of[9] = {*PLACES} | kernels_of[7]
    found: dict[int, set[Kind]] = {}
    for number, own in kernels_of.items():
        of_kind: dict[Kind, list[bool]] = {}
        for what in {*before, *now}:
            which, *about = what.split()
            dtype = "float16" if "bfloat16" in about else about[2]
            # few rows of float32 go from stage 9 to stage 8
            if which in own or ((number, {which}) == (9, kernels_of[8]) and dtype != "float16"):
                passes = (which,) if which in PLACES else PLACES
                for kind in itertools.product([dtype], widths_of(which, about[0]), passes):
                    of_kind.setdefault(kind, []).append(before.get(what) == now.get(what))
        found[number] = {kind for kind, same in of_kind.items() if all(same)}
    return found


def widths_of(which: str, d: str) -> tuple[int, ...]:
    """The WIDTHS that a kernel computes: of stage 9 one."""
    return (int(d),) if which in PLACES else WIDTHS


def note(
    before: dict[int, Code], now: dict[int, Code], same: dict[int, set[Kind]],
    alike: set[tuple[Any, ...]], results: Path,
) -> list[str]:  # fmt: skip
    """Give the records in `results` the code of now for the stages that are the same.

    `same` has the kinds for which each stage is (`kinds_of`). What launches stage 9's kernels, such
    as stage 10, is the same where those are and all other files behind it. `alike` has the problems
    for which they are launched alike. Returns the names of the files that are changed.
    """
    changed = []
    both = {*before} & {*now}
    above = [n for n in both if n > 9 and before[n].rest == now[n].rest]
    same = same | dict.fromkeys(above, same.get(9, set()))
    for path in sorted(results.glob("*/*.jsonl")):
        first, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
        env = json.loads(first)
        cells = [json.loads(line) for line in rest]
        if any(cell.get("kind") == "host" for cell in cells):
            continue  # Python's own time, of which no kernel says anything
        for stage in env.get("rungs", []):
            number = stage["stage"]
            own = [cell for cell in cells if cell.get("stage") == number]
            known = number in both & {*same} and stage.get("code") == before[number].whole
            as_before = all(
                cell.get("kind") == "cell" and problem_of(cell) in alike
                for cell in own if of_launches(cell)
            )  # fmt: skip
            if known and as_before and kinds_of(own) <= same[number]:
                stage["code"] = now[number].whole
        line = json.dumps(env, allow_nan=False) + "\n"
        if line != first:
            path.write_text("".join([line, *rest]), encoding="utf-8")
            changed.append(f"{path.parent.name}/{path.name}")
    return changed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of the other commit")
    parser.add_argument("--note", action="store_true", help="write it into results/")
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.digests:
        digests()
        sys.exit()
    if given.before is None or not (given.before / "stages").is_dir():
        parser.error(f"got {given.before}, expected the folder of another checkout")
    with ThreadPoolExecutor() as pool:
        before, now = pool.map(compiled_by, (given.before.resolve(), ROOT))
    for what in dict.fromkeys((*now, *before)):
        same = "same" if before.get(what) == now.get(what) else "DIFFERS"
        print(f"{what:60} {same if what in before and what in now else 'in one only'}")
    if given.note:
        noted = same_kinds(before, now)
        codes = codes_of(given.before.resolve()), codes_of(ROOT)
        alike = launched_alike(given.before.resolve(), ROOT, ROOT / "results")
        print(*note(*codes, noted, alike, ROOT / "results"), sep="\n")
    sys.exit(before != now)
