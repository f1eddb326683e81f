"""A decoder of transformers with a stage as its attention: exact, or refused in one line."""

from types import SimpleNamespace

import pytest
import torch

import stages
from attention_ladder.models.attention_interface import Mask, as_attention, make_mask, register
from attention_ladder.models.minilm import compare
from harness.isolation.call import WrongOutput
from stages.contract import Stage

NEEDED = "transformers 5.4 or later isn't installed: pip install -e '.[model]'"
pytest.importorskip("transformers", minversion="5.4", reason=NEEDED)

SIZES = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where there is a GPU, Triton compiles
IDS = torch.randint(1, 50, (2, 11), generator=torch.Generator().manual_seed(0)).to(DEVICE)
VALID = torch.tensor([[1] * 11, [1] * 7 + [0] * 4], device=DEVICE)
GREEDY = {"max_new_tokens": 4, "do_sample": False}


def build(attention, dtype=torch.float32, **config):
    """The decoder, its random weights the same each time."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    made = LlamaConfig(**SIZES | config)
    model = AutoModelForCausalLM.from_config(made, attn_implementation=attention)
    return model.eval().to(DEVICE, dtype)


@torch.no_grad()
def verdict(number, run, **config):
    """Whether run(model) is as exact with a stage as with transformers' own attention, or why not.

    By the rule of `ladder model`: their errors against the same weights in float64.
    """
    ours, eager = (run(build(name, **config)) for name in (register(number), "eager"))
    exact = run(build("sdpa", torch.float64, **config))
    states = [x.double().reshape(1, -1, SIZES["vocab_size"]) for x in (ours, eager, exact)]
    return compare.compare(*states, torch.finfo(torch.float32).eps)["why"]


def in_pieces(model):
    """The logits of IDS, in pieces: queries at the end of a cache see all before them."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    pieces = [model(ids, past_key_values=cache).logits for ids in IDS.split((5, 3, 1, 1, 1), 1)]
    return torch.cat(pieces, 1)


RUNS = {
    "whole": lambda model: model(IDS).logits,
    "in pieces": in_pieces,
    "padded": lambda model: model(IDS, attention_mask=VALID).logits[VALID.bool()],
    "all valid": lambda model: model(IDS, attention_mask=torch.ones_like(IDS)).logits,
    "full": lambda model: model(IDS, is_causal=False).logits,
    "full, padded": lambda model: model(IDS, attention_mask=VALID, is_causal=False).logits[
        VALID.bool()
    ],
}


@pytest.mark.parametrize("number", [3, 6])
@pytest.mark.parametrize("run", RUNS)
def test_logits_are_as_exact_as_with_the_attention_of_transformers(number, run):
    assert verdict(number, RUNS[run]) == ""


def test_a_stage_without_masks_serves_a_model_without_one():
    assert verdict(5, RUNS["full"], num_key_value_heads=4) == ""


@pytest.mark.parametrize("number", [3, 6])
def test_greedy_generation_gives_the_same_tokens(number):
    ours, eager = (build(name).generate(IDS, **GREEDY) for name in (register(number), "eager"))
    assert ours.shape == (2, 15)
    assert torch.equal(ours, eager)


def test_a_compiled_model_is_one_graph_which_also_decodes_and_trains():
    from transformers import DynamicCache

    model = build(register(7), num_hidden_layers=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for each in (model, compiled):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            pieces = [each(ids, past_key_values=cache).logits for ids in IDS.split((10, 1), 1)]
        each(IDS, labels=IDS).loss.backward()
        found.append(
            (torch.cat(pieces, 1), model.model.layers[0].self_attn.q_proj.weight.grad.clone())
        )
        model.zero_grad()
    (logits, grad), (by_graph, grad_by_graph) = found
    assert torch.equal(by_graph, logits) and torch.equal(grad_by_graph, grad)


PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]], device=DEVICE)
REFUSED = {
    "padding on the left": (3, {}, {"attention_mask": VALID.flip(1)}, "got padding before"),
    "a mask of another length": (3, {}, {"attention_mask": VALID[:, 1:]}, r"got shape \(2, 10\)"),
    "more keys than queries": (
        3, {}, {"attention_mask": VALID.repeat(1, 2), "use_cache": False}, "the last query at",
    ),
    "a mask in 4D": (3, {}, {"attention_mask": VALID[:, None, None].bool()}, "mask: got a Tensor"),
    "packed sequences": (3, {}, {"position_ids": PACKED, "use_cache": False}, "packed sequences"),
    "lengths of packed ones": (3, {}, {"cu_seq_lens_q": PACKED}, "cu_seq_lens_q: got it set"),
    "weights wanted": (3, {}, {"output_attentions": True}, "output_attentions: got it set"),
    "dropout": (3, {"attention_dropout": 0.1}, {}, "dropout: got 0.1"),
    "no causal": (5, {"num_key_value_heads": 4}, {}, "causal: got it set, but stage 5"),
    "no lengths": (
        5, {"num_key_value_heads": 4}, {"attention_mask": VALID, "is_causal": False},
        "seqlens_k: got it set, but stage 5",
    ),
    "no grouped heads": (5, {}, {"is_causal": False}, "gqa: got it set, but stage 5"),
    "no gradients": (6, {}, {}, "stage 6 .* has no gradients"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_contract_does_not_say_is_refused(what):
    number, config, given, says = REFUSED[what]
    model = build(register(number), **config).train()
    with torch.set_grad_enabled(what == "no gradients"), pytest.raises(ValueError, match=says):
        model(IDS, **given)


def test_caches_with_empty_places_and_sliding_windows_are_refused():
    from transformers import AutoModelForCausalLM, MistralConfig

    name = register(3)
    with pytest.raises(ValueError, match="a cache without empty places"):
        build(name).generate(IDS, cache_implementation="static", **GREEDY)
    config = MistralConfig(**SIZES, sliding_window=4)
    with pytest.raises(ValueError, match="sliding windows"):
        AutoModelForCausalLM.from_config(config, attn_implementation=name).to(DEVICE)(IDS)


def call(stage=stages.by_number(3), mask=Mask(False, 4, 4, None), **given):  # noqa: B008
    q = torch.ones(1, 2, 4, 8)
    return as_attention(stage)(None, q, q, q, mask, **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mask": None}, "mask: got none"),
        ({"mask": Mask(True, 3, 4, None)}, r"mask: got one for .* = \(3, 4\), expected \(4, 4\)"),
        ({"mask": Mask(False, None, 5, None)}, r"mask: got one for .* = \(None, 5\)"),
        ({"is_causal": True}, "is_causal: got True, expected the mask's False"),
        ({"scaling": 1.0}, "scaling: got 1.0"),
        ({"sliding_window": 4}, "sliding_window: got it set"),
        ({"softcap": 50.0}, "softcap: got it set"),
        ({"s_aux": torch.zeros(2)}, "s_aux: got it set"),
        ({"position_bias": torch.zeros(4, 4)}, "position_bias: got it set"),
    ],
    ids=str,
)
def test_a_layer_that_asks_for_more_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        call(**given)


def test_a_layer_gets_what_a_stage_answers_if_it_is_of_the_shape_asked_for():
    out, weights = call(scaling=8**-0.5, sliding_window=None, output_attentions=False)
    assert out.shape == (1, 4, 2, 8) and weights is None
    declared = Stage(number=90, name="mine", title="my stage", idea="answers anything")
    for wrong in (lambda q, k, v: q[..., :3], lambda q, k, v: q.double(), lambda q, k, v: [q]):
        with pytest.raises(WrongOutput, match="returned"):
            call(SimpleNamespace(STAGE=declared, attend=wrong))


def test_a_transformers_that_does_not_say_where_the_queries_are_is_refused():
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    assert make_mask(1, 4, bidirectional_mask_function) == Mask(False, None, 4, None)
    with pytest.raises(ValueError, match=r"5\.4 or later"):
        make_mask(1, 4, causal_mask_function)
