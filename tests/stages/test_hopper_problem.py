"""Stage 9's division of rows and keys among tiles and consumers, in integers, without a GPU."""

import importlib.util
import random
from types import SimpleNamespace

import pytest
import torch

import stages

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no wheel of triton for this machine"
)

ROWS = 64  # of a consumer
INTEGERS = SimpleNamespace(
    minimum=min, maximum=max, load=lambda cell: cell[0][cell[1]],
    where=lambda condition, x, y: x if condition else y,
    cdiv=lambda x, y: int((x + y - 1) / y),  # towards 0, as on a GPU
    zeros_like=lambda x: 0,
)  # fmt: skip


class Lengths(list):
    def __add__(self, b):  # a pointer and an offset
        return self, b


@pytest.fixture
def problem_of(monkeypatch):
    """Returns a problem of stage 9, whose methods take and return plain integers."""

    from stages.s09_gluon_hopper import schedule

    stage = stages.by_number(9)
    monkeypatch.setattr(stage.launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(schedule, "gl", INTEGERS)
    methods = {
        name: function.fn
        for owner in (schedule.TileScheduler, schedule.Problem)
        for name, function in vars(owner).items()
        if hasattr(function, "fn")
    }

    def make(q_shape, k_shape, causal, lengths):
        config = stage.launch.plan(q_shape[3], causal, k_shape[2])
        stage.launch.forward_launch.cache_clear()
        launch, numbers, *_ = stage.launch.forward_launch(
            q_shape, k_shape, torch.float16, torch.device("cpu"), causal, bool(lengths), False,
            config,
        )  # fmt: skip
        H, group, Nq, Nk, blocks, heads, section, tiles, _ = numbers
        masked_tiles = launch.options["MASKED_TILES"]
        fields = {
            "H": H, "group": group, "Nq": Nq, "Nk": Nk, "blocks": blocks, "all_heads": heads,
            "section": section, "tiles": tiles, "CAUSAL": causal, "HAS_SEQLENS": bool(lengths),
            "BLOCK_M": ROWS * config.CONSUMERS, "BLOCK_N": config.BLOCK_N,
            "EDGE": masked_tiles > 0 and (bool(lengths) or not causal),
            "MASKED_TILES": masked_tiles, "seqlens_ptr": Lengths(lengths or ()),
        }  # fmt: skip
        return type("Plain", (), methods | fields)()

    return make


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_each_row_meets_each_key_that_it_sees_and_none_that_is_hidden(d, causal, problem_of):
    choose = random.Random(d)
    for case in range(60):
        B, H = choose.randint(1, 3), choose.choice((1, 2, 6))
        Nq, Nk = (choose.choice((choose.randint(1, 700), 64 * choose.randint(1, 9))) for _ in "qk")
        lengths = [choose.randint(-3, Nk + 3) for _ in range(B)] if case % 2 else None
        problem = problem_of((B, H, Nq, d), (B, 1, Nk, d), causal, lengths)
        met = dict.fromkeys(((b, h, i) for b in range(B) for h in range(H) for i in range(Nq)), 0)
        for tile in range(problem.tiles):
            b, h, block = problem.place(tile, H, causal)
            start_m = block * problem.BLOCK_M
            valid = problem.valid_keys(b)
            n_tiles = problem.kv_tiles(start_m, valid)
            assert valid == (Nk if lengths is None else min(max(lengths[b], 0), Nk))
            for first in range(start_m, start_m + problem.BLOCK_M, ROWS):
                skipped = problem.skipped_tiles(first, valid, n_tiles)
                assert 0 <= skipped < n_tiles
                if first + ROWS <= 0 or first >= Nq:  # no rows: as little as can be
                    assert skipped == n_tiles - 1
                end = (n_tiles - skipped) * problem.BLOCK_N  # of the keys that are walked
                unmasked = max(0, n_tiles - skipped - problem.MASKED_TILES) * problem.BLOCK_N
                for i in range(max(first, 0), min(first + ROWS, Nq)):
                    met[b, h, i] += 1
                    sees = max(0, min(valid, i + Nk - Nq + 1) if causal else valid)
                    assert max(0, problem.visible_keys(i, valid)) == sees
                    assert unmasked <= sees <= end, (Nq, Nk, lengths, i)
        assert set(met.values()) == {1}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_each_valid_key_counts_once_and_no_hidden_one_is_loaded(d, causal, problem_of):
    """Under a causal mask, each that the last row of a block sees. Keys before the first are 0."""
    choose = random.Random(d)
    for case in range(120):
        Nk = choose.choice((choose.randint(1, 700), 128 * choose.randint(1, 5)))
        lengths = [choose.choice((choose.randint(-3, Nk + 3), 128))] if case % 2 else None
        problem = problem_of((1, 1, 300, d), (1, 1, Nk, d), causal, lengths)
        start_m = choose.randrange(0, 300, problem.BLOCK_M)
        valid = problem.valid_keys(0)
        n_tiles = problem.kv_tiles(start_m, valid)
        last = min(start_m + problem.BLOCK_M, 300) - 1
        seen = max(0, problem.visible_keys(last, valid))
        counted = []
        for j in range(n_tiles):
            start = problem.first_key(j, n_tiles, valid)
            # as the consumers hide: in the tile walked first, what the next one has, or zeros
            hidden = (n_tiles - 1 - j) * problem.BLOCK_N - start
            assert hidden >= 0 if j == 0 else hidden == 0
            keys = range(start, start + problem.BLOCK_N)
            assert lengths is None or keys[-1] < max(valid, 0), (Nk, lengths)
            counted += [key for key in keys[hidden:] if key < seen]
        assert sorted(counted) == list(range(seen)), (Nk, lengths)
