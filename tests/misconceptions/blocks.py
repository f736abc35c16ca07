"""Mistakes that people make in norms, MLPs and the wiring of a layer."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from . import wrong


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


# LayerNorm -----------------------------------------------------------------------------------------------------------
#
# The variants share a correct body whose steps are methods; each variant gets one step wrong.


class _LayerNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.make(d_model)

    def make(self, d_model):
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x):
        return self.finish(self.normal(self.widened(x))).to(self.kind(x))

    def widened(self, x):
        return _wide(x)

    def kind(self, x):
        return x.dtype

    def mean(self, x):
        return x.mean(-1, keepdim=True)

    def variance(self, x):
        return self.mean((x - self.mean(x)).square())

    def centred(self, x):
        return x - self.mean(x)

    def normal(self, x):
        return self.centred(x) / (self.variance(x) + self.eps).sqrt()

    def finish(self, normal):
        return normal * self.weight + self.bias


_NO_PARAMETERS = (
    "The module has no parameters: `weight` and `bias` are missing, or plain tensors, which no optimizer finds and "
    "no file keeps. Make each an nn.Parameter of C numbers."
)


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_adds_eps_under_the_root",
    hint="`eps` is added to the standard deviation. It stands under the root, with the variance: sqrt(variance + eps).",
)
class EpsBesideTheRoot(_LayerNorm):
    def normal(self, x):
        return self.centred(x) / (self.variance(x).sqrt() + self.eps)


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_by_hand",
    hint="The variance is divided by C - 1, which is torch's default: [1, 0, 0, 0] gives 1.5 and not 1.732. "
    "Divide by C, as the mean of the squares does.",
)
class UnbiasedVariance(_LayerNorm):
    def variance(self, x):
        return x.var(-1, keepdim=True)


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_by_hand",
    hint="Two things of an old tutorial: x.std() divides by C - 1, and eps is added to it. "
    "Divide the squares by C, and add eps to the variance, under the root.",
)
class UnbiasedStdPlusEps(_LayerNorm):
    def normal(self, x):
        return self.centred(x) / (x.std(-1, keepdim=True) + self.eps)


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_by_hand",
    hint="The row is divided by the variance. Divide by its root, the standard deviation.",
)
class DividedByVariance(_LayerNorm):
    def normal(self, x):
        return self.centred(x) / (self.variance(x) + self.eps)


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_by_hand",
    hint="The mean is not subtracted from x. Subtract it, then divide.",
)
class MeanStays(_LayerNorm):
    def centred(self, x):
        return x


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_by_hand",
    hint="The divisor is the root mean square of x itself. The variance is the mean of (x - mean)^2.",
)
class SquaresNotCentred(_LayerNorm):
    def variance(self, x):
        return self.mean(x.square())


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_takes_each_token_by_itself",
    hint="Mean and variance run over tokens and features together. Each token stands alone: take the last axis only.",
)
class OverTokensAndFeatures(_LayerNorm):
    def mean(self, x):
        return x.mean(tuple(range(1, x.ndim)) or -1, keepdim=True)


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_takes_each_token_by_itself",
    hint="Mean and variance run over the tokens. Take them over the features of each token: the last axis, dim=-1.",
)
class OverTokens(_LayerNorm):
    def mean(self, x):
        return x.mean(-2 if x.ndim > 1 else -1, keepdim=True)


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_takes_each_token_by_itself",
    hint="Mean and variance run over the batch, as in a batch norm. "
    "A layer norm looks at one token alone: take the last axis, dim=-1.",
)
class OverTheBatch(_LayerNorm):
    def mean(self, x):
        return x.mean(0, keepdim=True)


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_takes_each_token_by_itself",
    hint="There is one mean and one variance for the whole tensor. "
    "Each token has its own: take the last axis, dim=-1, with keepdim=True.",
)
class OverEverything(_LayerNorm):
    def mean(self, x):
        return x.mean()


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_has_weight_and_bias",
    hint=_NO_PARAMETERS,
)
class PlainTensors(_LayerNorm):
    def make(self, d_model):
        self.weight, self.bias = torch.ones(d_model), torch.zeros(d_model)

    def finish(self, normal):
        return normal * self.weight.to(normal.dtype) + self.bias.to(normal.dtype)


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_has_weight_and_bias",
    hint="`weight` and `bias` are buffers: they are saved, but no optimizer finds them. Make each an nn.Parameter.",
)
class Buffers(_LayerNorm):
    def make(self, d_model):
        self.register_buffer("weight", torch.ones(d_model))
        self.register_buffer("bias", torch.zeros(d_model))


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_has_weight_and_bias",
    hint=_NO_PARAMETERS,
)
class NothingToLearn(_LayerNorm):
    def make(self, d_model):
        pass

    def finish(self, normal):
        return normal


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_has_weight_and_bias",
    hint="`weight` starts as zeros, so everything is 0 at first. Start it as ones.",
)
class StartsAtZero(_LayerNorm):
    def make(self, d_model):
        self.weight, self.bias = nn.Parameter(torch.zeros(d_model)), nn.Parameter(torch.zeros(d_model))


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_scales_then_shifts",
    hint="`weight` and `bias` exist, but are not applied: return weight * normal + bias.",
)
class WeightsUnused(_LayerNorm):
    def finish(self, normal):
        return normal + 0 * (self.weight + self.bias)


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_scales_then_shifts",
    hint="`bias` exists, but is not added: return weight * normal + bias.",
)
class BiasUnused(_LayerNorm):
    def finish(self, normal):
        return normal * self.weight + 0 * self.bias


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_scales_then_shifts",
    hint="`bias` is added before the row is multiplied by `weight`. Scale first, then shift: weight * normal + bias.",
)
class ShiftedThenScaled(_LayerNorm):
    def finish(self, normal):
        return (normal + self.bias) * self.weight


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_adds_eps_under_the_root",
    hint="The argument `eps` is ignored: it is always 1e-5.",
)
class EpsFixed(_LayerNorm):
    def __init__(self, d_model, eps=1e-5):
        super().__init__(d_model)


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_adds_eps_under_the_root",
    hint="`eps` is not added at all. Put it under the root, beside the variance.",
)
class WithoutEps(_LayerNorm):
    def normal(self, x):
        return self.centred(x) / self.variance(x).sqrt()


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_computes_in_float32",
    hint="It computes in x's own dtype: in float16 the square of 1000 is inf, in bfloat16 the mean loses its digits. "
    "Convert x to float32 first, and the result back at the end.",
)
class ComputedInHalf(_LayerNorm):
    def widened(self, x):
        return x


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_computes_in_float32",
    hint="Dtypes are left to chance: in half precision mean and variance lose their digits or overflow, and then the "
    "float32 weight makes the result float32. Convert x to float32 first, and the result back at the end.",
)
class LeftToChance(_LayerNorm):
    def forward(self, x):
        return self.finish(self.normal(x))


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_computes_in_float32",
    hint="The result stays in float32 where x was in half precision. Convert it back to x's dtype at the end.",
)
class StaysWide(_LayerNorm):
    def kind(self, x):
        return _wide(x).dtype


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_gradients",
    hint="Mean and variance are cut from the graph (detach, or torch.no_grad), so that x gets a wrong gradient. "
    "They depend on x: let the gradient through.",
)
class StatisticsDetached(_LayerNorm):
    def normal(self, x):
        with torch.no_grad():
            mean, variance = self.mean(x), self.variance(x)
        return (x - mean) / (variance + self.eps).sqrt()


@wrong(
    "LayerNorm",
    caught_by="test_layer_norm_gradients",
    hint="float64 is computed in float32, and loses half of its digits. Go to float32 only where x is narrower.",
)
class AlwaysFloat32(_LayerNorm):
    def widened(self, x):
        return x.float()


# RMSNorm -------------------------------------------------------------------------------------------------------------


class _RMSNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.make(d_model)

    def make(self, d_model):
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        return self.finish(self.normal(self.widened(x))).to(self.kind(x))

    def widened(self, x):
        return _wide(x)

    def kind(self, x):
        return x.dtype

    def mean(self, x):
        return x.mean(-1, keepdim=True)

    def normal(self, x):
        return x / (self.mean(x.square()) + self.eps).sqrt()

    def finish(self, normal):
        return normal * self.weight


_NO_WEIGHT = (
    "The module has no parameters: `weight` is missing, or a plain tensor, which no optimizer finds and no file keeps. "
    "Make it an nn.Parameter of C numbers."
)
_LENGTH = "The row is divided by its length. Take the mean of the squares, not their sum: the mean square becomes 1."


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_by_hand",
    hint="The mean is subtracted first, as in a layer norm. An RMS norm only divides: do not centre the row.",
)
class Centred(_RMSNorm):
    def normal(self, x):
        return super().normal(x - self.mean(x))


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_by_hand",
    hint="The divisor is the standard deviation, the root of the mean of (x - mean)^2. Take the mean of x^2 itself.",
)
class DividedByStd(_RMSNorm):
    def normal(self, x):
        return x / (x.var(-1, correction=0, keepdim=True) + self.eps).sqrt()


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_by_hand",
    hint=_LENGTH,
)
class DividedByLength(_RMSNorm):
    def normal(self, x):
        return x / (x.square().sum(-1, keepdim=True) + self.eps).sqrt()


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_by_hand",
    hint=_LENGTH,
)
class DividedByNorm(_RMSNorm):
    def normal(self, x):
        return x / (x.norm(dim=-1, keepdim=True) + self.eps)


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_by_hand",
    hint="The row is divided by the mean square. Divide by its root.",
)
class RootForgotten(_RMSNorm):
    def normal(self, x):
        return x / (self.mean(x.square()) + self.eps)


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_by_hand",
    hint="The divisor is the mean of |x|. It is the root of the mean of x^2.",
)
class MeanOfSizes(_RMSNorm):
    def normal(self, x):
        return x / (self.mean(x.abs()) + self.eps)


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_takes_each_token_by_itself",
    hint="The mean square runs over tokens and features together. Each token stands alone: take the last axis only.",
)
class RMSOverTokensAndFeatures(_RMSNorm):
    def mean(self, x):
        return x.mean(tuple(range(1, x.ndim)) or -1, keepdim=True)


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_takes_each_token_by_itself",
    hint="The mean square runs over the tokens. Take it over the features of each token: the last axis, dim=-1.",
)
class RMSOverTokens(_RMSNorm):
    def mean(self, x):
        return x.mean(-2 if x.ndim > 1 else -1, keepdim=True)


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_takes_each_token_by_itself",
    hint="There is one mean square for the whole tensor. "
    "Each token has its own: take the last axis, dim=-1, with keepdim=True.",
)
class RMSOverEverything(_RMSNorm):
    def mean(self, x):
        return x.mean()


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_has_a_weight_alone",
    hint="There is a `bias`. An RMS norm scales and does not shift: leave the bias out.",
)
class WithBias(_RMSNorm):
    def make(self, d_model):
        super().make(d_model)
        self.bias = nn.Parameter(torch.zeros(d_model))

    def finish(self, normal):
        return normal * self.weight + self.bias


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_has_a_weight_alone",
    hint=_NO_WEIGHT,
)
class PlainWeight(_RMSNorm):
    def make(self, d_model):
        self.weight = torch.ones(d_model)

    def finish(self, normal):
        return normal * self.weight.to(normal.dtype)


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_has_a_weight_alone",
    hint=_NO_WEIGHT,
)
class NoWeight(_RMSNorm):
    def make(self, d_model):
        pass

    def finish(self, normal):
        return normal


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_has_a_weight_alone",
    hint="`weight` starts as zeros and 1 + weight is multiplied. Other models do so; here it starts as ones "
    "and is multiplied as it is, or saved weights would mean something else.",
)
class OnePlusWeight(_RMSNorm):
    def make(self, d_model):
        self.weight = nn.Parameter(torch.zeros(d_model))

    def finish(self, normal):
        return normal * (1 + self.weight)


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_has_a_weight_alone",
    hint="`weight` starts as zeros, so everything is 0 at first. Start it as ones.",
)
class WeightStartsAtZero(_RMSNorm):
    def make(self, d_model):
        self.weight = nn.Parameter(torch.zeros(d_model))


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_scales_by_weight",
    hint="`weight` exists, but is not multiplied.",
)
class WeightUnused(_RMSNorm):
    def finish(self, normal):
        return normal + 0 * self.weight


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_adds_eps_under_the_root",
    hint="`eps` is added to the root. It stands under it, beside the mean square: sqrt(mean(x^2) + eps).",
)
class EpsAfterTheRoot(_RMSNorm):
    def normal(self, x):
        return x / (self.mean(x.square()).sqrt() + self.eps)


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_adds_eps_under_the_root",
    hint="The argument `eps` is ignored: it is always 1e-5.",
)
class RMSEpsFixed(_RMSNorm):
    def __init__(self, d_model, eps=1e-5):
        super().__init__(d_model)


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_adds_eps_under_the_root",
    hint="`eps` is not added at all, so a row of zeros becomes NaN. Put it under the root, beside the mean square.",
)
class RMSWithoutEps(_RMSNorm):
    def normal(self, x):
        return x / self.mean(x.square()).sqrt()


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_computes_in_float32",
    hint="It computes in x's own dtype: in float16 the square of 1000 is inf, and the row becomes 0. "
    "Convert x to float32 first, and the result back at the end.",
)
class SquaredInHalf(_RMSNorm):
    def widened(self, x):
        return x


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_computes_in_float32",
    hint="Dtypes are left to chance: in float16 the square of 1000 is inf, so the row becomes 0, and then the float32 "
    "weight makes the result float32. Convert x to float32 first, and the result back at the end.",
)
class RMSLeftToChance(_RMSNorm):
    def forward(self, x):
        return self.finish(self.normal(x))


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_rounds_at_the_end",
    hint="A step on the way is rounded to x's dtype, such as the root before the row is divided by it. "
    "Convert x to float32 first, and round once, at the very end.",
)
class RoundedTooEarly(_RMSNorm):
    def forward(self, x):
        root = (self.mean(_wide(x).square()) + self.eps).sqrt()
        return self.finish(x / root.to(x.dtype)).to(x.dtype)


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_computes_in_float32",
    hint="The result stays in float32 where x was in half precision. Convert it back to x's dtype at the end.",
)
class RMSStaysWide(_RMSNorm):
    def kind(self, x):
        return _wide(x).dtype


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_gradients",
    hint="float64 is computed in float32, and loses half of its digits. Go to float32 only where x is narrower.",
)
class RMSAlwaysFloat32(_RMSNorm):
    def widened(self, x):
        return x.float()


@wrong(
    "RMSNorm",
    caught_by="test_rms_norm_gradients",
    hint="The mean square is cut from the graph (detach, or torch.no_grad), so that x gets a wrong gradient. "
    "It depends on x: let the gradient through.",
)
class SquaresDetached(_RMSNorm):
    def normal(self, x):
        return x / (self.mean(x.detach().square()) + self.eps).sqrt()


# MLP -----------------------------------------------------------------------------------------------------------------


class _MLP(nn.Module):
    def __init__(self, d_model, d_ff, bias=True, activation=F.gelu):
        super().__init__()
        self.activation = activation
        self.make(d_model, d_ff, bias)

    def make(self, d_model, d_ff, bias):
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


@wrong(
    "MLP",
    caught_by="test_mlp_by_hand",
    hint="There is no activation between the layers, so two linear maps make but one. Return down(activation(up(x))).",
)
class WithoutActivation(_MLP):
    def forward(self, x):
        return self.down(self.up(x))


@wrong(
    "MLP",
    caught_by="test_mlp_uses_exact_gelu",
    hint="The default activation is ReLU. Here it is F.gelu.",
)
class ReluByDefault(_MLP):
    def __init__(self, d_model, d_ff, bias=True, activation=F.relu):
        super().__init__(d_model, d_ff, bias, activation)


@wrong(
    "MLP",
    caught_by="test_mlp_uses_the_activation_it_is_given",
    hint="The argument `activation` is ignored: it is always ReLU, as in 2017. Keep the argument and call it.",
)
class AlwaysRelu(_MLP):
    def forward(self, x):
        return self.down(F.relu(self.up(x)))


@wrong(
    "MLP",
    caught_by="test_mlp_uses_the_activation_it_is_given",
    hint="The argument `activation` is ignored: it is always GELU. Keep the argument and call it.",
)
class AlwaysGelu(_MLP):
    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@wrong(
    "MLP",
    caught_by="test_mlp_uses_exact_gelu",
    hint="The default is GELU's tanh form. It is F.gelu as it stands; who wants GPT-2's form passes it.",
)
class TanhFormByDefault(_MLP):
    def __init__(self, d_model, d_ff, bias=True, activation=None):
        super().__init__(d_model, d_ff, bias, activation or (lambda x: F.gelu(x, approximate="tanh")))


@wrong(
    "MLP",
    caught_by="test_mlp_by_hand",
    hint="The activation comes last. It stands between the layers: down(activation(up(x))).",
)
class ActivatedLast(_MLP):
    def forward(self, x):
        return self.activation(self.down(self.up(x)))


@wrong(
    "MLP",
    caught_by="test_mlp_uses_exact_gelu",
    hint="The activation is applied after `down` as well. The result is a plain linear layer's: it must be free to be "
    "negative.",
)
class ActivatedTwice(_MLP):
    def forward(self, x):
        return self.activation(super().forward(x))


@wrong(
    "MLP",
    caught_by="test_mlp_by_hand",
    hint="The activation comes first. It stands between the layers: down(activation(up(x))).",
)
class ActivatedFirst(_MLP):
    def forward(self, x):
        return self.down(self.up(self.activation(x)))


@wrong(
    "MLP",
    caught_by="test_mlp_has_two_layers",
    hint="The argument `bias` is ignored: both layers have one. Hand it on to nn.Linear.",
)
class AlwaysWithBias(_MLP):
    def make(self, d_model, d_ff, bias):
        super().make(d_model, d_ff, True)


@wrong(
    "MLP",
    caught_by="test_mlp_has_two_layers",
    hint="`bias` reaches `up` alone. Both layers have a bias, or none has.",
)
class BiasOfUpAlone(_MLP):
    def make(self, d_model, d_ff, bias):
        super().make(d_model, d_ff, bias)
        self.down = nn.Linear(d_ff, d_model)


@wrong(
    "MLP",
    caught_by="test_mlp_has_two_layers",
    hint="`d_ff` is ignored: the hidden width is always 4 * d_model.",
)
class AlwaysFourTimes(_MLP):
    def make(self, d_model, d_ff, bias):
        super().make(d_model, 4 * d_model, bias)


@wrong(
    "MLP",
    caught_by="test_mlp_by_hand",
    hint="x is added to the result. The residual belongs to the block around the MLP, or it is added twice.",
)
class ResidualInside(_MLP):
    def forward(self, x):
        return x + super().forward(x)


# SwiGLU --------------------------------------------------------------------------------------------------------------


class _SwiGLU(nn.Module):
    bias = False

    def __init__(self, d_model, d_ff):
        super().__init__()
        d_ff = self.width(d_ff)
        self.gate = nn.Linear(d_model, d_ff, bias=self.bias)
        self.up = nn.Linear(d_model, d_ff, bias=self.bias)
        self.down = nn.Linear(d_ff, d_model, bias=self.bias)

    def width(self, d_ff):
        return d_ff

    def forward(self, x):
        return self.down(self.hidden(self.gate(x), self.up(x)))

    def hidden(self, gate, up):
        return F.silu(gate) * up


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_formula",
    hint="`gate` and `up` are exchanged. It trains as well, but weights of others mean something else: "
    "SiLU belongs to `gate`.",
)
class GateAndUpExchanged(_SwiGLU):
    def hidden(self, gate, up):
        return gate * F.silu(up)


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_by_hand",
    hint="The gate goes through a sigmoid, which is the older GLU. Use SiLU: gate * sigmoid(gate).",
)
class SigmoidGate(_SwiGLU):
    def hidden(self, gate, up):
        return torch.sigmoid(gate) * up


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_by_hand",
    hint="The gate goes through GELU, which makes a GEGLU. Use SiLU: gate * sigmoid(gate).",
)
class GeluGate(_SwiGLU):
    def hidden(self, gate, up):
        return F.gelu(gate) * up


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_by_hand",
    hint="The gate goes through GELU's tanh form. Use SiLU: gate * sigmoid(gate).",
)
class GeluTanhGate(_SwiGLU):
    def hidden(self, gate, up):
        return F.gelu(gate, approximate="tanh") * up


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_by_hand",
    hint="The gate goes through ReLU, which makes a ReGLU. Use SiLU: gate * sigmoid(gate).",
)
class ReluGate(_SwiGLU):
    def hidden(self, gate, up):
        return F.relu(gate) * up


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_by_hand",
    hint="The gate is multiplied as it is, without SiLU.",
)
class BilinearGate(_SwiGLU):
    def hidden(self, gate, up):
        return gate * up


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_by_hand",
    hint="`gate` is not used. Multiply the hidden features by silu(gate(x)).",
)
class GateForgotten(_SwiGLU):
    def hidden(self, gate, up):
        return F.silu(up) + 0 * gate


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_by_hand",
    hint="`up` is not used. The gate only says how much of up(x) comes through: multiply by it.",
)
class UpForgotten(_SwiGLU):
    def hidden(self, gate, up):
        return F.silu(gate) + 0 * up


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_by_hand",
    hint="SiLU is applied to the product. It belongs to the gate alone: silu(gate(x)) * up(x).",
)
class ProductActivated(_SwiGLU):
    def hidden(self, gate, up):
        return F.silu(gate * up)


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_by_hand",
    hint="SiLU is applied to `gate` and to `up`. It belongs to the gate alone: silu(gate(x)) * up(x).",
)
class BothActivated(_SwiGLU):
    def hidden(self, gate, up):
        return F.silu(gate) * F.silu(up)


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_by_hand",
    hint="The gate is added. A gate multiplies: silu(gate(x)) * up(x).",
)
class GateAdded(_SwiGLU):
    def hidden(self, gate, up):
        return F.silu(gate) + up


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_has_three_layers",
    hint="The layers have a bias, nn.Linear's default. Say bias=False in all three.",
)
class BiasInSwiGLU(_SwiGLU):
    bias = True


@wrong(
    "SwiGLU",
    caught_by="test_swiglu_has_three_layers",
    hint="The hidden width is cut to two thirds of `d_ff`. Whoever makes the layer has chosen: use `d_ff` as it is.",
)
class WidthCut(_SwiGLU):
    def width(self, d_ff):
        return max(2 * d_ff // 3, 1)


# PreNormBlock, PostNormBlock -----------------------------------------------------------------------------------------
#
# A variant says wrongly how the parts are kept, how attention is called, or how the parts are put together.


class _Parts(nn.Module):
    def __init__(self, attention, mlp, norm1, norm2):
        super().__init__()
        self.keep(attention, mlp, norm1, norm2)

    def keep(self, attention, mlp, norm1, norm2):
        self.attention, self.mlp, self.norm1, self.norm2 = attention, mlp, norm1, norm2

    def forward(self, x, mask=None, positions=None, cache=None):
        return self.compose(x, lambda rows: self.attend(rows, mask, positions, cache))

    def attend(self, x, mask, positions, cache):
        return self.attention(x, mask=mask, positions=positions, cache=cache)

    def pre(self, x, attend):
        x = x + attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def post(self, x, attend):
        x = self.norm1(x + attend(x))
        return self.norm2(x + self.mlp(x))


class _NothingHandedOn(_Parts):
    def attend(self, x, mask, positions, cache):
        return self.attention(x)


class _MaskNotHandedOn(_Parts):
    def attend(self, x, mask, positions, cache):
        return self.attention(x, positions=positions, cache=cache)


class _PositionsNotHandedOn(_Parts):
    def attend(self, x, mask, positions, cache):
        return self.attention(x, mask=mask, cache=cache)


class _CacheNotHandedOn(_Parts):
    def attend(self, x, mask, positions, cache):
        return self.attention(x, mask=mask, positions=positions)


class _CacheCopied(_Parts):
    def attend(self, x, mask, positions, cache):
        return self.attention(x, mask=mask, positions=positions, cache=copy.copy(cache))


class _ItselfAsContext(_Parts):
    def attend(self, x, mask, positions, cache):
        return self.attention(x, context=x, mask=mask, positions=positions, cache=cache)


class _HandedOnByPlace(_Parts):
    def attend(self, x, mask, positions, cache):
        return self.attention(x, mask, positions, cache)


class _PartsInAList(_Parts):
    def keep(self, *parts):
        self.parts = nn.ModuleList(parts)

    def attend(self, x, mask, positions, cache):
        return self.parts[0](x, mask=mask, positions=positions, cache=cache)

    def pre(self, x, attend):
        x = x + attend(self.parts[2](x))
        return x + self.parts[1](self.parts[3](x))

    def post(self, x, attend):
        x = self.parts[2](x + attend(x))
        return self.parts[3](x + self.parts[1](x))


_HANDED_ON_HINTS = [
    (
        _NothingHandedOn,
        "hands_on_the_mask",
        "The attention is called with x alone. Hand on what the block was given: "
        "mask=mask, positions=positions, cache=cache.",
    ),
    (_MaskNotHandedOn, "hands_on_the_mask", "The mask is not handed on to the attention: add mask=mask to the call."),
    (
        _PositionsNotHandedOn,
        "hands_on_positions",
        "The positions are not handed on to the attention: add positions=positions to the call.",
    ),
    (
        _CacheNotHandedOn,
        "hands_on_the_cache",
        "The cache is not handed on to the attention, so that each chunk forgets the ones before: "
        "add cache=cache to the call.",
    ),
    (
        _CacheCopied,
        "hands_on_the_cache",
        "The attention gets a copy of the cache, so that nothing is kept in the one that was given. "
        "Hand on the object itself.",
    ),
    (
        _HandedOnByPlace,
        "hands_on_the_mask",
        "The attention is called by place, but its second argument is the context: the mask lands there. "
        "Name them: mask=mask, positions=positions, cache=cache.",
    ),
    (
        _ItselfAsContext,
        "takes_any_size",
        "The attention is given x as its context. Self-attention takes none: with a context it is cross-attention, "
        "which turns nothing by position and has no cache.",
    ),
    (
        _PartsInAList,
        "keeps_its_parts",
        "The parts are in a list, so that weights are named parts.0 and so on. "
        "Keep each as an attribute with its argument's name: self.attention = attention.",
    ),
]


def _hand_on_mistakes(piece, prefix, compose):
    """Enter the mistakes in keeping and calling parts, put together as this piece does."""
    for base, check, hint in _HANDED_ON_HINTS:
        name = prefix.title() + base.__name__.removeprefix("_")
        variant = type(name, (base,), {"compose": getattr(base, compose)})
        wrong(piece, caught_by=f"test_{compose}_norm_{check}", hint=hint)(variant)


_hand_on_mistakes("PreNormBlock", "pre", "pre")


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="This is a post-norm block: the norms stand after the sums. "
    "Here each norm stands before its branch: x + attention(norm1(x)).",
)
class PostNormInstead(_Parts):
    def compose(self, x, attend):
        return self.post(x, attend)


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="There are no residuals. Add what came in to what each branch gives: x = x + attention(norm1(x)).",
)
class PreNormWithoutResiduals(_Parts):
    def compose(self, x, attend):
        return self.mlp(self.norm2(attend(self.norm1(x))))


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="x is overwritten by its norm, so that the residual adds norm(x). Add x as it came: x + attention(norm1(x)).",
)
class ResidualFromTheNorm(_Parts):
    def compose(self, x, attend):
        x = self.norm1(x)
        x = x + attend(x)
        x = self.norm2(x)
        return x + self.mlp(x)


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="The norm stands at the end of each branch: x + norm1(attention(x)). "
    "It stands at the beginning: x + attention(norm1(x)).",
)
class BranchOutputNormed(_Parts):
    def compose(self, x, attend):
        x = x + self.norm1(attend(x))
        return x + self.norm2(self.mlp(x))


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="norm1 is used twice. The MLP has a norm of its own, norm2.",
)
class PreNormOneNormTwice(_Parts):
    def compose(self, x, attend):
        x = x + attend(self.norm1(x))
        return x + self.mlp(self.norm1(x)) + 0 * self.norm2(x)


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="norm1 and norm2 are exchanged: norm1 belongs to the attention and norm2 to the MLP.",
)
class PreNormNormsExchanged(_Parts):
    def compose(self, x, attend):
        x = x + attend(self.norm2(x))
        return x + self.mlp(self.norm1(x))


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="The MLP reads x without a norm. It reads norm2(x).",
)
class MLPWithoutItsNorm(_Parts):
    def compose(self, x, attend):
        x = x + attend(self.norm1(x))
        return x + self.mlp(x) + 0 * self.norm2(x)


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="Attention and MLP both read the x that came in. They stand in a row: "
    "the MLP reads x after the attention was added.",
)
class PreNormInParallel(_Parts):
    def compose(self, x, attend):
        return x + attend(self.norm1(x)) + self.mlp(self.norm2(x))


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="The second residual adds the x that came in, so that what the attention gave is lost from it. "
    "Add the x that the MLP's norm reads.",
)
class PreNormSecondResidualOld(_Parts):
    def compose(self, x, attend):
        middle = x + attend(self.norm1(x))
        return x + self.mlp(self.norm2(middle))


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="The second residual is missing: return x + mlp(norm2(x)).",
)
class PreNormSecondResidualMissing(_Parts):
    def compose(self, x, attend):
        return self.mlp(self.norm2(x + attend(self.norm1(x))))


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="The first residual is missing: x = x + attention(norm1(x)).",
)
class PreNormFirstResidualMissing(_Parts):
    def compose(self, x, attend):
        x = attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="The MLP comes before the attention. First attention with norm1, then the MLP with norm2.",
)
class PreNormMLPFirst(_Parts):
    def compose(self, x, attend):
        x = x + self.mlp(self.norm2(x))
        return x + attend(self.norm1(x))


@wrong(
    "PreNormBlock",
    caught_by="test_pre_norm_by_hand",
    hint="`+=` writes into the x of the caller. Make a new one: x = x + ...",
)
class PreNormInPlace(_Parts):
    def compose(self, x, attend):
        x += attend(self.norm1(x))
        x += self.mlp(self.norm2(x))
        return x


_hand_on_mistakes("PostNormBlock", "post", "post")


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="This is a pre-norm block: the norms stand before the branches. "
    "Here each norm stands after a sum: norm1(x + attention(x)).",
)
class PreNormInstead(_Parts):
    def compose(self, x, attend):
        return self.pre(x, attend)


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="There are no residuals. Add what came in to what each branch gives, then norm: norm1(x + attention(x)).",
)
class PostNormWithoutResiduals(_Parts):
    def compose(self, x, attend):
        return self.norm2(self.mlp(self.norm1(attend(x))))


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="The norm holds the branch alone: x + norm1(attention(x)). It holds the sum: norm1(x + attention(x)).",
)
class BranchNormedNotTheSum(_Parts):
    def compose(self, x, attend):
        x = x + self.norm1(attend(x))
        return x + self.norm2(self.mlp(x))


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="norm1 is used twice. The second sum has a norm of its own, norm2.",
)
class PostNormOneNormTwice(_Parts):
    def compose(self, x, attend):
        x = self.norm1(x + attend(x))
        return self.norm1(x + self.mlp(x)) + 0 * self.norm2(x)


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="norm1 and norm2 are exchanged: norm1 follows the attention and norm2 the MLP.",
)
class PostNormNormsExchanged(_Parts):
    def compose(self, x, attend):
        x = self.norm2(x + attend(x))
        return self.norm1(x + self.mlp(x))


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="The first norm is missing: x = norm1(x + attention(x)) comes before the MLP.",
)
class FirstNormMissing(_Parts):
    def compose(self, x, attend):
        x = x + attend(x)
        return self.norm2(x + self.mlp(x)) + 0 * self.norm1(x)


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="The MLP reads norm1's result, but the sum without the norm is added to it. "
    "After norm1, x is its result, in both places.",
)
class SecondResidualBeforeTheNorm(_Parts):
    def compose(self, x, attend):
        x = x + attend(x)
        return self.norm2(x + self.mlp(self.norm1(x)))


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="The second residual adds the x that came in. Add what the MLP reads: norm1's result.",
)
class PostNormSecondResidualOld(_Parts):
    def compose(self, x, attend):
        middle = self.norm1(x + attend(x))
        return self.norm2(x + self.mlp(middle))


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="The MLP reads the x that came in. It reads what norm1 gives: x = norm1(x + attention(x)).",
)
class MLPReadsTheOldX(_Parts):
    def compose(self, x, attend):
        middle = self.norm1(x + attend(x))
        return self.norm2(middle + self.mlp(x))


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="The second residual is missing: return norm2(x + mlp(x)).",
)
class PostNormSecondResidualMissing(_Parts):
    def compose(self, x, attend):
        return self.norm2(self.mlp(self.norm1(x + attend(x))))


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="The first residual is missing: x = norm1(x + attention(x)).",
)
class PostNormFirstResidualMissing(_Parts):
    def compose(self, x, attend):
        x = self.norm1(attend(x))
        return self.norm2(x + self.mlp(x))


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="The MLP comes before the attention. First attention and norm1, then the MLP and norm2.",
)
class PostNormMLPFirst(_Parts):
    def compose(self, x, attend):
        x = self.norm2(x + self.mlp(x))
        return self.norm1(x + attend(x))


@wrong(
    "PostNormBlock",
    caught_by="test_post_norm_by_hand",
    hint="`+=` writes into the x of the caller. Make a new one: x = x + ...",
)
class PostNormInPlace(_Parts):
    def compose(self, x, attend):
        x += attend(x)
        x = self.norm1(x)
        x += self.mlp(x)
        return self.norm2(x)


# DecoderBlock --------------------------------------------------------------------------------------------------------


class _Decoder(nn.Module):
    def __init__(self, self_attention, cross_attention, mlp, norm1, norm2, norm3):
        super().__init__()
        self.self_attention, self.cross_attention, self.mlp = self_attention, cross_attention, mlp
        self.norm1, self.norm2, self.norm3 = norm1, norm2, norm3

    def forward(self, x, context, mask=None, context_mask=None):
        mask, context_mask = self.masks(mask, context_mask)
        return self.compose(
            x,
            context,
            lambda rows: self.self_attention(rows, mask=mask),
            lambda rows, context: self.cross_attention(rows, context=context, mask=context_mask),
        )

    def masks(self, mask, context_mask):
        return mask, context_mask

    def compose(self, x, context, attend, read):
        x = self.norm1(x + attend(x))
        x = self.norm2(x + read(x, context))
        return self.norm3(x + self.mlp(x))


@wrong(
    "DecoderBlock",
    caught_by="test_each_attention_gets_its_mask",
    hint="The masks are exchanged. `mask` is for the self-attention, `context_mask` for the cross-attention.",
)
class MasksExchanged(_Decoder):
    def masks(self, mask, context_mask):
        return context_mask, mask


@wrong(
    "DecoderBlock",
    caught_by="test_each_attention_gets_its_mask",
    hint="Neither mask is handed on: give mask=mask to the self-attention, mask=context_mask to the cross-attention.",
)
class NoMaskHandedOn(_Decoder):
    def masks(self, mask, context_mask):
        return None, None


@wrong(
    "DecoderBlock",
    caught_by="test_each_attention_gets_its_mask",
    hint="`mask` is not handed on to the self-attention, so that tokens see the ones to come.",
)
class OwnMaskForgotten(_Decoder):
    def masks(self, mask, context_mask):
        return None, context_mask


@wrong(
    "DecoderBlock",
    caught_by="test_each_attention_gets_its_mask",
    hint="`context_mask` is not handed on to the cross-attention, so that it reads the padding of the context.",
)
class ContextMaskForgotten(_Decoder):
    def masks(self, mask, context_mask):
        return mask, None


@wrong(
    "DecoderBlock",
    caught_by="test_each_attention_gets_its_mask",
    hint="`mask` goes to both attentions. The cross-attention looks at other tokens and has its own: `context_mask`.",
)
class OneMaskForBoth(_Decoder):
    def masks(self, mask, context_mask):
        return mask, mask


@wrong(
    "DecoderBlock",
    caught_by="test_each_attention_gets_its_mask",
    hint="The masks are handed on by place, but an attention's second argument is the context and its third the mask. "
    "Name them: mask=mask.",
)
class MasksByPlace(_Decoder):
    def forward(self, x, context, mask=None, context_mask=None):
        def attend(rows):
            return self.self_attention(rows, mask)

        def read(rows, context):
            return self.cross_attention(rows, context, context_mask)

        return self.compose(x, context, attend, read)


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="The cross-attention gets no context, so that it reads x itself: hand on context=context.",
)
class CrossReadsItself(_Decoder):
    def compose(self, x, context, attend, read):
        return super().compose(x, context, attend, lambda rows, context: read(rows, None))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="The context asks and x answers. x asks, the context answers: cross_attention(x, context=context).",
)
class ContextAsks(_Decoder):
    def compose(self, x, context, attend, read):
        return super().compose(x, context, attend, lambda rows, context: read(context, rows))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="The self-attention reads the context, too. It reads x alone; the cross-attention reads the context.",
)
class BothReadTheContext(_Decoder):
    def forward(self, x, context, mask=None, context_mask=None):
        x = self.norm1(x + self.self_attention(x, context=context, mask=mask))
        x = self.norm2(x + self.cross_attention(x, context=context, mask=context_mask))
        return self.norm3(x + self.mlp(x))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_reads_the_context",
    hint="The self-attention is given x as its context. It takes none: with a context it is cross-attention.",
)
class DecoderItselfAsContext(_Decoder):
    def forward(self, x, context, mask=None, context_mask=None):
        x = self.norm1(x + self.self_attention(x, context=x, mask=mask))
        x = self.norm2(x + self.cross_attention(x, context=context, mask=context_mask))
        return self.norm3(x + self.mlp(x))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="The norms stand before the branches. This is the block of 2017: norm1(x + self_attention(x)) and so on.",
)
class DecoderPreNorm(_Decoder):
    def compose(self, x, context, attend, read):
        x = x + attend(self.norm1(x))
        x = x + read(self.norm2(x), context)
        return x + self.mlp(self.norm3(x))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="The norms hold the branches alone: x + norm1(self_attention(x)). They hold the sums.",
)
class DecoderBranchesNormed(_Decoder):
    def compose(self, x, context, attend, read):
        x = x + self.norm1(attend(x))
        x = x + self.norm2(read(x, context))
        return x + self.norm3(self.mlp(x))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="The cross-attention comes first. The order is self-attention, cross-attention, MLP.",
)
class CrossBeforeSelf(_Decoder):
    def compose(self, x, context, attend, read):
        x = self.norm1(x + read(x, context))
        x = self.norm2(x + attend(x))
        return self.norm3(x + self.mlp(x))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_reads_the_context",
    hint="The cross-attention asks with the x that came in, before the self-attention. It asks with norm1's result.",
)
class CrossAsksWithTheOldX(_Decoder):
    def compose(self, x, context, attend, read):
        middle = self.norm1(x + attend(x))
        middle = self.norm2(middle + read(x, context))
        return self.norm3(middle + self.mlp(middle))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="norm2 and norm3 are exchanged: norm2 follows the cross-attention and norm3 the MLP.",
)
class DecoderNormsExchanged(_Decoder):
    def compose(self, x, context, attend, read):
        x = self.norm1(x + attend(x))
        x = self.norm3(x + read(x, context))
        return self.norm2(x + self.mlp(x))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="norm1 is used three times. Each sum has a norm of its own: norm1, norm2, norm3.",
)
class DecoderOneNorm(_Decoder):
    def compose(self, x, context, attend, read):
        x = self.norm1(x + attend(x))
        x = self.norm1(x + read(x, context))
        return self.norm1(x + self.mlp(x)) + 0 * (self.norm2(x) + self.norm3(x))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="There is no residual around the cross-attention: x = norm2(x + cross_attention(x, context)).",
)
class CrossWithoutResidual(_Decoder):
    def compose(self, x, context, attend, read):
        x = self.norm1(x + attend(x))
        x = self.norm2(read(x, context))
        return self.norm3(x + self.mlp(x))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="There are no residuals. Add what came in to what each branch gives, then norm.",
)
class DecoderWithoutResiduals(_Decoder):
    def compose(self, x, context, attend, read):
        return self.norm3(self.mlp(self.norm2(read(self.norm1(attend(x)), context))))


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="The context is normed before it is read. It comes ready from the encoder: read it as it is.",
)
class ContextNormed(_Decoder):
    def compose(self, x, context, attend, read):
        return super().compose(x, self.norm2(context), attend, read)


@wrong(
    "DecoderBlock",
    caught_by="test_decoder_by_hand",
    hint="`+=` writes into the x of the caller. Make a new one: x = x + ...",
)
class DecoderInPlace(_Decoder):
    def compose(self, x, context, attend, read):
        x += attend(x)
        x = self.norm1(x)
        x += read(x, context)
        x = self.norm2(x)
        x += self.mlp(x)
        return self.norm3(x)
