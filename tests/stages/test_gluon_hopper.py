"""What stage 9 and its variants launch, and that Triton compiles each variant; no GPU is needed."""

import importlib.util
from types import SimpleNamespace

import make_variants
import pytest
import torch
from stage_checks import printed

import stages
from stages import s07_triton_training as s07

STAGE = stages.by_number(9)
B, H, HK, NQ, NK = 2, 4, 2, 300, 260

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no wheel of triton for this machine"
)


def launched(stage, d, causal, lengths=False):
    """The grid, the heads of a section and the constants of a forward pass, by name."""
    config = stage.launch.plan(d, causal, NK)
    kind = (B, H, NQ, d), (B, HK, NK, d), torch.bfloat16, torch.device("cpu"), causal, lengths
    found, numbers = stage.launch.forward_launch.__wrapped__(*kind, False, config)
    return {"grid": found.grid, "section": numbers[6], **found.options}


def test_the_multiprocessors_are_the_gpus(monkeypatch):
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert STAGE.launch.multiprocessors.__wrapped__(torch.device("cpu")) == 132


@pytest.mark.parametrize("multiprocessors", [3, 132])
@pytest.mark.parametrize(("d", "causal", "lengths"), [(128, False, False), (64, True, True)])
def test_a_launch_has_a_cta_for_each_place_and_heads_that_fit_the_cache(
    d, causal, lengths, multiprocessors, monkeypatch
):
    monkeypatch.setattr(STAGE.launch, "multiprocessors", lambda device: multiprocessors)
    config = STAGE.launch.plan(d, causal, NK)
    tiles = B * H * -(-NQ // (64 * config.CONSUMERS))
    assert launched(STAGE, d, causal, lengths) == {
        "grid": (min(multiprocessors * config.ctas, tiles),),
        "section": B * H if causal else H // HK,  # all K and V fit
        "CAUSAL": causal, "HAS_SEQLENS": lengths, "LSE": False, "MASKED_TILES": 2 if causal else 1,
        "num_warps": 4, "maxnreg": config.maxnreg,
        **dict(zip(config._fields[:-2], config, strict=False)),
    }  # fmt: skip


@pytest.mark.parametrize("multiprocessors", [3, 132])
@pytest.mark.parametrize(
    ("d", "BLOCK_M", "kernels"), [(128, 64, 1), (40, 128, 1), (90, 64, 1), (200, 64, 2)]
)
def test_a_backward_pass_has_a_cta_for_each_place_and_one_for_each_block_of_rows(
    d, BLOCK_M, kernels, multiprocessors, monkeypatch
):
    monkeypatch.setattr(STAGE.launch, "multiprocessors", lambda device: multiprocessors)
    kind = (B, H, NQ, d), (B, HK, NK, d), torch.device("cpu"), True, False, True
    strides = torch.empty(kind[0]).stride()
    found = STAGE.launch.backward_launches.__wrapped__(*kind, strides, strides, strides[:3])
    rows = -(-NQ // BLOCK_M), H, B
    assert found.preprocess.grid == found.postprocess.grid == rows
    assert found.preprocess.options["BLOCK_M"] == found.postprocess.options["BLOCK_M"] == BLOCK_M
    keys = min(multiprocessors, B * HK * -(-NK // 128))
    assert [launch.grid for launch in found.main] == [(keys,)] * kernels


@pytest.mark.parametrize("heads", [1, 2, 7, 40, 256])
def test_sections_are_alike_if_they_can_be_or_as_few_as_can_be(heads):
    for most in range(heads + 2):
        size = STAGE.launch.section_of(heads, most)
        assert 1 <= size <= max(1, most)
        alike = [x for x in range(max(1, most), most // 2, -1) if heads % x == 0]
        if alike:
            assert size == alike[0]
        else:
            assert -(-heads // size) == -(-heads // max(1, most))
            assert -(-heads // size) * (size - 1) < heads


@pytest.mark.slow
def test_each_variant_is_launched_as_it_says(tmp_path, monkeypatch):
    made = {path.stem: stages.load(path) for path in make_variants.write(tmp_path, 9)}
    for stage in made.values():
        monkeypatch.setattr(stage.launch, "multiprocessors", lambda device: 3)
    said = {name: launched(stage, 64, True) for name, stage in made.items()}
    assert said["launched"]["grid"] == (B * H * -(-NQ // 64),)
    assert said["heads_first"]["section"] == B * H
    assert [said[name]["CONSUMERS"] for name in ("two_consumers", "one_cta")] == [2, 3]
    slots = {"third_for_k": (3, 2), "two_for_v": (2, 2)}
    assert {name: (said[name]["K_SLOTS"], said[name]["V_SLOTS"]) for name in slots} == slots
    assert said["static"]["OVERLAP"] and not said["in_turn"]["OVERLAP"]
    same = {*made} - {"launched", "heads_first", "two_consumers", "one_cta", "in_turn", *slots}
    assert all(said[name] == said["static"] for name in same)
    assert made["two_kernels"].PASSES.backward is s07.backward


# as far as Triton's own passes go: what makes machine code of theirs takes most of the time
COMPILES = """
import os, pathlib
os.environ |= {{"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": {cache!r}}}
import cubins, make_variants, triton

def no_machine_code(_=None, steps=None, *more):
    if steps:
        steps["llir"] = lambda module, metadata: metadata.update(KNOWN) or ""
        steps["ptx"] = steps["cubin"] = lambda module, metadata: b""
    return "no machine code", "no machine code"  # tells these kernels from others, in the cache

KNOWN = dict.fromkeys(("shared", "tmem_size", "global_scratch_size", "profile_scratch_size"), 0)
KNOWN |= {{"name": "kernel", "global_scratch_align": 1, "profile_scratch_align": 1}}
triton.knobs.runtime.add_stages_inspection_hook = no_machine_code
cubins.dump, cubins.resources, cubins.unset_registers = lambda *_: "", lambda cubin: {{}}, list
for path in make_variants.write(pathlib.Path({folder!r}), 9):
    trains = make_variants.VARIANTS[9][path.stem].get("direction") == "bwd"
    cubins.compile_gluon(str(path), 64, "bfloat16", "BACKWARD" if trains else "plan", "masked")
    print(path.stem)
"""


@pytest.mark.slow
def test_triton_compiles_each_variant(tmp_path, cubins):
    code = COMPILES.format(cache=str(cubins), folder=str(tmp_path))
    assert printed(code) == [*make_variants.VARIANTS[9]]
