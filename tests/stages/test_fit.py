"""Launch configurations: the tables' own on an H200, smaller ones where a card has less memory.

What the kernels really take is compiled in test_cubins.py.
"""

import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from cubins import SHARED_LIMIT, card_of
from stage_checks import (
    assert_close,
    everything,
    for_each,
    gradient_rounding,
    normal,
    rounding,
    true_gradients,
    truth,
)

import stages
from stages.common import fit
from stages.common.fit import DK_DV, DQ, FORWARD, H200

S7 = stages.by_number(7)
TABLES = [
    *((stages.by_number(number).TILES, FORWARD) for number in (4, 5, 6)),
    (S7.TILES["dk_dv_kernel"], DK_DV),
    (S7.TILES["dq_kernel"], DQ),
]
FITTED = [stages.by_number(number) for number in (4, 5, 6, 7, 8)]
CARDS = [card_of(sm) for sm in SHARED_LIMIT]


def entries():
    """(tile, d, walk, kind) of every table."""
    for (table, walk), at in product(TABLES, range(3)):
        for kind, sizes in table.items():
            yield from ((tile, (64, 128, 256)[at], walk, kind) for tile in sizes[at])
    for table, at in product((stages.by_number(8).TILES, stages.by_number(8).OF_SEVERAL), range(3)):
        for kind, sizes in table.items():
            for rows, tile in sizes[at].items():
                yield (rows, *tile), (64, 128, 256)[at], FORWARD, kind


def test_every_tile_fits_the_card_that_it_was_chosen_on():
    """One that is too large would be made smaller there without a word."""
    for tile, d, walk, kind in entries():
        config = fit.fit(tile, d, walk, kind, H200)
        assert (*config.values(),) == (*tile, d), (tile, d, walk, kind, config)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: f"sm_{card.capability}")
def test_every_tile_is_made_to_fit_every_card(card):
    for tile, d, walk, kind in entries():
        if card.capability < (8, 0) and kind != "ieee":
            continue
        config = fit.fit(tile, d, walk, kind, card)
        assert fit.shared_needed(config, walk, kind, card) <= card.shared
        # tl.dot sums over the rows of what is walked, and refuses fewer than 16
        assert config[walk.walks] >= 16 and config[walk.keeps] >= 8 and config["num_stages"] >= 1
        assert config["BLOCK_M"] <= tile[0] and config["BLOCK_N"] <= tile[1]


def test_a_card_is_what_torch_says_of_it(monkeypatch):
    """An RTX 40, also where torch 2.6 doesn't say what memory it has; without one, an H200."""
    said = {"major": 8, "minor": 9, "multi_processor_count": 128}
    device = torch.device("cuda:1")
    utils = SimpleNamespace(get_device_properties=[{}, {"max_shared_mem": 101_376}].__getitem__)
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr("triton.runtime.driver", driver)
    for more in ({"shared_memory_per_block_optin": 101_376}, {}):
        properties = SimpleNamespace(**said, **more)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, it=properties: it)
        assert fit.card_of.__wrapped__(device) == ((8, 9), 101_376, 128)
    assert fit.card_of(torch.device("cpu")) == H200


@for_each(FITTED)
@pytest.mark.parametrize(("sm", "kinds"), [(75, ("ieee", "ieee")), (89, ("half", "bf16x6"))])
def test_a_stage_says_how_it_runs_on_the_card(stage, sm, kinds, monkeypatch):
    assert fit.told(stages.by_number(3)) == {}
    card = card_of(sm)
    monkeypatch.setattr(fit, "card_of", lambda device: card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card.capability)
    empty = lambda _, dtype, device: SimpleNamespace(dtype=dtype, device=torch.device(device))  # noqa: E731
    monkeypatch.setattr(torch, "empty", empty)
    said = fit.told(stage)
    assert f"{sm / 10}, " in said["card"] and f"{card.shared:,} bytes" in said["card"]
    for dtype, kind in zip((torch.float16, torch.float32), kinds, strict=True):
        text = said[str(dtype).removeprefix("torch.")]
        assert text.startswith(f"{kind}: ")
        precision = "ieee" if dtype == torch.float16 else kind
        for d in (64, 128, 256):
            if stage.STAGE.number != 7:
                config = stage.launch_config(d, dtype, precision, card=card)
                assert f"{config['BLOCK_M']}x{config['BLOCK_N']}" in text
    monkeypatch.setattr(fit, "has_module", lambda name: False)
    assert fit.told(stage) == {}


@for_each(FITTED)
@pytest.mark.parametrize("sm", [75, 89])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_small_tiles_are_right(stage, sm, dtype, monkeypatch):
    """The configurations of a T4 and of an RTX 40 at d = 256, interpreted."""
    asked = []

    def card(device):
        asked.append(device)
        return card_of(sm)

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("stages.s0") and hasattr(module, "card_of"):
            monkeypatch.setattr(module, "card_of", card)
    keys = 15 if stage.STAGE.number == 4 else 40  # all in one tile, or in some
    q, k, v, dO = normal((1, 1, 33, keys, 250), 0, dtype)
    got, want = everything(stage, q, k, v, dO), true_gradients(q, k, v, dO)
    bounds = (rounding(q, k, v), *gradient_rounding(q, k, v, dO))
    for name, *each in zip(("o", "dq", "dk", "dv"), got, want, bounds, strict=False):
        assert_close(*each, name)
    assert asked


@pytest.mark.parametrize(
    ("keys", "dtype", "d"), [(33, torch.float16, 128), (64, torch.float32, 256)]
)
def test_stage_4_refuses_keys_that_should_be_in_one_tile_and_are_not(keys, dtype, d, monkeypatch):
    """A T4's tiles have 32 keys, or 16: up to 64 it would be wrong where it is declared exact."""
    stage = stages.by_number(4)
    monkeypatch.setattr(stage, "card_of", lambda device: card_of(75))
    q, k, v, _ = normal((1, 1, 1, keys, d), 0, dtype)
    with pytest.raises(stages.common.contract.StageUnavailable, match=f"{keys} keys at d = {d}"):
        stage.attend(q, k, v)
    k, v = k[:, :, :16], v[:, :, :16]
    assert_close(stage.attend(q, k, v), truth(q, k, v), rounding(q, k, v))
