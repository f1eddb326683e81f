"""A decoder's shapes on a GPU: a model of transformers, compiled as one graph around a stage."""

import pytest
import torch

from attention_ladder.models.attention_interface import register
from attention_ladder.models.minilm import compare

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 512, "hidden_size": 4096, "intermediate_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
N, DECODED = 1024, 3


@pytest.mark.parametrize("number", [6, 8, 9])
def test_a_compiled_decoder_is_as_exact_as_with_the_attention_of_transformers(number, stage):
    """1024 tokens at once, then one after the other from a cache, in bfloat16."""
    reason = "transformers 5.4 or later isn't installed: pip install -e '.[model]'"
    transformers = pytest.importorskip("transformers", minversion="5.4", reason=reason)
    torch.compiler.reset()  # each stage's model is compiled anew, and torch stops at the ninth time

    @torch.no_grad()
    def logits(name, dtype, compiled=False):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
        model = model.eval().to("cuda", torch.bfloat16).to(dtype)  # the same weights in float64
        run = torch.compile(model, fullgraph=True) if compiled else model
        ids = torch.randint(SIZES["vocab_size"], (1, N + DECODED), device="cuda")
        cache = transformers.DynamicCache(config=config)
        pieces = ids.split((N, *[1] * DECODED), 1)
        return torch.cat([run(each, past_key_values=cache).logits for each in pieces], 1).double()

    ours = logits(register(number), torch.bfloat16, compiled=True)
    eager, exact = (logits(*each) for each in (("eager", torch.bfloat16), ("sdpa", torch.float64)))
    found = compare.compare(ours, eager, exact, torch.finfo(torch.bfloat16).eps)
    assert found["exact"], found["why"]
