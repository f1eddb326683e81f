"""Stage 9's way from attend to the launch, with a driver that is faked; the rest needs a GPU."""

import importlib.util
import math

import make_variants
import pytest
from fake_driver import SHAPES

import stages

STAGE = stages.by_number(9)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no wheel of triton for this machine"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "causal", "lengths"),
    [(128, 0, 0), (64, 1, 1)],
)
def test_the_kernel_gets_what_it_is_to_get_at_the_first_launch_and_at_the_next(
    d, causal, lengths, launcher
):
    (B, H, Nq), (_, Hk, Nk) = SHAPES
    config = STAGE.launch.plan(d, bool(causal), Nk)
    [(first, again)] = launcher.answers([d, causal, lengths, 0])
    assert first == again
    blocks = -(-Nq // (64 * config.CONSUMERS))
    grid = min(132 * config.ctas, B * H * blocks)
    assert first.pop("kernel") == "attention_kernel"
    assert first.pop("grid") == [grid, 1, 1]
    assert first.pop("qk_scale") == pytest.approx(math.log2(math.e) / math.sqrt(d))
    assert first.pop("section") == (B * H if causal else H // Hk)  # all K and V fit
    assert first == {
        "H": H, "group": H // Hk, "Nq": Nq, "Nk": Nk, "blocks": blocks, "heads": B * H,
        "tiles": B * H * blocks, "CAUSAL": bool(causal), "HAS_SEQLENS": bool(lengths),
        "MASKED_TILES": 2 if causal else 1, "LSE": False,
        **dict(zip(config._fields[:-2], config, strict=False)),
    }  # fmt: skip


@pytest.mark.parametrize("heads", [1, 2, 7, 40, 256])
def test_sections_are_as_few_as_can_be_and_none_has_more_heads_than_it_needs(heads):
    for most in range(heads + 2):
        size = STAGE.launch.section_of(heads, most)
        sections = -(-heads // size)
        assert 1 <= size <= max(1, most)
        assert sections == -(-heads // max(1, most))
        assert sections * (size - 1) < heads


@pytest.mark.slow
def test_the_backward_pass_goes_from_its_call_to_the_launches(launcher):
    (B, H, Nq), (_, Hk, Nk) = SHAPES
    jobs = [(128, 0, 0, 1), (40, 1, 1, 1)]
    for (d, causal, lengths, _), made in zip(jobs, launcher.answers(*jobs), strict=True):
        forward, before, backward, after, *again = made
        assert again == [forward, before, backward, after]
        assert forward["LSE"]
        rest = [step["kernel"] for step in again[1:]]
        assert rest == ["preprocess_kernel", "backward_kernel", "postprocess_kernel"]
        shift = Nq - Nk if causal else 0  # rows that see no key
        blocks = -(-(Nq - shift) // before["BLOCK_M"])
        assert before["grid"] == after["grid"] == [blocks, H, B]
        assert backward["grid"] == [min(132, B * Hk * -(-Nk // 128)), 1, 1]
        assert (backward["Nq"], backward["Nk"], backward["d"]) == (Nq - shift, Nk, d)
        assert (backward["CAUSAL"], backward["HAS_SEQLENS"]) == (bool(causal), bool(lengths))
        assert backward["DQ"]


@pytest.mark.slow
def test_each_variant_is_launched(tmp_path, launcher):
    written = {path.stem: path for path in make_variants.write(tmp_path, 9)}
    B, H, Nq = SHAPES[0]
    names = [*make_variants.VARIANTS[9]]
    jobs = [(64, 1, 0, 0, str(written[name])) for name in names]
    *made, backward = launcher.answers(*jobs, (64, 1, 0, 1, str(written["two_kernels"])))
    said = {name: again for name, (_, again) in zip(names, made, strict=True)}
    assert said["launched"]["grid"] == [B * H * -(-Nq // 64), 1, 1]
    assert said["heads_first"]["section"] == B * H
    assert [said[name]["CONSUMERS"] for name in ("two_consumers", "one_cta")] == [2, 3]
    slots = {"third_for_k": (3, 2), "two_for_v": (2, 2)}
    assert {name: (said[name]["K_SLOTS"], said[name]["V_SLOTS"]) for name in slots} == slots
    assert said["static"]["OVERLAP"] and not said["in_turn"]["OVERLAP"]
    same = set(names) - {"launched", "heads_first", "two_consumers", "one_cta", "in_turn", *slots}
    assert all(said[name] == said["static"] for name in same)
    assert len(backward) == 8
    of_stage_7 = ["delta_kernel", "dk_dv_kernel", "dq_kernel"]
    assert [step["kernel"] for step in backward[1:4]] == of_stage_7
