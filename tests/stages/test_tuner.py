"""The tuner: what it times, which candidate it takes, and which calls share a choice.

There is no GPU here: a fake one (fake_card.py) has a clock that launches move on.
"""

import sys

import pytest
import torch
from fake_card import Card, Kernel, like
from stage_checks import device_of, for_each, gradients, normal

import stages
from stages.common import tuner
from stages.common.machine import has_module

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and not has_module("triton"), reason="no triton for this machine"
)

KERNEL = Kernel()


@pytest.fixture
def card(monkeypatch):
    """A card on which BLOCK_M = 32 is the fastest, in a process that has chosen nothing."""
    monkeypatch.setattr(tuner, "chosen", {})
    monkeypatch.setattr(tuner, "latest", {})
    card = Card({16: 3.0, 32: 1.0, 64: 2.0})
    card.put_in(monkeypatch.setattr)
    return card


def choose(
    card, kernel=KERNEL, dtype=torch.float16, device="cuda:0", kind=("ieee", 64), sizes=(16, 1000)
):
    """The BLOCK_M that is chosen on `card`, and noted."""
    choice = tuner.choose(
        kernel, card.candidates, card.launch, like(dtype, device), kind=kind, sizes=sizes
    )
    assert choice in card.candidates
    assert tuner.latest == {kernel.__name__: choice}
    tuner.latest.clear()
    return choice["BLOCK_M"]


def out_of_resources():
    from triton.runtime.errors import OutOfResources

    return OutOfResources(300_000, 232_448, "shared memory")


def test_the_fastest_is_chosen_all_taking_turns(card):
    assert choose(card) == 32
    assert card.launched == [16, 32, 64] * (1 + tuner.ROUNDS)


@pytest.mark.parametrize(("first", "second", "taken"), [(1.01, 1.0, 16), (1.03, 1.0, 32)])
def test_the_first_is_taken_that_is_as_fast_within_two_percent(card, first, second, taken):
    """So that noise of that size gives two processes the same choice."""
    card.costs |= {16: first, 32: second}
    assert choose(card) == taken


def test_one_outlier_does_not_decide(card):
    """The median: neither a lucky launch nor one that was disturbed."""
    launches = {16: 0, 32: 0}

    def lucky():
        launches[16] += 1
        return 0.001 if launches[16] == 4 else 3.0

    def disturbed():
        launches[32] += 1
        return 1000.0 if launches[32] in (1, 5) else 1.0  # the first one compiles

    card.costs |= {16: lucky, 32: disturbed}
    assert choose(card) == 32


def test_what_does_not_fit_the_card_is_left_out(card):
    from triton.runtime.errors import PTXASError

    card.costs |= {32: out_of_resources()}
    assert choose(card) == 64
    card.costs |= {64: PTXASError("too many registers")}
    assert choose(card, kind=("ieee", 128)) == 16


def test_where_none_fits_it_says_so(card):
    card.costs = {16: out_of_resources(), 32: out_of_resources()}
    with pytest.raises(RuntimeError, match=r"^none of 2 configurations fits this GPU: .*232448"):
        choose(card)


def test_any_other_error_is_the_kernels_own(card):
    card.costs |= {32: ValueError("a bug")}
    with pytest.raises(ValueError, match="a bug"):
        choose(card)


def test_nothing_is_timed_without_a_gpu_or_a_choice(card):
    assert choose(card, device="cpu") == 16
    card.costs = {16: 3.0}
    assert choose(card) == 16
    assert card.launched == []


def test_nothing_is_timed_while_a_graph_is_captured(card):
    card.capturing = True
    assert choose(card) == 16  # the first, and it isn't taken for a choice
    assert card.launched == []
    card.capturing = False
    assert choose(card) == 32
    card.capturing = True
    assert choose(card) == 32  # what is known is used


def test_nothing_is_timed_where_the_same_bits_are_asked_for(card, monkeypatch):
    """Another process may choose another, which sums up in another order."""
    assert choose(card) == 32
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    card.launched.clear()
    assert choose(card) == choose(card, sizes=(500, 1000)) == 16
    assert card.launched == []


def test_a_choice_is_made_once_for_sizes_up_to_the_same_power_of_two(card):
    choose(card)
    card.launched.clear()
    card.costs |= {16: 0.1}  # had it been timed again, this would be chosen
    for sizes in ((16, 1000), (9, 513), (16, 1024)):
        assert choose(card, sizes=sizes) == 32
    assert card.launched == []


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("sizes", (16, 512)), ("sizes", (16, 1025)), ("sizes", (17, 1000)), ("kind", ("tf32", 64)),
        ("kind", ("ieee", 63)), ("dtype", torch.bfloat16), ("device", "cuda:1"),
        ("kernel", Kernel("dq_kernel")),
    ],
)  # fmt: skip
def test_another_kind_of_call_is_another_choice(card, what, value):
    choose(card)
    card.costs = {16: 3.0, 32: 1.0, 64: 0.5}
    assert choose(card, **{what: value}) == 64


@for_each([stages.by_number(number) for number in (6, 7)])
def test_interpreted_stages_time_nothing(stage, monkeypatch):
    monkeypatch.setattr(tuner, "time_each", lambda *_: pytest.fail("timed in the interpreter"))
    tensors = normal((1, 1, 5, 9, 8), 0, device=device_of(stage))
    gradients(stage, *tensors) if stage.STAGE.gradients else stage.attend(*tensors[:3])


def test_stages_tell_the_tuner_what_they_launch(monkeypatch):
    asked = []

    def choose(kernel, candidates, launch, like, kind, sizes):
        asked.append((kernel.__name__, like.dtype, kind, sizes))
        return candidates[0]

    monkeypatch.setattr(tuner, "choose", choose)
    q, k, v, dO = normal((1, 4, 5, 9, 8), 0, torch.float16)
    k, v = k[:, ::2], v[:, ::2]  # two heads of q share each of them
    gradients(stages.by_number(7), q, k, v, dO, causal=True)
    sizes = {"attention_kernel": (4, 5, 9), "dk_dv_kernel": (2, 10, 9), "dq_kernel": (4, 5, 9)}
    kind = ("ieee", 8, True)
    assert asked == [(name, torch.float16, kind, each) for name, each in sizes.items()]
