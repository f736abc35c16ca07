"""Other correct implementations of norms, MLPs and layers."""

import math
from functools import reduce

import torch
import torch.nn.functional as F
from torch import nn

from . import correct

# LayerNorm, RMSNorm --------------------------------------------------------------------------------------------------


class _WeightAndBias(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.variance_epsilon = eps
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.weight = nn.Parameter(torch.ones(d_model))


@correct("LayerNorm")
class ByVarMean(_WeightAndBias):
    """torch's variance and mean in one call, and addcmul for the end."""

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        variance, mean = torch.var_mean(x.to(wide), dim=-1, correction=0, keepdim=True)
        normal = (x.to(wide) - mean) / torch.sqrt(variance + self.variance_epsilon)
        return torch.addcmul(self.bias, normal, self.weight).to(x.dtype)


@correct("LayerNorm")
class MeanOfSquaresLessSquareOfMean(_WeightAndBias):
    """The variance as E[x^2] - E[x]^2, which may come out a little below zero."""

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        mean = wide.mean(-1, keepdim=True)
        variance = ((wide**2).mean(-1, keepdim=True) - mean**2).clamp(min=0)
        return ((wide - mean) * (variance + self.variance_epsilon) ** -0.5 * self.weight + self.bias).type_as(x)


@correct("LayerNorm")
class CentredByAMatrix(_WeightAndBias):
    """Centring is a projection: I - 1/C. The variance is the centred row's length squared, over C."""

    def forward(self, x):
        C, wide = x.shape[-1], x.double()
        centred = wide @ (torch.eye(C, dtype=torch.float64) - 1 / C)
        length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
        root = torch.hypot(length, torch.tensor(math.sqrt(C * self.variance_epsilon), dtype=torch.float64))
        return (math.sqrt(C) * centred / root * self.weight + self.bias).to(x.dtype)


@correct("LayerNorm")
class TokenByToken(_WeightAndBias):
    """A loop over tokens, with biased std; affine part in x's own dtype."""

    def forward(self, x):
        rows = []
        for row in x.reshape(-1, x.size(-1)):
            row = row.to(torch.promote_types(row.dtype, torch.float32))
            row = row - row.sum() / len(row)
            rows.append(row / (torch.dot(row, row) / len(row) + self.variance_epsilon).sqrt())
        normal = torch.stack(rows).view(x.shape).to(x.dtype)
        return self.weight.to(x.dtype) * normal + self.bias.to(x.dtype)


class _Weight(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.full((d_model,), 1.0)))
        self.register_buffer("small", torch.tensor(eps, dtype=torch.float64), persistent=False)


@correct("RMSNorm")
class AsInLlama(_Weight):
    """As in Llama's published code, back to x's dtype before the weight; but float64 stays."""

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + float(self.small))

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return (self._norm(wide).type_as(x) * self.weight).type_as(x)


@correct("RMSNorm")
class ByTheLength(_Weight):
    """The rms is the length over the root of C; in float64 throughout."""

    def forward(self, x):
        C = x.shape[-1]
        length = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True)
        return (x.double() / torch.sqrt(length**2 / C + self.small) * self.weight).to(x.dtype)


@correct("RMSNorm")
class ByEinsum(_Weight):
    """The squares summed by einsum; weight and divisor folded into one factor."""

    def forward(self, x):
        wide = x.to(torch.promote_types(torch.float32, x.dtype))
        square = torch.einsum("...c,...c->...", wide, wide) / x.shape[-1]
        factor = torch.outer((square + self.small).rsqrt().reshape(-1), self.weight.to(wide.dtype))
        return (wide * factor.view(wide.shape)).to(x.dtype)


# MLP, SwiGLU ---------------------------------------------------------------------------------------------------------


@correct("MLP")
class MLPByMatmul(nn.Module):
    """The linear layers only hold the weights; matrix products by hand."""

    def __init__(self, d_model, d_ff, bias=True, activation=F.gelu):
        super().__init__()
        self.down = nn.Linear(d_ff, d_model, bias)
        self.up = nn.Linear(d_model, d_ff, bias)
        self.f = activation

    def forward(self, x):
        hidden = x @ self.up.weight.T
        if self.up.bias is not None:
            hidden = hidden + self.up.bias
        out = self.f(hidden) @ self.down.weight.T
        return out if self.down.bias is None else out + self.down.bias


@correct("MLP")
class MLPInSequence(nn.Sequential):
    """A Sequential with names, which calls one after the other."""

    def __init__(self, d_model, d_ff, bias=True, activation=F.gelu):
        super().__init__()
        self.add_module("up", nn.Linear(d_model, d_ff, bias=bias))
        self.add_module("activation", _Function(activation))
        self.add_module("down", nn.Linear(d_ff, d_model, bias=bias))


class _Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@correct("SwiGLU")
class SwiGLUBySigmoid(nn.Module):
    """SiLU written out, all in one line."""

    def __init__(self, d_model, d_ff):
        super().__init__()
        sizes = {"down": (d_ff, d_model), "up": (d_model, d_ff), "gate": (d_model, d_ff)}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(*size, bias=False))

    def forward(self, x):
        g = self.gate(x)
        return self.down(self.up(x) * g / (1 + torch.exp(-g)))


@correct("SwiGLU")
class SwiGLUInOneProduct(nn.Module):
    """Gate and up as one matrix product, then split."""

    def __init__(self, d_model, d_ff):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)
        self.act = nn.SiLU()

    def forward(self, x):
        up, gate = F.linear(x, torch.cat([self.up.weight, self.gate.weight])).chunk(2, dim=-1)
        return torch.einsum("...f,cf->...c", self.act(gate).mul(up), self.down.weight)


# PreNormBlock, PostNormBlock, DecoderBlock ---------------------------------------------------------------------------


class _FourParts(nn.Module):
    """Parts entered by name; what is None is not handed on at all."""

    def __init__(self, attention, mlp, norm1, norm2):
        super().__init__()
        for name, part in {"norm1": norm1, "attention": attention, "norm2": norm2, "mlp": mlp}.items():
            self.add_module(name, part)

    def given(self, **arguments):
        return {name: value for name, value in arguments.items() if value is not None}


@correct("PreNormBlock")
class PreNormByBranches(_FourParts):
    """A list of branches, and the stream that gathers what they give."""

    def forward(self, x, mask=None, positions=None, cache=None):
        given = self.given(mask=mask, positions=positions, cache=cache)
        branches = [lambda y: self.attention(self.norm1(y), **given), lambda y: self.mlp(self.norm2(y))]
        return reduce(lambda stream, branch: torch.add(stream, branch(stream)), branches, x)


@correct("PreNormBlock")
class PreNormWrittenOut(nn.Module):
    """One step a line, the sum written into a fresh tensor, x named in the call."""

    def __init__(self, attention, mlp, norm1, norm2):
        super().__init__()
        self.norm2, self.norm1 = norm2, norm1
        self.mlp, self.attention = mlp, attention

    def forward(self, x, mask=None, positions=None, cache=None):
        residual = x
        hidden = self.norm1(x)
        hidden = self.attention(x=hidden, context=None, cache=cache, positions=positions, mask=mask)
        hidden = residual + hidden
        out = self.mlp(self.norm2(hidden))
        out += hidden
        return out


@correct("PostNormBlock")
class PostNormByBranches(_FourParts):
    """Each step is a branch and its norm."""

    def forward(self, x, mask=None, positions=None, cache=None):
        given = self.given(mask=mask, positions=positions, cache=cache)
        for norm, branch in ((self.norm1, lambda y: self.attention(y, **given)), (self.norm2, self.mlp)):
            x = norm(branch(x) + x)
        return x


@correct("PostNormBlock")
class PostNormWrittenOut(nn.Module):
    """One step a line."""

    def __init__(self, attention, mlp, norm1, norm2):
        super().__init__()
        self.norm1 = norm1
        self.norm2 = norm2
        self.attention = attention
        self.mlp = mlp

    def _add_and_norm(self, x, y, norm):
        return norm(torch.stack([x, y]).sum(0))

    def forward(self, x, mask=None, positions=None, cache=None):
        attended = self.attention(x, positions=positions, cache=cache, mask=mask)
        middle = self._add_and_norm(x, attended, self.norm1)
        return self._add_and_norm(middle, self.mlp(middle), self.norm2)


@correct("DecoderBlock")
class DecoderByBranches(nn.Module):
    """Each step is a branch and its norm; what is None is not handed on; the context in second place."""

    def __init__(self, self_attention, cross_attention, mlp, norm1, norm2, norm3):
        super().__init__()
        parts = dict(locals())
        for name in ("norm3", "norm2", "norm1", "mlp", "cross_attention", "self_attention"):
            setattr(self, name, parts[name])

    def forward(self, x, context, mask=None, context_mask=None):
        own = {} if mask is None else {"mask": mask}
        cross = {} if context_mask is None else {"mask": context_mask}
        steps = [
            (lambda y: self.self_attention(y, **own), self.norm1),
            (lambda y: self.cross_attention(y, context, **cross), self.norm2),
            (self.mlp, self.norm3),
        ]
        return reduce(lambda stream, step: step[1](step[0](stream) + stream), steps, x)


@correct("DecoderBlock")
class DecoderWrittenOut(nn.Module):
    """One step a line; positions and cache are named, as None."""

    def __init__(self, self_attention, cross_attention, mlp, norm1, norm2, norm3):
        super().__init__()
        self.self_attention = self_attention
        self.cross_attention = cross_attention
        self.mlp = mlp
        self.norm1, self.norm2, self.norm3 = norm1, norm2, norm3

    def forward(self, x, context, mask=None, context_mask=None):
        a = self.self_attention(x, context=None, mask=mask, positions=None, cache=None)
        h1 = self.norm1(torch.add(a, x))
        b = self.cross_attention(h1, mask=context_mask, context=context, positions=None, cache=None)
        h2 = self.norm2(torch.add(b, h1))
        c = self.mlp(h2)
        return self.norm3(torch.add(c, h2))
