"""A learner whose code is right, in another style, and noisy."""

import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn


def at_least_float32(x):
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


def inverse_root_of_mean(x, eps):
    return x.pow(2).sum(dim=-1, keepdim=True).div(x.size(-1)).add(eps).pow(-0.5)


class LayerNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        print("a layer norm of", d_model, "features")
        self.d_model, self.eps = d_model, eps
        self.weight, self.bias = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))

    def extra_repr(self):
        return f"{self.d_model}, eps={self.eps}"

    def forward(self, x):
        y = at_least_float32(x)
        y = y - y.mean(dim=-1, keepdim=True)
        y = y * inverse_root_of_mean(y, self.eps)
        return torch.addcmul(self.bias, y, self.weight).type_as(x)


class RMSNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones([d_model]))
        self.eps = eps

    def forward(self, x):
        print("rms norm", tuple(x.shape), file=sys.stderr)
        y = at_least_float32(x)
        return y.mul(inverse_root_of_mean(y, self.eps)).mul(self.weight).type_as(x)


class MLP(nn.Module):
    def __init__(self, d_model, d_ff, bias=True, activation=F.gelu):
        super().__init__()
        warnings.warn("an MLP", FutureWarning, stacklevel=2)
        self.act = activation
        for name, sizes in (("down", (d_ff, d_model)), ("up", (d_model, d_ff))):
            self.add_module(name, nn.Linear(*sizes, bias=bias))

    def forward(self, x):
        return F.linear(self.act(F.linear(x, self.up.weight, self.up.bias)), self.down.weight, self.down.bias)


class SwiGLU(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        for name in ("up", "gate"):
            self.add_module(name, nn.Linear(d_model, d_ff, bias=False))
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        hidden, gate = self.up(x), self.gate(x)
        return self.down(hidden * gate * torch.sigmoid(gate))


class Residual(nn.Module):
    """What the blocks have in common."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class PreNormBlock(Residual):
    def __init__(self, attention, mlp, norm1, norm2):
        super().__init__(attention=attention, mlp=mlp, norm1=norm1, norm2=norm2)

    def forward(self, x, mask=None, positions=None, cache=None):
        sys.stderr.write("pre-norm\n")
        middle = x + self.attention(self.norm1(x), cache=cache, mask=mask, positions=positions)
        return self.mlp(self.norm2(middle)) + middle


class PostNormBlock(Residual):
    def __init__(self, attention, mlp, norm1, norm2):
        super().__init__(norm2=norm2, norm1=norm1, mlp=mlp, attention=attention)

    def forward(self, x, mask=None, positions=None, cache=None):
        attended = self.attention(x, cache=cache, mask=mask, positions=positions)
        middle = self.norm1(attended + x)
        return self.norm2(self.mlp(middle) + middle)


class DecoderBlock(Residual):
    def __init__(self, self_attention, cross_attention, mlp, norm1, norm2, norm3):
        attentions = {"self_attention": self_attention, "cross_attention": cross_attention}
        super().__init__(**attentions, mlp=mlp, norm1=norm1, norm2=norm2, norm3=norm3)

    def forward(self, x, context, mask=None, context_mask=None):
        steps = (
            (self.norm1, lambda y: self.self_attention(y, mask=mask)),
            (self.norm2, lambda y: self.cross_attention(y, context=context, mask=context_mask)),
            (self.norm3, self.mlp),
        )
        for norm, branch in steps:
            x = norm(branch(x) + x)
        return x
