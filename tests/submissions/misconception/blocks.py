"""A learner whose pre-norm block adds the norm of x in place of x, and who has everything else right."""

import torch
import torch.nn.functional as F
from torch import nn


class LayerNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x):
        dtype = x.dtype
        if dtype != torch.float64:
            x = x.float()
        mean = x.mean(dim=-1, keepdim=True)
        var = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
        y = (x - mean) / torch.sqrt(var + self.eps)
        return (self.weight * y + self.bias).to(dtype)


class RMSNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        dtype = x.dtype
        if dtype != torch.float64:
            x = x.float()
        ms = (x**2).mean(dim=-1, keepdim=True)
        return (self.weight * x / torch.sqrt(ms + self.eps)).to(dtype)


class MLP(nn.Module):
    def __init__(self, d_model, d_ff, bias=True, activation=F.gelu):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.activation = activation
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x):
        x = self.up(x)
        x = self.activation(x)
        return self.down(x)


class SwiGLU(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.down(self.up(x) * F.silu(self.gate(x)))


class PreNormBlock(nn.Module):
    def __init__(self, attention, mlp, norm1, norm2):
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.norm1 = norm1
        self.norm2 = norm2

    def forward(self, x, mask=None, positions=None, cache=None):
        x = self.norm1(x)
        x = x + self.attention(x, mask=mask, positions=positions, cache=cache)
        x = self.norm2(x)
        x = x + self.mlp(x)
        return x


class PostNormBlock(nn.Module):
    def __init__(self, attention, mlp, norm1, norm2):
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.norm1 = norm1
        self.norm2 = norm2

    def forward(self, x, mask=None, positions=None, cache=None):
        x = x + self.attention(x, mask=mask, positions=positions, cache=cache)
        x = self.norm1(x)
        x = x + self.mlp(x)
        x = self.norm2(x)
        return x


class DecoderBlock(nn.Module):
    def __init__(self, self_attention, cross_attention, mlp, norm1, norm2, norm3):
        super().__init__()
        self.self_attention = self_attention
        self.cross_attention = cross_attention
        self.mlp = mlp
        self.norm1 = norm1
        self.norm2 = norm2
        self.norm3 = norm3

    def forward(self, x, context, mask=None, context_mask=None):
        x = self.norm1(x + self.self_attention(x, mask=mask))
        x = self.norm2(x + self.cross_attention(x, context=context, mask=context_mask))
        return self.norm3(x + self.mlp(x))
