"""Write stage 6, 8 or 9 in other ways, each with one thing changed, so that it can be measured.

    python tools/make_variants.py build/variants
    ladder run --stages 6 --stage build/variants/grid_1d.py ... --n 4096 --paired
    python tools/make_variants.py build/parts --stage 8
    ladder bench --suite decode --stages 8 --stage build/parts/parts_1.py ...
    python tools/make_variants.py build/hopper --stage 9
    ladder bench --stages 9 --stage build/hopper/in_turn.py ... --dtype bfloat16 --n 1024,4096,16384

grid_1d        source 003's grid: one axis, each program works out its batch, head and q block; the
               q blocks of a head are neighbours, as on stage 6's axes, in source 004's order
grid_1d_heads  the same, but neighbours are heads, not q blocks of one head
normalised     acc is an average at each step (sources 002, 003), not divided once at the end:
               one division per row and tile, by which acc's row and p v's are multiplied
pointers       each element of a tile of K and V has a pointer, and all move at each step, as in
               stages 4 and 5; stage 6 moves one pointer per tile, its elements' offsets stay

Of stage 8, without its paged cache:

parts_N        the keys in N parts, or one for each tile, whatever the cost model says
query_heads    the cost model is told the query heads for the key heads: a known mistake elsewhere

Of stage 9, each without one of its ideas:

in_turn         S of a KV tile isn't begun before P V of the tile before is done
whole_sums      the row sums are added up across threads at every tile
launched        a CTA for each query tile, none stays
static          CTA i has tiles i, i + 132, ...: no counter says which is next
heads_first     neighbours are heads, not blocks of one head
two_consumers   for d = 64, too, as many consumers and as large tiles as for d = 128
past_the_end    consumers whose rows are all past Nq walk the KV tiles like the others
one_cta         for d = 64 and few keys, too, one CTA to a multiprocessor under a causal mask
by_column       the masks compare the index of each column
together        a warpgroup's warps wait for each other when they give back a slot of K or V
rescaled        acc is multiplied by its correction at every tile, d = 64 too
unguarded       nobody looks for NaN: one that is hidden from some rows spoils them
bare            a call is a launch: nothing is checked, and there are no gradients
two_kernels     gradients by stage 7's two kernels: seven products in two passes

A variant is the shipped file with some text replaced, each found exactly once: it can't fall behind
the stage unnoticed, and what it changes is all that it changes.
"""

import argparse
from pathlib import Path

STAGES = Path(__file__).parent.parent / "stages"
STAGE_6, STAGE_8 = STAGES / "s06_triton_flash2.py", STAGES / "s08_triton_split_kv.py"
STAGE_9 = STAGES / "s09_gluon_hopper.py"
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

BLOCKS = """    block, blocks = tl.program_id(0), tl.num_programs(0)
"""
DECODED = "b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)"


def one_axis(number: int, name: str, title: str, decode: str) -> dict[str, str]:
    """The substitutions for a grid of one axis that is decoded by the lines `decode`."""
    return {
        "number=6,": f"number={number},",
        'name="triton_flash2"': f'name="{name}"',
        'title="Triton Flash 2"': f'title="{title}"',
        BLOCKS: f"    blocks = tl.cdiv(Nq, BLOCK_M)\n{decode}",
        DECODED: "b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)",
        "    head = b * tl.num_programs(1) + h\n": "    head = head.to(tl.int64)\n",
        "    group, Nq, Nk, d, qk_scale,\n": "    H, group, Nq, Nk, d, qk_scale,\n",
        "            H // Hk, Nq, Nk, d,": "            H, H // Hk, Nq, Nk, d,",
        'grid = (triton.cdiv(Nq, config["BLOCK_M"]), H, B)': (
            'grid = (triton.cdiv(Nq, config["BLOCK_M"]) * H * B,)'
        ),
    }


CHOICE = "        splits = choose_splits(programs, tiles, busy, kv_bytes // part_bytes)\n"


def in_parts(number: int, name: str, title: str, choice: str) -> dict[str, str]:
    """The substitutions for stage 8 with another `choice` of how many parts."""
    return {
        "number=8,": f"number={number},",
        'name="triton_split_kv"': f'name="{name}"',
        'title="Triton split-KV"': f'title="{title}"',
        '"gqa", "paged")': '"gqa")',
        CHOICE: choice,
    }


VARIANTS: dict[str, dict[str, str]] = {
    "grid_1d": one_axis(
        61, "grid_1d", "Flash 2, 1D grid",
        "    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks\n",
    ),
    "grid_1d_heads": one_axis(
        62, "grid_1d_heads", "Flash 2, 1D, heads first",
        "    heads = tl.num_programs(0) // blocks\n"
        "    block, head = tl.program_id(0) // heads, tl.program_id(0) % heads\n",
    ),
    "normalised": {
        "number=6,": "number=63,",
        'name="triton_flash2"': 'name="normalised"',
        'title="Triton Flash 2"': 'title="Flash 2, normalised"',
        "        l_i = l_i * alpha + tl.sum(p, 1)\n": (
            "        past = l_i * alpha\n"
            "        l_i = past + tl.sum(p, 1)\n"
            "        inverse = 1.0 / tl.where(l_i == 0.0, 1.0, l_i)  # (BLOCK_M,)\n"
        ),
        "acc = acc * alpha[:, None]": "acc = acc * (past * inverse)[:, None]",
        "acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)": (
            "pv = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)\n"
            "        acc += pv * inverse[:, None]"
        ),
        "    acc = acc / l_i[:, None]\n": "",
    },
    "pointers": {
        "number=6,": "number=64,",
        'name="triton_flash2"': 'name="pointers"',
        'title="Triton Flash 2"': 'title="Flash 2, all pointers move"',
        "    for start_n in": (
            "    k_ptrs, v_ptrs = k_ptr + k_offs, v_ptr + v_offs  # (BLOCK_N, BLOCK_D) each\n"
            "    for start_n in"
        ),
        "        k_ptrs = k_ptr + k_offs\n        v_ptrs = v_ptr + v_offs\n": "",
        "k_ptr += BLOCK_N * stride_kn": "k_ptrs += BLOCK_N * stride_kn",
        "v_ptr += BLOCK_N * stride_vn": "v_ptrs += BLOCK_N * stride_vn",
    },
}  # fmt: skip
OF_STAGE_8 = {
    f"parts_{parts}": in_parts(
        80 + index, f"parts_{parts}", f"in {parts} parts", f"        splits = min({parts}, tiles)\n"
    )
    for index, parts in enumerate(PARTS)
} | {
    "query_heads": in_parts(
        95, "query_heads", "parts by query heads",
        CHOICE.replace("(programs,", "(programs * H // Hk,"),
    )
}  # fmt: skip


def hopper(number: int, name: str, changes: dict[str, str]) -> dict[str, str]:
    """The substitutions for a variant of stage 9."""
    return {
        "number=9,": f"number={number},",
        'name="gluon_hopper"': f'name="{name}"',
        'title="Gluon on Hopper"': f'title="Hopper, {name.replace("_", " ")}"',
        **changes,
    }


RESCALE = "        acc = rescale_if_needed(acc, alpha) if SLACK > 0 else rescale(acc, alpha)\n"
OF_STAGE_9: dict[str, dict[str, str]] = {
    "in_turn": hopper(91, "in_turn", {
        "        s = scores(q, k_ring.take(use + j), seen)  # (64, BLOCK_N)\n": "",
        "        s = warpgroup_mma_wait(1, deps=[s])  # the older of the two\n": (
            "        acc = warpgroup_mma_wait(0, deps=[acc])\n"
            "        v_ring.give_back(use + j - 1)\n"
            "        s = scores(q, k_ring.take(use + j), seen)\n"
            "        s = warpgroup_mma_wait(0, deps=[s])\n"
        ),
        "        acc = warpgroup_mma_wait(0, deps=[acc])\n"
        "        v_ring.give_back(use + j - 1)\n"
        + RESCALE: RESCALE,
    }),
    "whole_sums": hopper(92, "whole_sums", {
        "return gl.sum(gl.reshape(p, [64, p.shape[1] // 8, 8]), 1)": "return gl.sum(p, 1)",
        "l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None] + sums": (
            "l_i * alpha + sums"
        ),
        "gl.sum(l_i, 1)": "l_i",
    }),
    "launched": hopper(93, "launched", {
        "grid = min(config.ctas * multiprocessors(device), tiles)": "grid = tiles",
    }),
    "static": hopper(94, "static", {
        "        fetched = gl.atomic_add(counter_ptr, 1)\n": "",
        "        gl.store(counter_ptr, 0, mask=fetched == problem.tiles - 1)\n": "",
        "tile = fetched + gl.num_programs(0)": "tile += gl.num_programs(0)",
    }),
    "heads_first": hopper(95, "heads_first", {
        "section = min(H // Hk * (max(1, L2_BYTES // (4 * Nk * d)) if causal else 1), B * H)": (
            "section = B * H"
        ),
    }),
    "two_consumers": hopper(96, "two_consumers", {
        "    return THREE_CTAS if causal and Nk <= 1024 else THREE_CONSUMERS": (
            "    return TWO_CONSUMERS"
        ),
    }),
    "past_the_end": hopper(90, "past_the_end", {
        "problem.hidden(first_row, ": "problem.hidden(gl.minimum(first_row, Nq - 1), ",
    }),
    "one_cta": hopper(89, "one_cta", {
        "return THREE_CTAS if causal and Nk <= 1024 else THREE_CONSUMERS": "return THREE_CONSUMERS",
    }),
    "by_column": hopper(99, "by_column", {
        "gl.where(first[None, :, None] < left[:, None, :], eights": (
            "gl.where((first[None, :, None] + column[None, None, :]) < left[:, None, :], eights"
        ),
        "left = left[:, None] - column[None, :]  # (64, 8)": "left = left[:, None]",
    }),
    "together": hopper(88, "together", {
        "        k_ring.give_back(use + j)\n        if MASKED:\n": (
            "        barrier()\n        k_ring.give_back(use + j)\n        if MASKED:\n"
        ),
        "        v_ring.give_back(use + j - 1)\n" + RESCALE: (
            "        barrier()\n        v_ring.give_back(use + j - 1)\n" + RESCALE
        ),
    }),
    "rescaled": hopper(87, "rescaled", {
        "return 8.0 if BLOCK_D == 64 else 0.0": "return 0.0",
    }),
    "unguarded": hopper(97, "unguarded", {
        "GUARD: gl.constexpr = CAUSAL or HAS_SEQLENS": "GUARD: gl.constexpr = False",
    }),
    "bare": hopper(86, "bare", {
        "    if isinstance(q, torch.Tensor) and s07.autocasts(": (
            "    return forward(q, k, v, causal, seqlens_k)\n"
            "    if isinstance(q, torch.Tensor) and s07.autocasts("
        ),
    }),
    "two_kernels": hopper(98, "two_kernels", {
        "return hopper_gradients.backward(": "return s07.backward(",
        "from stages import hopper_gradients\n": "",
    }),
}  # fmt: skip


OF = {6: (STAGE_6, VARIANTS), 8: (STAGE_8, OF_STAGE_8), 9: (STAGE_9, OF_STAGE_9)}


def variant(name: str) -> str:
    """The text of a variant; ValueError where the stage no longer has a text that it replaces."""
    [(stage, pairs)] = [(stage, pairs[name]) for stage, pairs in OF.values() if name in pairs]
    text = stage.read_text(encoding="utf-8")
    for old, new in pairs.items():
        if text.count(old) != 1:
            raise ValueError(f"{name}: {text.count(old)} x in {stage.name}, expected 1: {old!r}")
        text = text.replace(old, new)
    return text


def write(folder: Path, number: int = 6) -> list[Path]:
    """Write every variant of stage 6, 8 or 9 to `folder`, and say where."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in OF[number][1]:
        path = folder / f"{name}.py"
        path.write_text(variant(name), encoding="utf-8")
        paths.append(path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, choices=tuple(OF), default=6)
    given = parser.parse_args()
    for written in write(given.folder, given.stage):
        print(written)
