"""Let a model of transformers compute its attention with a stage.

Transformers has a mask made once per forward pass (`make_mask`) and hands it to the attention of
each layer (`as_attention`). Ours holds what the contract of stages can say of hidden keys
(`Mask`). Whatever the contract can't say is refused: a model never computes something else.
"""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import stages
from harness.isolation.call import check_like
from stages.common.operators import wanted_of

# what models pass on to their layers although it changes no attention; any other is refused
HARMLESS = (
    "position_ids", "cache_position", "use_cache", "output_hidden_states", "output_router_logits",
    "num_items_in_batch",
)  # fmt: skip


class Mask(NamedTuple):
    """Which keys are seen, in a forward pass.

    causal      whether query i sees keys up to i + Nk - Nq only
    queries     Nq; None where transformers is older than 5.4 and doesn't say
    keys        Nk
    seqlens_k   (B,) int32, valid keys of each batch entry; None: all
    """

    causal: bool
    queries: int | None
    keys: int
    seqlens_k: Tensor | None


def register(stage: int | ModuleType) -> str:
    """Register a stage with transformers; returns the name for `attn_implementation`.

    `stage` is the number of a built-in stage, or a module as stages.load returns it. The model that
    is built with the name raises ValueError where it asks for what the stage or the contract can't
    do. Raises KeyError where there is no such number, ImportError where there is no transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    found = stages.by_number(stage) if isinstance(stage, int) else stage
    # not the stage's name: transformers takes any that has "flash" in it for FlashAttention
    name = f"ladder_{found.STAGE.number}"
    AttentionInterface.register(name, as_attention(found))
    AttentionMaskInterface.register(name, make_mask)
    return name


def make_mask(
    batch_size: int, kv_length: int, mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None, q_length: int | None = None, q_offset: int = 0,
    kv_offset: int = 0, **_: Any,
) -> Mask:  # fmt: skip
    """The mask of a forward pass, as transformers describes it.

    `attention_mask` (B, Nk) bool is False where a key is padding. Raises ValueError where the mask
    is neither causal nor full, or padding lies elsewhere than at the end.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    causal = mask_function is causal_mask_function
    if not causal and mask_function is not bidirectional_mask_function:
        hint = "; no stage has sliding windows, chunks, packed sequences or functions of your own"
        if torch.compiler.is_compiling():  # its reading of the positions would break the graph
            hint = "; without a cache it may be packed, for a compiled model: set use_cache=True"
        raise ValueError(f"mask: got neither a causal one nor a full one, expected either{hint}")
    if causal and q_length is None:
        raise ValueError("mask: got no number of queries, expected transformers 5.4 or later")
    if causal and q_offset - kv_offset != kv_length - (q_length or 0):
        raise ValueError(
            f"mask: got {q_length} queries from position {int(q_offset)} and {kv_length} keys from "
            f"position {kv_offset}, expected the last query at the last key: use a cache without "
            "empty places, such as DynamicCache"
        )
    lengths = lengths_of(attention_mask, (batch_size, kv_length))
    return Mask(causal, q_length, kv_length, lengths)


def lengths_of(valid: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """How many keys are valid, (B,) int32, or None for all; `valid` (B, Nk) bool, or None.

    Raises ValueError where `valid` hasn't that shape, or a valid key follows one that isn't.
    """
    if valid is not None and valid.shape != shape:
        raise ValueError(f"attention_mask: got shape {tuple(valid.shape)}, expected {shape}")
    if valid is None or valid.all():
        return None
    if (valid[:, 1:] > valid[:, :-1]).any():
        raise ValueError(
            "attention_mask: got padding before a token, expected it after the last: set the "
            "tokenizer's padding_side to 'right', or generate from prompts of one length"
        )
    return valid.sum(-1, dtype=torch.int32)


def as_attention(stage: ModuleType) -> Callable[..., tuple[Tensor, None]]:
    """The attention function of a stage, as transformers calls it in each layer."""
    what, options = f"stage {stage.STAGE.number} ({stage.STAGE.name})", stage.STAGE.options

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """query (B, H, Nq, d), key and value (B, Hk, Nk, d) -> (B, Nq, H, d), no weights."""
        for name, x in others.items():
            if name not in HARMLESS and x is not None and x is not False:
                raise ValueError(f"{name}: got it set, expected nothing: no stage takes it")
        if dropout:
            raise ValueError(f"dropout: got {dropout}, expected 0: set attention_dropout to 0")
        scale = query.shape[-1] ** -0.5
        if scaling is not None and not math.isclose(scaling, scale):
            raise ValueError(f"scaling: got {scaling}, expected d ** -0.5 = {scale}")
        mask = check_mask(attention_mask, is_causal, (query.shape[2], key.shape[2]))
        masks = {"causal": mask.causal or None, "seqlens_k": mask.seqlens_k}
        given = {name: x for name, x in masks.items() if x is not None}
        for option in (*given, "gqa") if key.shape[1] != query.shape[1] else given:
            if option not in options:
                raise ValueError(f"{option}: got it set, but {what} does not take it")
        if wanted_of(query, key, value) and not stage.STAGE.gradients:
            raise ValueError(f"{what} has no gradients: call the model within torch.no_grad()")
        out = stage.attend(query, key, value, **given)
        check_like(out, query)
        return out.transpose(1, 2).contiguous(), None

    return attention


def check_mask(mask: Any, is_causal: bool | None, shape: tuple[int, int]) -> Mask:
    """`mask`, where it is one of ours, for (Nq, Nk) = `shape`; else raises ValueError."""
    if not isinstance(mask, Mask):
        got = "none" if mask is None else f"a {type(mask).__name__} of your own"
        raise ValueError(f"mask: got {got}, expected one that transformers has us make")
    if is_causal not in (None, mask.causal):
        raise ValueError(f"is_causal: got {is_causal}, expected the mask's {mask.causal}")
    made_for = (mask.queries, mask.keys)
    if mask.keys != shape[1] or (mask.causal and made_for != shape):
        raise ValueError(f"mask: got one for (Nq, Nk) = {made_for}, expected {shape}")
    return mask
