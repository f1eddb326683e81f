"""A small GPT whose attention is any stage: what `ladder train` trains.

    x = tokens + positions                        (B, N, D)
    x = x + proj(attend(q, k, v, causal=True))    q, k, v (B, H, N, d): linear maps of norm(x)
    x = x + MLP(norm of x)                        D -> 4 D -> D, GELU
    logits = norm(x) E^T                          (B, N, characters), E the tokens' own embedding

GPT-2's design (Radford et al. 2019) without dropout, so that two runs differ only in their
attention: pre-norm, learned positions, tied head, N(0, 0.02) weights, those that write into the
residual stream divided by sqrt(2 layers).
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from attention_ladder.models.training.plan import Shape

Attend = Callable[..., torch.Tensor]


class Attention(nn.Module):
    """Causal self-attention: the projections here, the attention itself by `attend`."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.shape = shape
        self.attend = attend
        # no bias: the true gradient of k's bias is 0 (softmax removes a constant that is added to a
        # row's scores), and Adam would turn its rounding noise into full steps (docs/training.md)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x (B, N, D)
        B, N, D = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.shape.heads, self.shape.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, N, d) each, views
        o = self.attend(q, k, v, causal=True)  # (B, H, N, d)
        return self.proj(o.transpose(1, 2).reshape(B, N, D))  # (B, N, D)


class Layer(nn.Module):
    """Attention, then the MLP, each on a norm of its input and added to that input."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        D = shape.width
        self.norm_1 = nn.LayerNorm(D)
        self.attention = Attention(shape, attend)
        self.norm_2 = nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x (B, N, D)
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # (B, N, D)


class GPT(nn.Module):
    """The model for an alphabet of `characters` characters."""

    def __init__(self, characters: int, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, shape.width)
        self.positions = nn.Embedding(shape.block, shape.width)
        self.layers = nn.ModuleList(Layer(shape, attend) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.shape = shape
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() > 1:  # norm weights are 1 by default
                residual = name.endswith(("proj.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / ((2 * shape.layers) ** 0.5 if residual else 1.0))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy () of `targets` after `ids`, both (B, N); nats per character."""
        logits = self.logits(ids)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def logits(self, ids: torch.Tensor, first: int | torch.Tensor = 0) -> torch.Tensor:
        """The logits of the character after each of `ids` (B, N): (B, N, characters).

        `first`: the position of the first id, or (1,) on the device of `ids`. Above 0, `attend`
        must keep the earlier keys itself.
        """
        positions = torch.arange(ids.shape[1], device=ids.device) + first  # (N,)
        x = self.tokens(ids) + self.positions(positions)  # (B, N, D)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.norm(x) @ self.tokens.weight.T
        return logits
