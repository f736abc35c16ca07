"""The checks of chapter 05: norms, MLPs and whole layers. Outside truth: torch, float64."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .same import expect, filled, gradients, outcome, parameters_named, random_gradient, rng, same
from .toys import KeywordAttention, LayerCache, ListCache, Plus, Times, TorchAttention, ToyAttention

# What a piece may not call, since it is torch's version of the same thing. The batch and group norms are the same
# sum over other axes, so that a transposed input makes layer norms of them.
FORBIDDEN = {
    "LayerNorm": [
        F.layer_norm,
        torch.layer_norm,
        torch.native_layer_norm,
        F.group_norm,
        F.instance_norm,
        F.batch_norm,
        "aten::native_layer_norm",
        "aten::native_group_norm",
        "aten::native_batch_norm",
    ],
    "RMSNorm": [F.rms_norm, torch.rms_norm, "aten::_fused_rms_norm", "aten::rms_norm"],
}

B, T, S, C, D_FF = 2, 5, 7, 11, 13


def _x(*shape, salt=0, dtype=torch.float32):
    return torch.randn(shape, generator=rng(salt)).to(dtype)


def _starts_as(module, **values):
    """Break the promise unless these are the module's only parameters, all of them learn, and they start so."""
    parameters_named(module, {name: tuple(value.shape) for name, value in values.items()})
    parameters = dict(module.named_parameters())
    for name, value in values.items():
        learns = name in parameters and parameters[name].requires_grad
        expect(learns, f"{name}: expected a parameter that learns, an nn.Parameter")
        same(parameters[name].detach().float(), value, f"{name} at the start")


def _with_weights(module, **shapes):
    """The module with random weights, once it has parameters of these names and shapes."""
    parameters_named(module, shapes)
    return filled(module)


def _shapes(module):
    return {name: tuple(value.shape) for name, value in sorted(module.state_dict().items())}


def _changed(x, call):
    """The input as it is after the call."""
    call(x)
    return x


def _gradients_of(module, x):
    """The gradients of x and of the parameters, by name, that come back from a random gradient of the output."""
    got = {"x": gradients(module, x)[0]}
    for name, parameter in module.named_parameters():
        expect(parameter.grad is not None, f"expected a gradient of {name}, got none: is it used?")
        got[name] = parameter.grad
    return got


def _same_gradients(module, truth, x, what):
    """Break the promise unless all gradients are those of `truth(x, weights)`."""
    got = _gradients_of(module, x)
    weights = {name: value.detach().clone().requires_grad_() for name, value in module.state_dict().items()}
    x = x.clone().requires_grad_()
    out = truth(x, weights)
    out.backward(random_gradient(out.shape, out.dtype))
    for name, value in {"x": x, **weights}.items():
        same(got[name], value.grad, f"gradient of {name} in {what}")


# LayerNorm, RMSNorm --------------------------------------------------------------------------------------------------


def _layer_norm(x, weight=None, bias=None, eps=1e-5):
    """torch's layer norm in float64, in x's dtype."""
    weight, bias = (None if y is None else y.double() for y in (weight, bias))
    return F.layer_norm(x.double(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def _rms_norm(x, weight=None, eps=1e-5):
    """torch's RMS norm in float64, in x's dtype."""
    return F.rms_norm(x.double(), x.shape[-1:], None if weight is None else weight.double(), eps).to(x.dtype)


def _near(got, want, what, wanted, most=0.01):
    """Break the promise unless got is about want: for sums that lose digits, some in this order, some in that."""
    same(torch.zeros_like(got), torch.zeros_like(want), what)  # shape and dtype
    apart = (got.double() - want.double()).abs().max().item()
    expect(apart < most, f"{what}: expected {wanted}, got numbers up to {apart:.2g} away from it")


_ROW = torch.tensor([1.0, 3.0, 6.0, 12.0]).bfloat16()  # its root mean square, 6.892, is no bfloat16


def _ask_norm(Norm):
    """Results that tell the known mistakes of either norm apart."""
    x = _x(3, T, C)
    small = torch.tensor([[2e-3, -1e-3, 3e-3], [4e-3, 1e-3, -2e-3]])

    def in_half(x, most):
        """The dtype of a result in half precision, and whether it is the module's own in float32, but for `most`."""
        module = Norm(x.shape[-1])
        got, wide = module(x), module(x.float()).to(x.dtype)
        return str(got.dtype), (got.to(x.dtype).float() - wide.float()).abs().max().item() < most

    return [
        outcome(lambda: _shapes(Norm(C))),
        outcome(lambda: sorted(name for name, _ in Norm(C).named_parameters())),
        outcome(lambda: list(Norm(C).state_dict().values())),
        outcome(lambda: Norm(C)(x)),
        outcome(lambda: filled(Norm(C))(x)),
        outcome(lambda: Norm(3)(small)),
        outcome(lambda: Norm(3, 0.1)(small)),
        outcome(lambda: Norm(4)(torch.zeros(2, 4))),
        outcome(lambda: in_half(x.half() * 1000, 0.1)),
        outcome(lambda: in_half(torch.tensor([128.0, 129.0, 130.0, 132.0]).bfloat16(), 0.1)),
        outcome(lambda: in_half(_ROW, 0.001)[1]),
        outcome(lambda: gradients(Norm(C), x)),
        outcome(lambda: _changed(x.clone(), Norm(C))),
        outcome(lambda: Norm(C)(x.double() / 3)),
    ]


def probe_LayerNorm(LayerNorm):
    """Results that tell the known mistakes apart."""
    return _ask_norm(LayerNorm)


def test_layer_norm_by_hand(LayerNorm):
    """[1, 0, 0, 0] has mean 0.25 and variance 0.1875, so it becomes [1.732, -0.577, -0.577, -0.577]."""
    got = LayerNorm(4)(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    want = torch.tensor([0.75, -0.25, -0.25, -0.25]) / math.sqrt(0.1875 + 1e-5)
    same(got, want, "LayerNorm(4) of [1, 0, 0, 0]")


def test_layer_norm_has_weight_and_bias(LayerNorm):
    """`weight` starts as ones and `bias` as zeros, (C,) both, and both learn."""
    for d_model in (11, 1):
        _starts_as(LayerNorm(d_model), weight=torch.ones(d_model), bias=torch.zeros(d_model))


def test_layer_norm_takes_each_token_by_itself(LayerNorm):
    """Mean and variance are those of one token's C features, whatever stands before the last axis."""
    module = LayerNorm(11)
    for shape in ((11,), (5, 11), (2, 5, 11), (2, 3, 5, 11), (1, 1, 11)):
        x = _x(*shape)
        same(module(x), _layer_norm(x), f"LayerNorm of {shape}")
    x = _x(2, 11, 5).transpose(1, 2)
    same(module(x), _layer_norm(x), "LayerNorm of a non-contiguous x")
    spike = torch.eye(101)[:2] * 100
    same(LayerNorm(101)(spike), _layer_norm(spike), "LayerNorm(101) of a 100 among zeros, which becomes 10")
    same(module.eval()(x[:1]), _layer_norm(x[:1]), "LayerNorm after eval()")


def test_layer_norm_scales_then_shifts(LayerNorm):
    """The normal row is multiplied by `weight`, then `bias` is added: feature by feature."""
    module = _with_weights(LayerNorm(11), weight=(11,), bias=(11,))
    state, x = module.state_dict(), _x(2, 5, 11)
    same(module(x), _layer_norm(x, state["weight"], state["bias"]), "LayerNorm(11) with random weight and bias")


def test_layer_norm_adds_eps_under_the_root(LayerNorm):
    """With eps = 0.05, [0.2, -0.2] of variance 0.04 is divided by the root of 0.09: [0.667, -0.667]."""
    x = torch.tensor([0.2, -0.2])
    same(LayerNorm(2, eps=0.05)(x), torch.tensor([2 / 3, -2 / 3]), "LayerNorm(2, eps=0.05) of [0.2, -0.2]")
    x = _x(3, 5, 11) * 0.003
    same(LayerNorm(11)(x), _layer_norm(x), "LayerNorm(11) of numbers around 0.003, eps = 1e-5")
    same(LayerNorm(11, 1e-3)(x), _layer_norm(x, eps=1e-3), "LayerNorm(11, 1e-3) of numbers around 0.003")


def test_equal_features_leave_the_bias(LayerNorm):
    """A row of equal numbers has no variance: what is left is the bias, and never NaN."""
    for d_model in (8, 1):
        module = _with_weights(LayerNorm(d_model), weight=(d_model,), bias=(d_model,))
        x = torch.tensor([[0.0], [3.0], [-5.0]]).expand(3, d_model)
        want = module.state_dict()["bias"].expand(3, d_model)
        _near(module(x), want, f"LayerNorm({d_model}) of rows of zeros, threes and minus fives", "the bias")


def test_level_and_scale_do_not_matter(LayerNorm):
    """A row times 1000 or plus 30 has the same normal form as the row itself."""
    module, x = LayerNorm(11), _x(3, 5, 11)
    want = _layer_norm(x)
    for what, moved in (("1000 * x", x * 1000), ("x + 30", x + 30)):
        _near(module(moved), want, f"LayerNorm of {what}", "that of x")


def test_layer_norm_computes_in_float32(LayerNorm):
    """float16 and bfloat16 come back as such, but mean and variance are taken in float32."""
    for dtype in (torch.float16, torch.bfloat16):
        x = _x(2, 5, 11, dtype=dtype) * 1000
        same(LayerNorm(11)(x), _layer_norm(x), f"LayerNorm of {dtype}, numbers around 1000")
        module = _with_weights(LayerNorm(11), weight=(11,), bias=(11,)).to(dtype)
        state = module.state_dict()
        want = _layer_norm(x, state["weight"], state["bias"])
        _near(module(x), want, f"LayerNorm of {dtype}, parameters too", "torch's result", most=0.1)
    x = torch.tensor([128.0, 129.0, 130.0, 132.0]).bfloat16()  # the mean, 129.75, is no bfloat16
    same(LayerNorm(4)(x), _layer_norm(x), "LayerNorm of [128, 129, 130, 132] in bfloat16")
    x = _x(2, 5, 11)
    same(LayerNorm(11).half()(x), _layer_norm(x), "LayerNorm of float32, parameters in float16")
    x = _x(2, 5, 11, dtype=torch.float64)
    same(LayerNorm(11)(x), _layer_norm(x), "LayerNorm of float64")


def test_layer_norm_gradients(LayerNorm):
    """x, `weight` and `bias` get the gradients that torch's layer norm gives, in float64."""
    module = _with_weights(LayerNorm(11).double(), weight=(11,), bias=(11,))
    x = _x(2, 5, 11, dtype=torch.float64)

    def truth(x, w):
        return F.layer_norm(x, (11,), w["weight"], w["bias"], 1e-5)

    same(module(x), truth(x, module.state_dict()), "LayerNorm in float64")
    _same_gradients(module, truth, x, "LayerNorm")


def probe_RMSNorm(RMSNorm):
    """Results that tell the known mistakes apart."""
    return _ask_norm(RMSNorm)


def test_rms_norm_by_hand(RMSNorm):
    """[1, 7] has the mean square 25 and the root 5, so it becomes [0.2, 1.4]."""
    same(RMSNorm(2)(torch.tensor([1.0, 7.0])), torch.tensor([0.2, 1.4]), "RMSNorm(2) of [1, 7]")
    got = RMSNorm(4)(torch.tensor([[1.0, 1.0, 1.0, 3.0]]))
    same(got, torch.tensor([[1.0, 1.0, 1.0, 3.0]]) / 3**0.5, "RMSNorm(4) of [1, 1, 1, 3], mean square 3")


def test_rms_norm_has_a_weight_alone(RMSNorm):
    """`weight` (C,) starts as ones and learns; there is no bias."""
    for d_model in (11, 1):
        _starts_as(RMSNorm(d_model), weight=torch.ones(d_model))


def test_rms_norm_takes_each_token_by_itself(RMSNorm):
    """The mean square is that of one token's C features, whatever stands before the last axis."""
    module = RMSNorm(11)
    for shape in ((11,), (5, 11), (2, 5, 11), (2, 3, 5, 11), (1, 1, 11)):
        x = _x(*shape)
        same(module(x), _rms_norm(x), f"RMSNorm of {shape}")
    x = _x(2, 11, 5).transpose(1, 2)
    same(module(x), _rms_norm(x), "RMSNorm of a non-contiguous x")
    spike = torch.eye(101)[:2] * 100
    same(RMSNorm(101)(spike), _rms_norm(spike), "RMSNorm(101) of a 100 among zeros, which becomes the root of 101")
    same(module.eval()(x[:1]), _rms_norm(x[:1]), "RMSNorm after eval()")


def test_the_level_stays(RMSNorm):
    """The mean is not subtracted: a row of fives becomes ones, a row of zeros stays zeros."""
    for d_model in (8, 1):
        x = torch.tensor([[5.0], [-3.0], [0.0]]).expand(3, d_model)
        want = torch.tensor([[1.0], [-1.0], [0.0]]).expand(3, d_model)
        same(RMSNorm(d_model)(x), want, f"RMSNorm({d_model}) of rows of fives, minus threes and zeros")
    x = _x(2, 5, 11) + 100
    same(RMSNorm(11)(x), _rms_norm(x), "RMSNorm(11) of numbers around 100")


def test_rms_norm_scales_by_weight(RMSNorm):
    """The normal row is multiplied by `weight`, feature by feature."""
    module, x = _with_weights(RMSNorm(11), weight=(11,)), _x(2, 5, 11)
    same(module(x), _rms_norm(x, module.state_dict()["weight"]), "RMSNorm(11) with a random weight")


def test_rms_norm_adds_eps_under_the_root(RMSNorm):
    """With eps = 0.05, [0.2, -0.2] of mean square 0.04 is divided by the root of 0.09: [0.667, -0.667]."""
    x = torch.tensor([0.2, -0.2])
    same(RMSNorm(2, eps=0.05)(x), torch.tensor([2 / 3, -2 / 3]), "RMSNorm(2, eps=0.05) of [0.2, -0.2]")
    x = _x(3, 5, 11) * 0.003
    same(RMSNorm(11)(x), _rms_norm(x), "RMSNorm(11) of numbers around 0.003, eps = 1e-5")
    same(RMSNorm(11, 1e-3)(x), _rms_norm(x, eps=1e-3), "RMSNorm(11, 1e-3) of numbers around 0.003")


def test_rms_norm_computes_in_float32(RMSNorm):
    """float16 and bfloat16 come back as such, but squares, mean and root are taken in float32: 1000^2 is no float16."""
    for dtype in (torch.float16, torch.bfloat16):
        x = _x(2, 5, 11, dtype=dtype) * 1000
        same(RMSNorm(11)(x), _rms_norm(x), f"RMSNorm of {dtype}, numbers around 1000")
        module = _with_weights(RMSNorm(11), weight=(11,)).to(dtype)
        same(module(x), _rms_norm(x, module.state_dict()["weight"]), f"RMSNorm of {dtype}, its weight too")
    x = _x(2, 5, 11)
    same(RMSNorm(11).half()(x), _rms_norm(x), "RMSNorm of float32, its weight in float16")
    x = _x(2, 5, 11, dtype=torch.float64)
    same(RMSNorm(11)(x), _rms_norm(x), "RMSNorm of float64")


def test_rms_norm_rounds_at_the_end(RMSNorm):
    """In bfloat16, [1, 3, 6, 12] is divided by 6.892 in float32 and then rounded: [0.1455, 0.4355, 0.8711, 1.742]."""
    got, want = RMSNorm(4)(_ROW), _rms_norm(_ROW)
    same(got, want, "RMSNorm of [1, 3, 6, 12] in bfloat16")
    same(got.float(), want.float(), "RMSNorm of [1, 3, 6, 12] in bfloat16, to the last digit")


def test_rms_norm_gradients(RMSNorm):
    """x and `weight` get the gradients that torch's RMS norm gives, in float64."""
    module = _with_weights(RMSNorm(11).double(), weight=(11,))
    x = _x(2, 5, 11, dtype=torch.float64)

    def truth(x, w):
        return F.rms_norm(x, (11,), w["weight"], 1e-5)

    same(module(x), truth(x, module.state_dict()), "RMSNorm in float64")
    _same_gradients(module, truth, x, "RMSNorm")


# MLP, SwiGLU ---------------------------------------------------------------------------------------------------------


def _linear_shapes(bias, **sizes):
    """The names and shapes of linear layers, given as name=(inputs, outputs)."""
    shapes = {f"{name}.weight": (outputs, inputs) for name, (inputs, outputs) in sizes.items()}
    return shapes | ({f"{name}.bias": (outputs,) for name, (_, outputs) in sizes.items()} if bias else {})


def _gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


def _mlp(MLP, bias=True, **options):
    module = MLP(C, D_FF, bias=bias, **options).double()
    return _with_weights(module, **_linear_shapes(bias, up=(C, D_FF), down=(D_FF, C)))


def _torch_mlp(x, w, activation=F.gelu):
    hidden = activation(F.linear(x, w["up.weight"], w.get("up.bias")))
    return F.linear(hidden, w["down.weight"], w.get("down.bias"))


def probe_MLP(MLP):
    """Results that tell the known mistakes apart."""
    x = _x(B, T, C, dtype=torch.float64)
    return [
        outcome(lambda: _shapes(MLP(C, D_FF))),
        outcome(lambda: _shapes(MLP(C, D_FF, bias=False))),
        outcome(lambda: filled(MLP(C, D_FF).double())(x)),
        outcome(lambda: filled(MLP(C, D_FF, bias=False).double())(x)),
        outcome(lambda: filled(MLP(C, D_FF, activation=torch.tanh).double())(x)),
        outcome(lambda: filled(MLP(C, D_FF, activation=_gelu_tanh).double())(x)),
        outcome(lambda: _changed(x.clone(), MLP(C, D_FF).double())),
    ]


def test_mlp_by_hand(MLP):
    """One feature, two hidden ones, ReLU between: 2 goes up to [2, -1], is cut to [2, 0], and comes down as 102."""
    module = MLP(1, 2, activation=torch.relu)
    parameters_named(module, _linear_shapes(True, up=(1, 2), down=(2, 1)))
    weights = {"up.weight": [[1.0], [-1.0]], "up.bias": [0.0, 1.0], "down.weight": [[1.0, 10.0]], "down.bias": [100.0]}
    module.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    same(module(torch.tensor([[2.0], [-3.0]])), torch.tensor([[102.0], [140.0]]), "the MLP of 2 and of -3")


def test_mlp_has_two_layers(MLP):
    """`up` leads from C to F features and `down` back, with a bias each, or without when bias=False."""
    parameters_named(MLP(11, 13), _linear_shapes(True, up=(11, 13), down=(13, 11)))
    parameters_named(MLP(11, 13, bias=False), _linear_shapes(False, up=(11, 13), down=(13, 11)))
    parameters_named(MLP(11, 3, False), _linear_shapes(False, up=(11, 3), down=(3, 11)))
    expect(all(p.requires_grad for p in MLP(11, 13).parameters()), "expected parameters that learn (requires_grad)")


def test_mlp_uses_exact_gelu(MLP):
    """Without another wish the activation is F.gelu in its exact form, in float64."""
    x = _x(B, T, C, dtype=torch.float64)
    for bias in (True, False):
        module = _mlp(MLP, bias)
        same(module(x), _torch_mlp(x, module.state_dict()), f"MLP with bias={bias}")


def test_mlp_uses_the_activation_it_is_given(MLP):
    """Any function that keeps the shape can be the activation: tanh, GELU's tanh form, SiLU."""
    x = _x(B, T, C, dtype=torch.float64)
    for name, activation in (("torch.tanh", torch.tanh), ("GELU's tanh form", _gelu_tanh), ("nn.SiLU()", nn.SiLU())):
        module = _mlp(MLP, activation=activation)
        same(module(x), _torch_mlp(x, module.state_dict(), activation), f"MLP with {name}")
    module = _with_weights(MLP(C, 3, False, torch.sigmoid), **_linear_shapes(False, up=(C, 3), down=(3, C)))
    x = x.float()
    same(module(x), _torch_mlp(x, module.state_dict(), torch.sigmoid), "MLP(11, 3, False, torch.sigmoid)")


def test_mlp_takes_each_token_by_itself(MLP):
    """Any axes before the last, one token alone, a non-contiguous x: the same rule; train and eval are alike."""
    module = _mlp(MLP)
    state = module.state_dict()
    for shape in ((C,), (5, C), (2, 3, 5, C), (1, 1, C)):
        x = _x(*shape, dtype=torch.float64)
        same(module(x), _torch_mlp(x, state), f"MLP of {shape}")
    x = _x(B, C, T, dtype=torch.float64).transpose(1, 2)
    same(module.eval()(x), _torch_mlp(x, state), "MLP of a non-contiguous x after eval()")
    got = MLP(C, D_FF).bfloat16()(x.bfloat16())
    expect(got.dtype == torch.bfloat16, f"MLP in bfloat16: expected dtype torch.bfloat16, got {got.dtype}")


def test_mlp_gradients(MLP):
    """x and all four parameters get the gradients of the formula, in float64."""
    _same_gradients(_mlp(MLP), _torch_mlp, _x(B, T, C, dtype=torch.float64), "MLP")


_SWIGLU = _linear_shapes(False, gate=(C, D_FF), up=(C, D_FF), down=(D_FF, C))


def _swiglu(SwiGLU):
    return _with_weights(SwiGLU(C, D_FF).double(), **_SWIGLU)


def _torch_swiglu(x, w):
    gate, up = F.linear(x, w["gate.weight"]), F.linear(x, w["up.weight"])
    return F.linear(F.silu(gate) * up, w["down.weight"])


def probe_SwiGLU(SwiGLU):
    """Results that tell the known mistakes apart."""
    x = _x(B, T, C, dtype=torch.float64)
    return [
        outcome(lambda: _shapes(SwiGLU(C, D_FF))),
        outcome(lambda: filled(SwiGLU(C, D_FF).double())(x)),
        outcome(lambda: _changed(x.clone(), SwiGLU(C, D_FF).double())),
    ]


def test_swiglu_by_hand(SwiGLU):
    """Gate 1, up 2, down 10: x = 1 gives 0.7311 * 2 * 10 = 14.62, and x = -1 gives -0.2689 * -2 * 10 = 5.379."""
    module = SwiGLU(1, 1)
    parameters_named(module, _linear_shapes(False, gate=(1, 1), up=(1, 1), down=(1, 1)))
    weights = {"gate.weight": 1.0, "up.weight": 2.0, "down.weight": 10.0}
    module.load_state_dict({name: torch.tensor([[value]]) for name, value in weights.items()})
    want = torch.tensor([[20 / (1 + math.exp(-1))], [20 / (1 + math.e)]])
    same(module(torch.tensor([[1.0], [-1.0]])), want, "the SwiGLU of 1 and of -1")


def test_swiglu_has_three_layers(SwiGLU):
    """`gate` and `up` lead from C to F features, `down` back to C, and none has a bias."""
    parameters_named(SwiGLU(11, 13), _SWIGLU)
    parameters_named(SwiGLU(7, 3), _linear_shapes(False, gate=(7, 3), up=(7, 3), down=(3, 7)))
    expect(all(p.requires_grad for p in SwiGLU(11, 13).parameters()), "expected parameters that learn (requires_grad)")


def test_a_closed_gate_lets_nothing_through(SwiGLU):
    """Where the gate is 0 nothing comes through, whatever `up` says."""
    module = _swiglu(SwiGLU)
    state = module.state_dict()
    module.load_state_dict({**state, "gate.weight": torch.zeros_like(state["gate.weight"])})
    x = _x(B, T, C, dtype=torch.float64)
    same(module(x), torch.zeros_like(x), "SwiGLU with gate.weight = 0")


def test_swiglu_formula(SwiGLU):
    """down(silu(gate(x)) * up(x)), in float64."""
    module, x = _swiglu(SwiGLU), _x(B, T, C, dtype=torch.float64)
    same(module(x), _torch_swiglu(x, module.state_dict()), "SwiGLU(11, 13)")


def test_swiglu_takes_each_token_by_itself(SwiGLU):
    """Any axes before the last, one token alone, a non-contiguous x: the same rule; train and eval are alike."""
    module = _swiglu(SwiGLU)
    state = module.state_dict()
    for shape in ((C,), (5, C), (2, 3, 5, C), (1, 1, C)):
        x = _x(*shape, dtype=torch.float64)
        same(module(x), _torch_swiglu(x, state), f"SwiGLU of {shape}")
    x = _x(B, C, T, dtype=torch.float64).transpose(1, 2)
    same(module.eval()(x), _torch_swiglu(x, state), "SwiGLU of a non-contiguous x after eval()")
    got = SwiGLU(C, D_FF).bfloat16()(x.bfloat16())
    expect(got.dtype == torch.bfloat16, f"SwiGLU in bfloat16: expected dtype torch.bfloat16, got {got.dtype}")


def test_swiglu_gradients(SwiGLU):
    """x and all three weights get the gradients of the formula, in float64."""
    _same_gradients(_swiglu(SwiGLU), _torch_swiglu, _x(B, T, C, dtype=torch.float64), "SwiGLU")


# PreNormBlock, PostNormBlock -----------------------------------------------------------------------------------------


def _norm(salt):
    return filled(nn.LayerNorm(C, dtype=torch.float64), salt)


def _two_linear(salt):
    up, down = nn.Linear(C, D_FF, dtype=torch.float64), nn.Linear(D_FF, C, dtype=torch.float64)
    return filled(nn.Sequential(up, nn.GELU(), down), salt)


def _parts(attention=ToyAttention):
    """An attention, an MLP and two norms, all different, in float64."""
    return attention(C, seed=1), _two_linear(20), _norm(30), _norm(40)


def _pre_norm(parts, x, **given):
    attention, mlp, norm1, norm2 = parts
    middle = x + attention(norm1(x), **given)
    return middle + mlp(norm2(middle))


def _post_norm(parts, x, **given):
    attention, mlp, norm1, norm2 = parts
    middle = norm1(x + attention(x, **given))
    return norm2(middle + mlp(middle))


def _mask(*shape):
    """About half of it is True, in every row both."""
    mask = torch.rand(shape, generator=rng(5)) < 0.5
    mask[..., 0], mask[..., -1] = True, False
    return mask


def _positions(*lead):
    """Numbers with gaps, from 2 on, other ones in each sequence."""
    return torch.arange(math.prod(lead) * T).view(*lead, T) * 3 + 2


def _numbers():
    """Parts that one can follow by hand: attention adds 10, the MLP 100, norm1 doubles and norm2 triples."""
    return Plus(10), Plus(100), Times(2), Times(3)


def _ask_block(Block):
    """Results that tell the known mistakes of either block apart."""
    x, mask = _x(B, T, C, dtype=torch.float64), _mask(T, T)

    def ask(question, parts=_parts):
        """Ask a fresh block, with an x of its own: some mistakes change it."""
        return outcome(lambda: question(Block(*parts()), x.clone()))

    def fed(block, x):
        cache = LayerCache()
        cache.append(_x(B, 1, 2, C, salt=2, dtype=torch.float64), _x(B, 1, 2, C, salt=3, dtype=torch.float64))
        return torch.cat([block(x[:, :3], cache=cache), block(x[:, 3:], cache=cache)], dim=1), cache.length

    return [
        ask(lambda block, x: _shapes(block)),
        ask(lambda block, x: block(torch.ones(1, 1, 1)), _numbers),
        ask(lambda block, x: block(x)),
        ask(lambda block, x: block(x, mask=mask)),
        ask(lambda block, x: block(x, positions=_positions())),
        ask(fed),
        ask(lambda block, x: [block(x, mask=mask), block(x)][1]),
        ask(lambda block, x: gradients(block, x)),
        ask(lambda block, x: _changed(x, block)),
        ask(lambda block, x: block(x, mask=mask), lambda: _parts(KeywordAttention)),
    ]


_BLOCK_PARTS = {"attention": 2, "mlp": 3, "norm1": 5, "norm2": 7}


def _keeps_its_parts(Block, names):
    """Break the promise unless every part can be found under the name of its argument."""
    block = Block(**{name: nn.Linear(size, 11) for name, size in names.items()})
    want = {f"{name}.weight": (11, size) for name, size in names.items()}
    parameters_named(block, want | {f"{name}.bias": (11,) for name in names})
    by_place = Block(*(nn.Linear(size, 11, bias=False) for size in names.values()))
    parameters_named(by_place, want)


def _hands_on_mask(Block, truth):
    x = _x(B, T, C, dtype=torch.float64)
    block, parts = Block(*_parts()), _parts()
    for shape in ((T, T), (B, 1, 1, T), (B, 1, T, T)):
        mask = _mask(*shape)
        same(block(x, mask=mask), truth(parts, x, mask=mask), f"{_name(truth)} with a mask of shape {shape}")
    same(block(x), truth(parts, x), f"{_name(truth)} without a mask, after calls with one")
    one, blind = x[:, :1], torch.zeros(1, 1, dtype=torch.bool)
    same(block(one, blind), truth(parts, one, mask=blind), "one token under the mask [[False]]")


def _hands_on_positions(Block, truth):
    x = _x(B, T, C, dtype=torch.float64)
    block, parts = Block(*_parts()), _parts()
    for positions in (_positions(), _positions(B)):
        what = f"{_name(truth)} with positions of shape {tuple(positions.shape)}"
        same(block(x, positions=positions), truth(parts, x, positions=positions), what)
    one, first = x[:, :1], torch.tensor([0])
    same(block(one, positions=first), truth(parts, one, positions=first), "one token at positions [0]")
    mask = _mask(T, T)
    want = truth(parts, x, mask=mask, positions=_positions())
    same(block(x, mask, _positions()), want, "mask and positions given in this order")


def _hands_on_cache(Block, truth):
    x = _x(B, T, C, dtype=torch.float64)
    block, parts = Block(*_parts()), _parts()
    for Cache in (LayerCache, ListCache):
        cache, own = Cache(), Cache()
        got, want = block(x[:, :3], cache=cache), truth(parts, x[:, :3], cache=own)
        same(got, want, f"{_name(truth)} of the first 3 tokens, with an empty cache")
        expect(cache.length == 3, f"after 3 tokens: expected 3 in the cache that was given, got {cache.length}")
        got, want = block(x[:, 3:], cache=cache), truth(parts, x[:, 3:], cache=own)
        same(got, want, f"{_name(truth)} of the next 2 tokens, with the same cache")
        expect(cache.length == T, f"after {T} tokens: expected {T} in the cache, got {cache.length}")
    cache, own = LayerCache(), LayerCache()
    got = block(x, None, None, cache)
    same(got, truth(parts, x, cache=own), "mask, positions and cache given in this order")
    same(cache.keys, own.keys, "keys in the cache")


def _calls_by_keyword(Block, truth):
    x, mask = _x(B, T, C, dtype=torch.float64), _mask(T, T)
    given = {"mask": mask, "positions": _positions()}
    got = Block(*_parts(KeywordAttention))(x, **given, cache=LayerCache())
    same(got, truth(_parts(), x, **given, cache=LayerCache()), f"{_name(truth)} of an attention that wants keywords")


def _takes_any_size(Block, truth):
    block, parts = Block(*_parts()), _parts()
    for shape in ((1, T, C), (B, 1, C), (1, 1, C)):
        x = _x(*shape, dtype=torch.float64)
        same(block(x), truth(parts, x), f"{_name(truth)} of {shape}")
    x = _x(B, C, T, dtype=torch.float64).transpose(1, 2)
    same(block.eval()(x), truth(parts, x), f"{_name(truth)} of a non-contiguous x after eval()")
    halves = [part.bfloat16() for part in _parts()]
    got = Block(*halves)(x.bfloat16())
    expect(got.dtype == torch.bfloat16, f"parts and x in bfloat16: expected dtype torch.bfloat16, got {got.dtype}")


def _passes_gradients(Block, truth):
    x, parts = _x(B, T, C, dtype=torch.float64), _parts()
    names = dict(zip(_BLOCK_PARTS, parts, strict=True))
    got = _gradients_of(Block(*_parts()), x)
    (want,) = gradients(lambda x: truth(parts, x), x)
    same(got["x"], want, "gradient of x")
    for name, part in names.items():
        for inner, parameter in part.named_parameters():
            full = f"{name}.{inner}"
            expect(full in got, f"expected a parameter {full}, got {', '.join(sorted(got.keys() - {'x'}))}")
            same(got[full], parameter.grad, f"gradient of {full}")


def _name(truth):
    return {_pre_norm: "PreNormBlock", _post_norm: "PostNormBlock"}[truth]


def _equals_torch(Block, norm_first):
    """With the weights of nn.TransformerEncoderLayer the block computes what that does."""
    kind = {"activation": "gelu", "batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    layer = filled(nn.TransformerEncoderLayer(12, 3, 17, dropout=0.0, **kind))
    attention = TorchAttention(12, 3)
    attention.theirs.load_state_dict(layer.self_attn.state_dict())
    block = Block(attention, nn.Sequential(layer.linear1, nn.GELU(), layer.linear2), layer.norm1, layer.norm2)
    x, mask = _x(B, T, 12, dtype=torch.float64), _mask(T, T)
    what = f"the block with the weights of nn.TransformerEncoderLayer(norm_first={norm_first})"
    same(block(x), layer(x), what)
    same(block(x, mask=mask), layer(x, src_mask=~mask), f"{what}, with a mask")


def probe_PreNormBlock(PreNormBlock):
    """Results that tell the known mistakes apart."""
    return _ask_block(PreNormBlock)


def test_pre_norm_by_hand(PreNormBlock):
    """Attention adds 10, MLP 100, norms double and triple: 1 becomes 1 + (2 + 10) = 13, then 13 + (39 + 100) = 152."""
    got = PreNormBlock(*_numbers())(torch.ones(1, 1, 1))
    same(got, torch.full((1, 1, 1), 152.0), "the block of x = 1")


def test_pre_norm_keeps_its_parts(PreNormBlock):
    """The parts are kept as `attention`, `mlp`, `norm1` and `norm2`: so their weights are named."""
    _keeps_its_parts(PreNormBlock, _BLOCK_PARTS)


def test_silent_branches_leave_x_alone(PreNormBlock):
    """Where attention and MLP give 0, x passes unchanged: no norm stands in the way."""
    x = _x(B, T, C, dtype=torch.float64)
    same(PreNormBlock(Times(0), Times(0), _norm(30), _norm(40))(x), x, "the block with branches of 0")


def test_pre_norm_equals_torch(PreNormBlock):
    """With the same weights it computes what nn.TransformerEncoderLayer(norm_first=True) computes, in float64."""
    _equals_torch(PreNormBlock, norm_first=True)


def test_pre_norm_takes_any_size(PreNormBlock):
    """One token, one sequence, a non-contiguous x, bfloat16: the same rule; train and eval are alike."""
    _takes_any_size(PreNormBlock, _pre_norm)


def test_pre_norm_hands_on_the_mask(PreNormBlock):
    """The mask reaches the attention, and a later call without one sees everything."""
    _hands_on_mask(PreNormBlock, _pre_norm)


def test_pre_norm_hands_on_positions(PreNormBlock):
    """The positions reach the attention, (T,) or (B, T)."""
    _hands_on_positions(PreNormBlock, _pre_norm)


def test_pre_norm_hands_on_the_cache(PreNormBlock):
    """The attention gets the very cache that was given, so that 3 tokens and then 2 leave 5 in it."""
    _hands_on_cache(PreNormBlock, _pre_norm)


def test_pre_norm_calls_attention_by_keyword(PreNormBlock):
    """mask=..., positions=... and cache=... are named in the call of the attention: it may have them in any order."""
    _calls_by_keyword(PreNormBlock, _pre_norm)


def test_pre_norm_gradients(PreNormBlock):
    """x and all weights of the parts get the gradients of the formula, in float64."""
    _passes_gradients(PreNormBlock, _pre_norm)


def probe_PostNormBlock(PostNormBlock):
    """Results that tell the known mistakes apart."""
    return _ask_block(PostNormBlock)


def test_post_norm_by_hand(PostNormBlock):
    """Attention adds 10, MLP 100, norms double and triple: 1 becomes 2 * (1 + 11) = 24, then 3 * (24 + 124) = 444."""
    got = PostNormBlock(*_numbers())(torch.ones(1, 1, 1))
    same(got, torch.full((1, 1, 1), 444.0), "the block of x = 1")


def test_post_norm_keeps_its_parts(PostNormBlock):
    """The parts are kept as `attention`, `mlp`, `norm1` and `norm2`: so their weights are named."""
    _keeps_its_parts(PostNormBlock, _BLOCK_PARTS)


def test_silent_branches_leave_the_norms(PostNormBlock):
    """Where attention and MLP give 0, what is left are the two norms, one after the other."""
    x, norm1, norm2 = _x(B, T, C, dtype=torch.float64), _norm(30), _norm(40)
    same(PostNormBlock(Times(0), Times(0), norm1, norm2)(x), norm2(norm1(x)), "the block with branches of 0")


def test_post_norm_equals_torch(PostNormBlock):
    """With the same weights it computes what nn.TransformerEncoderLayer(norm_first=False) computes, in float64."""
    _equals_torch(PostNormBlock, norm_first=False)


def test_post_norm_takes_any_size(PostNormBlock):
    """One token, one sequence, a non-contiguous x, bfloat16: the same rule; train and eval are alike."""
    _takes_any_size(PostNormBlock, _post_norm)


def test_post_norm_hands_on_the_mask(PostNormBlock):
    """The mask reaches the attention, and a later call without one sees everything."""
    _hands_on_mask(PostNormBlock, _post_norm)


def test_post_norm_hands_on_positions(PostNormBlock):
    """The positions reach the attention, (T,) or (B, T)."""
    _hands_on_positions(PostNormBlock, _post_norm)


def test_post_norm_hands_on_the_cache(PostNormBlock):
    """The attention gets the very cache that was given, so that 3 tokens and then 2 leave 5 in it."""
    _hands_on_cache(PostNormBlock, _post_norm)


def test_post_norm_calls_attention_by_keyword(PostNormBlock):
    """mask=..., positions=... and cache=... are named in the call of the attention: it may have them in any order."""
    _calls_by_keyword(PostNormBlock, _post_norm)


def test_post_norm_gradients(PostNormBlock):
    """x and all weights of the parts get the gradients of the formula, in float64."""
    _passes_gradients(PostNormBlock, _post_norm)


# DecoderBlock --------------------------------------------------------------------------------------------------------

_DECODER_PARTS = {"self_attention": 2, "cross_attention": 3, "mlp": 5, "norm1": 7, "norm2": 13, "norm3": 17}


def _decoder_parts(attention=ToyAttention):
    """Two attentions, an MLP and three norms, all different, in float64."""
    return attention(C, seed=1), attention(C, seed=2), _two_linear(20), _norm(30), _norm(40), _norm(50)


def _decoder(parts, x, context, mask=None, context_mask=None):
    self_attention, cross_attention, mlp, norm1, norm2, norm3 = parts
    x = norm1(x + self_attention(x, mask=mask))
    x = norm2(x + cross_attention(x, context=context, mask=context_mask))
    return norm3(x + mlp(x))


def _decoder_numbers():
    """Self-attention adds 10, cross-attention 100 to the context, the MLP 1000; norms times 2, 3 and 5."""
    return Plus(10), Plus(100), Plus(1000), Times(2), Times(3), Times(5)


def _pair(context_tokens=S):
    return _x(B, T, C, dtype=torch.float64), _x(B, context_tokens, C, salt=1, dtype=torch.float64)


def probe_DecoderBlock(DecoderBlock):
    """Results that tell the known mistakes apart."""
    (x, context), even = _pair(), _pair(T)
    one, seven = torch.ones(1, 1, 1), torch.full((1, 1, 1), 7.0)

    def both_masks(context_tokens):
        masks = {"mask": _mask(T, T), "context_mask": ~_mask(T, context_tokens)}
        return DecoderBlock(*_decoder_parts())(*_pair(context_tokens), **masks)

    return [
        outcome(lambda: _shapes(DecoderBlock(*_decoder_parts()))),
        outcome(lambda: DecoderBlock(*_decoder_numbers())(one, seven)),
        outcome(lambda: DecoderBlock(*_decoder_parts())(x, context)),
        outcome(lambda: DecoderBlock(*_decoder_parts())(*even)),
        outcome(lambda: DecoderBlock(*_decoder_parts())(*even, mask=_mask(T, T))),
        outcome(lambda: DecoderBlock(*_decoder_parts())(*even, context_mask=_mask(T, T))),
        outcome(lambda: both_masks(T)),
        outcome(lambda: both_masks(S)),
        outcome(lambda: DecoderBlock(*_decoder_parts(KeywordAttention))(*even, mask=_mask(T, T))),
        outcome(lambda: gradients(DecoderBlock(*_decoder_parts()), *even)),
        outcome(lambda: _changed(x.clone(), lambda x: DecoderBlock(*_decoder_parts())(x, context))),
    ]


def test_decoder_by_hand(DecoderBlock):
    """Branches add 10, 100, 1000, norms times 2, 3, 5; of 1, context 7: 2 * 12 = 24, 3 * 131 = 393, 5 * 1786 = 8930."""
    got = DecoderBlock(*_decoder_numbers())(torch.ones(1, 1, 1), torch.full((1, 1, 1), 7.0))
    same(got, torch.full((1, 1, 1), 8930.0), "the block of x = 1 and context 7")


def test_decoder_keeps_its_parts(DecoderBlock):
    """The parts are kept as `self_attention`, `cross_attention`, `mlp`, `norm1`, `norm2` and `norm3`."""
    _keeps_its_parts(DecoderBlock, _DECODER_PARTS)


def test_decoder_reads_the_context(DecoderBlock):
    """x asks and the context answers: 5 tokens read 7, one reads 7, 5 read one, and 5 tokens come out of 5."""
    block, parts = DecoderBlock(*_decoder_parts()), _decoder_parts()
    x, context = _pair()
    for a, b in ((x, context), (x[:, :1], context), (x, context[:, :1]), _pair(T), (x[:1], context[:1])):
        want = _decoder(parts, a, b)
        same(block(a, b), want, f"DecoderBlock of {a.shape[1]} tokens that read {b.shape[1]}")
    same(block.eval()(x=x, context=context), _decoder(parts, x, context), "DecoderBlock after eval()")
    halves = [part.bfloat16() for part in _decoder_parts()]
    got = DecoderBlock(*halves)(x.bfloat16(), context.bfloat16())
    expect(got.dtype == torch.bfloat16, f"parts and x in bfloat16: expected dtype torch.bfloat16, got {got.dtype}")


def test_decoder_norms_the_sums(DecoderBlock):
    """Where all branches give 0, what is left are the three norms, one after the other."""
    x, context = _pair()
    norms = [_norm(30), _norm(40), _norm(50)]
    got = DecoderBlock(Times(0), ToyAttention(C, seed=2), Times(0), *norms)(x, 0 * context)
    same(got, norms[2](norms[1](norms[0](x))), "the block with branches of 0")


def test_decoder_equals_torch(DecoderBlock):
    """With the same weights it computes what nn.TransformerDecoderLayer computes, in float64."""
    kind = {"activation": "gelu", "batch_first": True, "dtype": torch.float64}
    layer = filled(nn.TransformerDecoderLayer(12, 3, 17, dropout=0.0, **kind))
    own, cross = TorchAttention(12, 3), TorchAttention(12, 3)
    own.theirs.load_state_dict(layer.self_attn.state_dict())
    cross.theirs.load_state_dict(layer.multihead_attn.state_dict())
    mlp = nn.Sequential(layer.linear1, nn.GELU(), layer.linear2)
    block = DecoderBlock(own, cross, mlp, layer.norm1, layer.norm2, layer.norm3)
    x, context = _x(B, T, 12, dtype=torch.float64), _x(B, S, 12, salt=1, dtype=torch.float64)
    mask, context_mask = _mask(T, T), _mask(T, S)
    want = layer(x, context, tgt_mask=~mask, memory_mask=~context_mask)
    what = "the block with the weights of nn.TransformerDecoderLayer"
    same(block(x, context), layer(x, context), what)
    same(block(x, context, mask=mask, context_mask=context_mask), want, f"{what}, with masks")


def test_each_attention_gets_its_mask(DecoderBlock):
    """`mask` is the self-attention's and `context_mask` the cross-attention's: neither reaches the other."""
    block, parts = DecoderBlock(*_decoder_parts()), _decoder_parts()
    x, context = _pair()
    for shape in ((T, T), (B, 1, 1, T), (B, 1, T, T)):
        mask = _mask(*shape)
        want = _decoder(parts, x, context, mask=mask)
        same(block(x, context, mask=mask), want, f"DecoderBlock with a mask of shape {shape}")
    for shape in ((T, S), (B, 1, 1, S), (B, 1, T, S)):
        mask = _mask(*shape)
        want = _decoder(parts, x, context, context_mask=mask)
        same(block(x, context, context_mask=mask), want, f"DecoderBlock with a context_mask of shape {shape}")
    x, context = _pair(T)
    mask, context_mask = _mask(T, T), ~_mask(T, T)
    want = _decoder(parts, x, context, mask, context_mask)
    same(block(x, context, mask, context_mask), want, "mask and context_mask given in this order, S = T")
    same(block(x, context, mask), _decoder(parts, x, context, mask), "DecoderBlock with a mask alone, S = T")
    want = _decoder(parts, x, context, context_mask=mask)
    same(block(x, context, context_mask=mask), want, "DecoderBlock with a context_mask alone, S = T")
    same(block(x, context), _decoder(parts, x, context), "DecoderBlock without masks, after calls with them")
    one, other, blind = x[:, :1], context[:, :1], torch.zeros(1, 1, dtype=torch.bool)
    want = _decoder(parts, one, other, blind, blind)
    same(block(one, other, blind, blind), want, "one token and one of context, both masks [[False]]")


def test_decoder_calls_attention_by_keyword(DecoderBlock):
    """The masks are named in the calls of both attentions, mask=...: they may take it in any place."""
    x, context = _pair()
    mask, context_mask = _mask(T, T), _mask(T, S)
    got = DecoderBlock(*_decoder_parts(KeywordAttention))(x, context, mask=mask, context_mask=context_mask)
    same(got, _decoder(_decoder_parts(), x, context, mask, context_mask), "DecoderBlock of attentions by keyword")


def test_decoder_gradients(DecoderBlock):
    """x, the context and all weights of the parts get the gradients of the formula, in float64."""
    parts, block, (x, context) = _decoder_parts(), DecoderBlock(*_decoder_parts()), _pair()
    got = gradients(block, x, context)
    want = gradients(lambda x, context: _decoder(parts, x, context), x, context)
    for name, a, b in zip(("x", "the context"), got, want, strict=True):
        same(a, b, f"gradient of {name}")
    learned = {name: p.grad for name, p in block.named_parameters()}
    for name, part in zip(_DECODER_PARTS, parts, strict=True):
        for inner, parameter in part.named_parameters():
            full = f"{name}.{inner}"
            expect(learned.get(full) is not None, f"expected a gradient of {full}, got none")
            same(learned[full], parameter.grad, f"gradient of {full}")
