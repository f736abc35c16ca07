"""What a layer is made of besides attention: norms, the MLP, and the residual stream that runs past them.

Norm sets the scale, attention mixes positions, the MLP mixes features, the residual keeps the road open. Letters: B
batch, T tokens, S context tokens, C model width, F hidden width of the MLP.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """Give each token mean 0 and variance 1, then scale and shift: (..., C) -> (..., C).

    weight * (x - mean) / sqrt(variance + eps) + bias over the last axis, with the biased variance (divided by C).
    `weight` starts as ones and `bias` as zeros, (C,) both. Computed in float32, or in x's dtype where that is
    wider, and returned in x's dtype. Ba et al. (2016), equation 4.
    """

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(-1, keepdim=True)
        variance = torch.linalg.vecdot(centred, centred).unsqueeze(-1) / x.shape[-1]
        normal = centred * torch.rsqrt(variance + self.eps)
        return torch.addcmul(self.bias, normal, self.weight).to(x.dtype)


class RMSNorm(nn.Module):
    """Give each token a root mean square of 1, then scale: (..., C) -> (..., C).

    weight * x / sqrt(mean(x^2) + eps) over the last axis. `weight` (C,) starts as ones; there is no bias. Computed in
    float32, or in x's dtype where that is wider, and returned in x's dtype. Zhang and Sennrich (2019), equation 4.
    """

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.square().mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype)


class MLP(nn.Module):
    """Two layers on each token by itself: (..., C) -> (..., F) -> (..., C).

    down(activation(up(x))), with the linear layers `up` and `down`. `activation` is any function that keeps the shape;
    GPT-2 uses GELU's tanh form. Vaswani et al. (2017), equation 2.
    """

    def __init__(self, d_model: int, d_ff: int, bias: bool = True, activation: Callable[[Tensor], Tensor] = F.gelu):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class SwiGLU(nn.Module):
    """An MLP whose hidden features are multiplied by a gate: (..., C) -> (..., F) -> (..., C).

    down(silu(gate(x)) * up(x)), with the linear layers `gate`, `up` and `down`, without a bias. Shazeer (2020),
    equation 6.
    """

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PreNormBlock(nn.Module):
    """One layer, norms inside the branches: (B, T, C) -> (B, T, C).

    x = x + attention(norm1(x)), then x = x + mlp(norm2(x)). `mask`, `positions` and `cache` are handed on to the
    attention, by keyword. Radford et al. (2019); Xiong et al. (2020).
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm1: nn.Module, norm2: nn.Module):
        super().__init__()
        self.attention, self.mlp, self.norm1, self.norm2 = attention, mlp, norm1, norm2

    def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None, cache=None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask=mask, positions=positions, cache=cache)
        return x + self.mlp(self.norm2(x))


class PostNormBlock(nn.Module):
    """One layer, norms after the sums: (B, T, C) -> (B, T, C).

    x = norm1(x + attention(x)), then x = norm2(x + mlp(x)). `mask`, `positions` and `cache` are handed on to the
    attention, by keyword. Vaswani et al. (2017), section 3.1.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm1: nn.Module, norm2: nn.Module):
        super().__init__()
        self.attention, self.mlp, self.norm1, self.norm2 = attention, mlp, norm1, norm2

    def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None, cache=None) -> Tensor:
        x = self.norm1(x + self.attention(x, mask=mask, positions=positions, cache=cache))
        return self.norm2(x + self.mlp(x))


class DecoderBlock(nn.Module):
    """A decoder's layer of 2017, which also reads a context: (B, T, C), (B, S, C) -> (B, T, C).

    x = norm1(x + self_attention(x)), x = norm2(x + cross_attention(x, context)), x = norm3(x + mlp(x)). `mask` is for
    the self-attention and `context_mask` for the cross-attention; all are given by keyword. Vaswani et al. (2017),
    section 3.1.
    """

    def __init__(
        self,
        self_attention: nn.Module,
        cross_attention: nn.Module,
        mlp: nn.Module,
        norm1: nn.Module,
        norm2: nn.Module,
        norm3: nn.Module,
    ):
        super().__init__()
        self.self_attention, self.cross_attention, self.mlp = self_attention, cross_attention, mlp
        self.norm1, self.norm2, self.norm3 = norm1, norm2, norm3

    def forward(
        self, x: Tensor, context: Tensor, mask: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        x = self.norm1(x + self.self_attention(x, mask=mask))
        x = self.norm2(x + self.cross_attention(x, context=context, mask=context_mask))
        return self.norm3(x + self.mlp(x))
