"""Each variant of stage 6 is right, with masks and LSE: what is measured is one change, no bug."""

import ast
import importlib.util
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import make_variants
import pytest
import torch

import stages
from course.edits import texts_of


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    paths = make_variants.write(tmp_path_factory.mktemp("variants"))
    return {path.stem: stages.load(path) for path in paths}


def ask(stage, causal, lengths):
    """q, k and v; the output, the lse and the skipped blocks of `stage`."""
    generator = torch.Generator().manual_seed(3)
    tensors = [
        4 * torch.randn(2, heads, n, 16, generator=generator)
        for heads, n in ((4, 130), (2, 100), (2, 100))
    ]
    seqlens_k = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    options = {"causal": causal, "seqlens_k": seqlens_k}
    o, lse = stage.attend_with_lse(*tensors, **options)
    return *tensors, o, lse, stage.skipped_blocks(*tensors, **options)


@lru_cache
def ask_stage_6(causal, lengths):
    return ask(stages.by_number(6), causal, lengths)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no wheel of triton")
@pytest.mark.parametrize("name", make_variants.VARIANTS[6])
@pytest.mark.parametrize(("causal", "lengths"), [(False, None), (True, (0, 70)), (True, None)])
def test_a_variant_answers_as_stage_6_does(variants, name, causal, lengths):
    *_, o, lse, skipped = ask(variants[name], causal, lengths)
    q, k, v, want, want_lse, want_skipped = ask_stage_6(causal, lengths)
    # both are right to a few roundings of scores up to s_max: tests/stages hold stage 6 to float64
    scores = q @ k.repeat_interleave(2, dim=1).transpose(-2, -1) / 4
    bound = 16 * torch.finfo(torch.float32).eps * (1 + scores.abs().max())
    assert ((o - want).abs() <= bound * v.abs().max()).all()
    same = (lse == want_lse) | ((lse - want_lse).abs() <= bound)
    assert same.all()
    assert torch.equal(skipped, want_skipped)


def test_the_normalised_one_divides_once_per_row_and_tile_and_never_after():
    """As docs/walkthrough/5-triton-online.md says: stage 6 divides a row of acc at the end."""
    shipped, changed = (
        ast.parse(x)
        for texts in (texts_of(6), make_variants.variant("normalised"))
        for x in texts.values()
    )
    for tree, in_a_tile, at_the_end in ((shipped, 0, 1), (changed, 1, 0)):
        kernels = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
        for name, expected in (("visit_tiles", in_a_tile), ("attention_kernel", at_the_end)):
            found = [x for x in ast.walk(kernels[name]) if isinstance(x, ast.Div)]
            assert len(found) == expected, (name, expected)
    # what is divided by is a number a row, not one a probability
    assert "inverse = 1.0 / tl.where(l_i == 0.0, 1.0, l_i)" in ast.unparse(changed)


def test_a_file_in_the_folders_place_is_one_clear_line(tmp_path):
    place = tmp_path / "variants"
    place.write_text("mine")
    tool = str(Path(make_variants.__file__))
    done = subprocess.run([sys.executable, tool, str(place)], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"make_variants: {place}: ") and done.stderr.count("\n") == 1
    assert place.read_text() == "mine"


OF_8 = (*(f"parts_{n}" for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)), "query_heads")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no wheel of triton")
def test_the_variants_of_stage_8_differ_in_the_number_of_parts_alone(tmp_path):
    paths = make_variants.write(tmp_path, 8)
    assert tuple(path.stem for path in paths) == OF_8
    shipped = stages.by_number(8)
    q = torch.empty(1, 32, 1, 128, dtype=torch.float16)
    found = {path.stem: stages.load(path) for path in paths}
    # 64 tiles, on 132 multiprocessors; 8 key heads, and 32 of queries
    chosen = {name: module.plan(q, 8, 8192)[0] for name, module in found.items()}
    assert {name: chosen[name] for name in OF_8[:-1]} == {
        name: min(64, int(name.removeprefix("parts_"))) for name in OF_8[:-1]
    }
    assert chosen["query_heads"] == shipped.choose_splits(32, 64, 132)
    assert chosen["query_heads"] != shipped.choose_splits(8, 64, 132)
    q, k, v = (torch.randn(1, heads, n, 16) for heads, n in ((4, 2), (2, 700), (2, 700)))
    for name in ("parts_3", "query_heads"):
        module = found[name]
        splits = module.plan(q, 2, 700)[0]
        assert module.STAGE.name == name and "paged" not in module.STAGE.options
        want = shipped.forward(q, k, v, False, None, splits=splits)
        assert torch.equal(module.attend(q, k, v), want)
