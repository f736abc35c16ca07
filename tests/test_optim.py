"""The checks of chapter 08: AdamW, schedules, clipping, decay groups. Outside truth: torch, values worked by hand."""

import copy
import inspect
import math
from importlib import import_module

import torch
from torch import nn

from .same import Broken, expect, first_optimizer, outcome, raises, rng, same

before_the_clock = first_optimizer

# What a piece may not call, since it is torch's version of the same thing.
_ADAM = [import_module(f"torch.optim.{name}") for name in ("adam", "adamw")]
_CLIP = ("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_")
FORBIDDEN = {
    "AdamW": [
        torch.optim.AdamW,
        torch.optim.Adam,
        *(f for module in _ADAM for f in vars(module).values() if inspect.isfunction(f) and "adam" in f.__name__),
        "aten::_fused_adam",
    ],
    "clip_gradients": [getattr(nn.utils, name) for name in _CLIP if hasattr(nn.utils, name)],
}


def _number(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


# AdamW ---------------------------------------------------------------------------------------------------------------

# Of odd sizes; one without an axis, one without an entry.
SHAPES = ((5, 3), (7,), (), (0, 2), (2, 3, 5))

# For checks of one thing alone: what else can go wrong makes no difference. Powers of these betas are exact, and eps
# is so small that its place does not matter.
PLAIN = {"lr": 0.1, "betas": (0.5, 0.75), "eps": 1e-30, "weight_decay": 0.0}


def _weights(salt=0, dtype=torch.float64):
    """Values of some weights; the last one is not contiguous."""
    made = [torch.randn(shape, generator=rng(salt + i)).to(dtype) for i, shape in enumerate(SHAPES)]
    return [*made[:-1], made[-1].mT]


def _gradients(n_steps, salt=100):
    """Gradients of such weights for some steps: of every size, from step to step and from weight to weight."""
    scale = [10.0 ** (step % 3 - 1) for step in range(n_steps)]
    return [[g * scale[step] for g in _weights(salt + 10 * step)] for step in range(n_steps)]


def _steps(make, start, gradients, rates=None):
    """The weights after each step. `make` gets parameters, and gives an optimizer; a gradient may be None."""
    parameters = [nn.Parameter(x.clone()) for x in start]
    optimizer = make(parameters)
    history = []
    for step, given in enumerate(gradients):
        for p, g in zip(parameters, given, strict=True):
            p.grad = None if g is None else g.clone()
        if rates is not None:
            for group in optimizer.param_groups:
                group["lr"] = rates[step]
        optimizer.step()
        history.append([p.detach().clone() for p in parameters])
    return history


def _one_weight(AdamW, gradients, start=1.0, **options):
    """One weight after each step, as a list of numbers. A gradient may be None."""
    given = [[None if g is None else _number(g)] for g in gradients]
    history = _steps(lambda p: AdamW(p, **options), [_number(start)], given)
    return torch.stack([step[0][0] for step in history])


def _agree(got, want, what):
    """Break the promise unless two histories of float64 weights agree to 12 digits, where `same` asks for 9."""
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for i, (g, w) in enumerate(zip(ours, theirs, strict=True)):
            where = f"{what}: weight {i} of shape {tuple(w.shape)} after step {step + 1}"
            same(g, w, where)
            apart = (g - w).abs().sum().item()
            expect(apart < 1e-12 * max(1, w.numel()), f"{where}: expected torch's to 12 digits, off by {apart:.1g}")


def _two_groups(parameters):
    """Two groups; each names some values of its own."""
    return [
        {"params": parameters[:2], "lr": 0.02},
        {"params": parameters[2:], "betas": (0.25, 0.5), "eps": 0.5},
    ]


def _now_and_then(n_steps):
    """Gradients of which some are missing: each weight has steps of its own."""
    return [
        [None if (step + i) % 3 == 0 or (i == 1 and step < 4) else g for i, g in enumerate(given)]
        for step, given in enumerate(_gradients(n_steps))
    ]


def _loss(parameters):
    return sum((p**2).sum() * (i + 1) for i, p in enumerate(parameters))


def _by_closure(make):
    """What step(closure) returns, how often it called the closure, and the weights after it."""
    parameters = [nn.Parameter(x) for x in _weights()]
    optimizer, calls = make(parameters), []

    def closure():
        optimizer.zero_grad()
        loss = _loss(parameters)
        loss.backward()
        calls.append(loss)
        return loss

    returned = optimizer.step(closure)
    return returned, calls, [p.detach().clone() for p in parameters]


def _resumed(make, gradients, at):
    """The weights after each step, where after some steps a new optimizer, made otherwise, goes on."""
    parameters = [nn.Parameter(x) for x in _weights()]
    optimizer = make(parameters, **PLAIN)
    history = []
    for step, given in enumerate(gradients):
        if step == at:
            state = copy.deepcopy(optimizer.state_dict())
            parameters = [nn.Parameter(p.detach().clone()) for p in parameters]
            optimizer = make(parameters, lr=0.5)
            optimizer.load_state_dict(state)
        for p, g in zip(parameters, given, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
        history.append([p.detach().clone() for p in parameters])
    return history


def _used(AdamW, weight_decay):
    """Weights and gradients after each of three steps. The gradients arrive in the same tensor each time."""
    p = nn.Parameter(_number(1.0, 2.0))
    p.grad = torch.zeros_like(p)
    optimizer, seen = AdamW([p], **(PLAIN | {"weight_decay": weight_decay})), []
    for step in range(3):
        p.grad.copy_(_number(4.0, -1.0) * (1 - 3 * step))
        optimizer.step()
        expect(p.grad is not None, f"expected the gradient to stay after step {step + 1}, got None")
        seen += [p.detach().clone(), p.grad.clone()]
    return seen


def probe_AdamW(AdamW):
    """Results that tell the known mistakes apart."""
    plain = PLAIN | {"lr": 0.3, "eps": 0.5}
    decays = plain | {"weight_decay": 0.5}

    def last(make, gradients, rates=None):
        return outcome(lambda: _steps(make, _weights(), gradients, rates)[-1])

    def bad(**options):
        return outcome(lambda: bool(AdamW([nn.Parameter(_number(1.0))], **options)))

    def closure():
        returned, calls, weights = _by_closure(lambda p: AdamW(p, lr=0.1))
        return [returned if returned is None else returned.detach(), len(calls), *weights]

    return [
        outcome(lambda: _one_weight(AdamW, [5.0], **plain)),
        outcome(lambda: _one_weight(AdamW, [5.0, -1.0, 2.0], **plain)),
        outcome(lambda: _one_weight(AdamW, [5.0], **decays)),
        outcome(lambda: _one_weight(AdamW, [5.0, -1.0, 2.0], **decays)),
        outcome(lambda: _one_weight(AdamW, [0.0, 0.0], **decays)),
        outcome(lambda: _one_weight(AdamW, [5.0])),
        outcome(lambda: _one_weight(AdamW, [5.0, None, None, 2.0], **decays)),
        last(lambda p: AdamW(p, **plain), _gradients(3)),
        last(lambda p: AdamW(_two_groups(p), lr=0.1, weight_decay=0.4), _gradients(3)),
        last(lambda p: AdamW(p, **decays), _gradients(3), [0.1, 0.5, 0.2]),
        last(lambda p: AdamW(p, **decays), _now_and_then(7)),
        outcome(lambda: _used(AdamW, weight_decay=0.5)),
        outcome(closure),
        outcome(lambda: _resumed(AdamW, _now_and_then(5), at=3)[-1]),
        bad(lr=-1.0),
        bad(eps=-1.0),
        bad(weight_decay=-1.0),
        bad(betas=(1.0, 0.5)),
        bad(betas=(0.5, 1.0)),
        bad(betas=(-0.5, 0.5)),
        bad(betas=(0.5, -0.5)),
        bad(betas=(0.0, 0.0)),
        bad(lr=0.0, eps=0.0, weight_decay=0.0),
    ]


def test_two_steps_by_hand(AdamW):
    """From 1, with lr 0.3 and both betas 0.5: gradient 5 moves to 0.7, then gradient -1 on to 0.6, not back."""
    got = _one_weight(AdamW, [5.0, -1.0], **(PLAIN | {"lr": 0.3, "betas": (0.5, 0.5)}))
    same(got, _number(0.7, 0.6), "the weight after each step, from 1.0")


def test_the_first_step_is_lr_long(AdamW):
    """The first step of any weight is lr long, whatever its gradient and the betas: that is the bias correction."""
    for betas in ((0.5, 0.75), (0.0, 0.0), (0.75, 0.25)):
        p = nn.Parameter(_number(1.0, 1.0, 1.0))
        optimizer = AdamW([p], **(PLAIN | {"lr": 0.25, "betas": betas}))
        p.grad = _number(0.001, -20.0, 3.0)
        optimizer.step()
        same(p.detach(), _number(0.75, 1.25, 0.75), f"weights of 1 after a step with lr 0.25, betas {betas}")


def test_eps_is_added_to_the_root(AdamW):
    """With eps = 1 and lr = 1, a first gradient of 3 moves a weight by 3 / (3 + 1): eps outside, correction inside."""
    options = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}
    for betas in ((0.5, 0.75), (0.0, 0.0), (0.75, 0.25)):
        got = _one_weight(AdamW, [3.0], betas=betas, **options)
        same(got, _number(0.25), f"a weight of 1 after a gradient of 3, betas {betas}")


def test_decay_is_decoupled(AdamW):
    """A weight of 2 with lr 0.1 and weight_decay 0.5 first shrinks by 0.05 of itself, to 1.9; then it moves by 0.1."""
    options = PLAIN | {"weight_decay": 0.5}
    for gradient in (5.0, 0.001):
        same(_one_weight(AdamW, [gradient], 2.0, **options), _number(1.8), f"2.0 after a gradient of {gradient:g}")
    got = _one_weight(AdamW, [-5.0, -5.0], 2.0, **options)
    same(got, _number(2.0, 2.0), "2.0 after each of two gradients of -5: up by 0.1 as far as it decays")


def test_a_zero_gradient_still_decays(AdamW):
    """A weight whose gradient is 0 decays all the same: from 2 to 1.9 and 1.805 with lr 0.1 and weight_decay 0.5."""
    got = _one_weight(AdamW, [0.0, 0.0], 2.0, lr=0.1, weight_decay=0.5)
    same(got, _number(1.9, 1.805), "2.0 after each of two gradients of 0")
    got = _steps(lambda p: AdamW(p, weight_decay=0.5), [_number(2.0)], [[_number(0.0)]] * 2, rates=[0.1, 0.2])
    same(got[1][0], _number(1.71), "2.0 after two gradients of 0, where lr is 0.1, then 0.2")


def test_equals_torch(AdamW):
    """With the same gradients it makes the steps of torch.optim.AdamW: float64, to 12 digits, defaults and others."""
    many = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}
    for options, n_steps in (({}, 12), (many, 6), (many | {"betas": (0.95, 0.4)}, 3), ({"lr": 1, "eps": 1}, 2)):
        got = _steps(lambda p, o=options: AdamW(p, **o), _weights(), _gradients(n_steps))
        want = _steps(lambda p, o=options: torch.optim.AdamW(p, **o), _weights(), _gradients(n_steps))
        _agree(got, want, f"AdamW with {options or 'its defaults'}")
    got = _steps(lambda p: AdamW(p, 0.1, (0.8, 0.95), 1e-3, 0.3), _weights(), _gradients(2))
    want = _steps(lambda p: torch.optim.AdamW(p, **many), _weights(), _gradients(2))
    _agree(got, want, "AdamW(params, lr, betas, eps, weight_decay), by position")


def test_it_trains_a_model(AdamW):
    """An Optimizer of torch's: it takes model.parameters(), zero_grad clears gradients, and a model learns."""

    def train(make):
        generator = rng(1)
        x, y = (torch.randn(11, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        for p in model.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        optimizer, losses = make(p for p in model.parameters()), []
        expect(isinstance(optimizer, torch.optim.Optimizer), "expected AdamW to be a kind of torch.optim.Optimizer")
        for _ in range(7):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    got, want = train(lambda p: AdamW(p, **PLAIN)), train(lambda p: torch.optim.AdamW(p, **PLAIN))
    same(got, want, "the loss at each step")


def test_groups_have_their_own_values(AdamW):
    """Each group has its own lr, betas and eps; what it does not name is the optimizer's."""
    got = _steps(lambda p: AdamW(_two_groups(p), **PLAIN), _weights(), _gradients(4))
    want = _steps(lambda p: torch.optim.AdamW(_two_groups(p), **PLAIN), _weights(), _gradients(4))
    _agree(got, want, "two groups")


def test_each_group_has_its_own_decay(AdamW):
    """Three weights of 2 with gradients of 0, in groups that decay by 0.5, by the optimizer's 0.25, and not at all."""

    def grouped(p):
        groups = [{"params": p[:1], "weight_decay": 0.5}, {"params": p[1:2]}, {"params": p[2:], "weight_decay": 0.0}]
        return AdamW(groups, lr=0.1, weight_decay=0.25)

    got = _steps(grouped, [_number(2.0)] * 3, [[_number(0.0)] * 3])[0]
    same(torch.cat(got), _number(1.9, 1.95, 2.0), "three weights of 2 after a gradient of 0, lr 0.1")


def test_a_changed_learning_rate_counts(AdamW):
    """A schedule writes a new lr into param_groups before each step: that one is used. 0 moves nothing, but counts."""
    rates = [0.1, 0.5, 0.0, 0.03]
    options = PLAIN | {"lr": 7.0}
    got = _steps(lambda p: AdamW(p, **options), _weights(), _gradients(4), rates)
    want = _steps(lambda p: torch.optim.AdamW(p, **options), _weights(), _gradients(4), rates)
    _agree(got, want, f"learning rates {rates}")


def test_a_weight_without_gradient_is_left_alone(AdamW):
    """Where grad is None a weight stays as it is, without decay, and its step is not counted: t is its own."""
    got = _one_weight(AdamW, [None, 5.0, None, -1.0], **(PLAIN | {"lr": 0.3, "betas": (0.5, 0.5)}))
    same(got, _number(1.0, 0.7, 0.7, 0.6), "the weight after gradients None, 5, None, -1, from 1.0")
    same(_one_weight(AdamW, [None, None], lr=0.3, weight_decay=0.5), _number(1.0, 1.0), "1.0 without a gradient")
    got = _steps(lambda p: AdamW(p, **PLAIN), _weights(), _now_and_then(8))
    want = _steps(lambda p: torch.optim.AdamW(p, **PLAIN), _weights(), _now_and_then(8))
    _agree(got, want, "gradients that are missing now and then")


def test_gradients_stay_as_they_are(AdamW):
    """A step reads gradients: it does not change, clear or keep them. The next may come in the same tensor."""
    for weight_decay in (0.0, 0.5):
        got, want = _used(AdamW, weight_decay), _used(torch.optim.AdamW, weight_decay)
        for step in range(3):
            same(got[2 * step + 1], want[2 * step + 1], f"the gradient after step {step + 1}")
            if not weight_decay:
                same(got[2 * step], want[2 * step], f"the weights after step {step + 1}")


def test_parameters_stay_the_same_objects(AdamW):
    """The model's own parameters move: the same objects, of the same dtype, still learning, without a graph."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = nn.Linear(3, 2).to(dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        before = dict(model.named_parameters())
        optimizer = AdamW(model.parameters(), **(PLAIN | {"lr": 0.25}))
        for want in (0.75, 0.5):
            for p in model.parameters():
                p.grad = torch.full_like(p, 2.0)
            optimizer.step()
            for name, p in model.named_parameters():
                expect(p is before[name], f"{name}: expected the same parameter as before, got a new one")
                same(p.detach(), torch.full_like(p, want), f"{name} in {dtype}")
                expect(p.is_leaf and p.requires_grad, f"{name}: expected a parameter that learns, without a graph")


def test_a_closure_gives_the_loss(AdamW):
    """step(closure) first calls the closure, once, with gradients switched on; then it moves, and returns the loss."""
    returned, calls, got = _by_closure(lambda p: AdamW(p, **PLAIN))
    expect(len(calls) == 1, f"expected one call of the closure, got {len(calls)}")
    if returned is None:
        raise Broken("expected step(closure) to return the loss, got None")
    same(torch.as_tensor(returned).detach(), calls[0].detach(), "the loss that step(closure) returns")
    want = _by_closure(lambda p: torch.optim.AdamW(p, **PLAIN))[2]
    _agree([got], [want], "a step with a closure")


def test_state_holds_t_m_and_v(AdamW):
    """`state` keeps "step", "exp_avg" and "exp_avg_sq" of each weight, as torch does: t, m and v, not corrected."""
    states = []
    for make in (AdamW, torch.optim.AdamW):
        parameters = [nn.Parameter(x) for x in _weights()]
        optimizer = make(parameters, **PLAIN)
        for given in _now_and_then(5):
            for p, g in zip(parameters, given, strict=True):
                p.grad = g
            optimizer.step()
        states.append(optimizer.state_dict()["state"])
    got, want = states
    for i, theirs in want.items():
        for name, value in theirs.items():
            expect(name in got.get(i, {}), f'expected "{name}" in the state of weight {i}, got {list(got.get(i, {}))}')
            ours = got[i][name]
            if name == "step":
                expect(float(ours) == float(value), f"weight {i}: expected t = {float(value):g}, got {float(ours):g}")
            else:
                same(ours, value, f"{name} of weight {i}, of shape {SHAPES[i]}")


def test_training_goes_on_after_loading(AdamW):
    """A new optimizer that loads the state goes on as if nothing had happened: t, m, v and the groups' values."""
    for at in (1, 4):
        got = _resumed(AdamW, _now_and_then(7), at)
        want = _resumed(torch.optim.AdamW, _now_and_then(7), at=99)
        _agree(got, want, f"state loaded into a new optimizer after step {at}")


def test_values_that_cannot_be(AdamW):
    """An lr, eps or weight_decay below 0 is a ValueError, and a beta outside [0, 1); 0 itself is allowed."""
    p = nn.Parameter(_number(1.0))
    AdamW([p], lr=0.0, eps=0.0, weight_decay=0.0, betas=(0.0, 0.0))
    for name in ("lr", "eps", "weight_decay"):
        for value in (-1e-8, -2.0):
            raises(ValueError, lambda n=name, v=value: AdamW([p], **{n: v}), f"AdamW(params, {name}={value:g})")
    for betas in ((1.0, 0.5), (0.5, 1.0), (-0.1, 0.5), (0.5, -0.1), (1.5, 0.5), (0.5, 1.5)):
        raises(ValueError, lambda b=betas: AdamW([p], betas=b), f"AdamW(params, betas={betas})")


# warmup_inverse_sqrt, warmup_cosine ----------------------------------------------------------------------------------


def _rates(schedule, steps, *args, **kwargs):
    """The learning rates of some steps, each of them a plain number."""
    found = []
    for step in steps:
        rate = schedule(step, *args, **kwargs)
        said = ", ".join([str(step), *map(str, args), *(f"{name}={value}" for name, value in kwargs.items())])
        if rate is None:
            raise Broken(f"{schedule.__name__}({said}): expected a float, got None. Is a `return` missing?")
        expect(isinstance(rate, float), f"{schedule.__name__}({said}): expected a float, got {type(rate).__name__}")
        found.append(rate)
    return _number(*found)


def _answers(schedule, cases):
    """For a probe: the rates of each case, or the exception."""
    return [outcome(lambda c=case: [float(schedule(step, *c[1:])) for step in c[0]]) for case in cases]


def probe_warmup_inverse_sqrt(warmup_inverse_sqrt):
    """Results that tell the known mistakes apart."""
    rates = [
        ([0], 4, 2.0),
        ([1, 2], 4, 2.0),
        ([3], 4, 2.0),
        ([4], 4, 2.0),
        ([8, 15, 63], 4, 2.0),
        ([0], 0, 2.0),
        ([1, 8, 24], 0, 2.0),
        ([0, 1, 3], 1, 2.0),
    ]
    return [a if not isinstance(a, list) else _number(*a) for a in _answers(warmup_inverse_sqrt, rates)]


def test_up_in_a_line(warmup_inverse_sqrt):
    """With warmup = 4 and peak 2, steps 0, 1, 2, 3 have 0.5, 1.0, 1.5, 2.0: the first one already learns."""
    got = _rates(warmup_inverse_sqrt, range(4), warmup=4, peak=2.0)
    same(got, _number(0.5, 1.0, 1.5, 2.0), "rates of steps 0-3 with warmup=4, peak=2")


def test_down_with_the_root(warmup_inverse_sqrt):
    """Then the rate falls as 1 / sqrt(step + 1): with warmup = 4, step 15 has half the peak, step 63 a quarter."""
    got = _rates(warmup_inverse_sqrt, (3, 15, 35, 63), 4, 2.0)
    same(got, _number(2.0, 1.0, 2 / 3, 0.5), "rates of steps 3, 15, 35, 63 with warmup=4, peak=2")


def test_the_peak_is_reached_once(warmup_inverse_sqrt):
    """The peak belongs to step warmup - 1; at step warmup the rate is lower already, by sqrt(warmup / (warmup + 1))."""
    for warmup in (1, 3, 8):
        got = _rates(warmup_inverse_sqrt, (warmup - 1, warmup), warmup, 3.0)
        want = _number(3.0, 3.0 * math.sqrt(warmup / (warmup + 1)))
        same(got, want, f"rates of steps {warmup - 1} and {warmup} with warmup={warmup}, peak=3")


def test_the_root_without_warm_up(warmup_inverse_sqrt):
    """With warmup = 0 step 0 has the peak, step 3 half of it, step 8 a third."""
    got = _rates(warmup_inverse_sqrt, (0, 3, 8), warmup=0, peak=6.0)
    same(got, _number(6.0, 3.0, 2.0), "rates of steps 0, 3, 8 with warmup=0, peak=6")


def test_equals_the_paper(warmup_inverse_sqrt):
    """With peak 1 / sqrt(d_model * warmup) it is the paper's d_model^-0.5 min(n^-0.5, n warmup^-1.5), n = step + 1."""
    for d_model, warmup in ((512, 4000), (7, 13), (3, 1)):
        steps = [0, 1, warmup // 2, warmup - 1, warmup, warmup + 1, 2 * warmup, 100 * warmup]
        got = _rates(warmup_inverse_sqrt, steps, warmup, (d_model * warmup) ** -0.5)
        n = torch.tensor(steps, dtype=torch.float64) + 1
        want = d_model**-0.5 * torch.minimum(n**-0.5, n * warmup**-1.5)
        same(got / want, torch.ones_like(want), f"our rate / the paper's, d_model={d_model}, warmup={warmup}")


def probe_warmup_cosine(warmup_cosine):
    """Results that tell the known mistakes apart."""
    rates = [
        ([0], 4, 13, 2.0, 0.5),
        ([1, 2], 4, 13, 2.0, 0.5),
        ([3], 4, 13, 2.0, 0.5),
        ([4], 4, 13, 2.0, 0.5),
        ([5, 6, 9], 4, 13, 2.0, 0.5),
        ([8], 4, 13, 2.0, 0.5),
        ([12], 4, 13, 2.0, 0.5),
        ([13], 4, 13, 2.0, 0.5),
        ([17, 20, 23], 4, 13, 2.0, 0.5),
        ([5, 6, 8], 4, 13, 2.0),
        ([0, 1, 5], 0, 6, 2.0),
        ([5], 5, 6, 2.0),
        ([0], 5, 6, 2.0),
        ([0], 5, 5, 2.0),
        ([4, 5], 4, 6, 2.0),
    ]
    return [a if not isinstance(a, list) else _number(*a) for a in _answers(warmup_cosine, rates)]


def test_from_step_0_to_the_end(warmup_cosine):
    """With warmup = 2, total = 5 and peak 1, steps 0-4 have 0.5, 1, 1, 0.5, 0: up, then down half a cosine."""
    got = _rates(warmup_cosine, range(5), warmup=2, total=5, peak=1.0)
    same(got, _number(0.5, 1.0, 1.0, 0.5, 0.0), "rates of steps 0-4 with warmup=2, total=5, peak=1")


def test_up_to_the_peak(warmup_cosine):
    """With warmup = 4 and peak 2, steps 0-3 have 0.5, 1.0, 1.5, 2.0: the first one already learns, floor or not."""
    got = _rates(warmup_cosine, range(4), 4, 99, 2.0)
    same(got, _number(0.5, 1.0, 1.5, 2.0), "rates of steps 0-3 with warmup=4, total=99, peak=2")
    got = _rates(warmup_cosine, range(4), warmup=4, total=99, peak=2.0, floor=0.6)
    same(got, _number(0.5, 1.0, 1.5, 2.0), "rates of steps 0-3 with warmup=4, total=99, peak=2, floor=0.6")


def test_half_a_cosine_with_a_floor(warmup_cosine):
    """From `peak` at step `warmup` to `floor` at step total - 1; half-way it is their mean."""
    got = _rates(warmup_cosine, (3, 7, 11), 3, 12, 2.0, 0.5)
    same(got, _number(2.0, 1.25, 0.5), "rates of steps 3, 7, 11 with warmup=3, total=12, peak=2, floor=0.5")
    for warmup, total in ((3, 14), (0, 5), (7, 100), (1, 4)):
        got = _rates(warmup_cosine, range(warmup, total), warmup=warmup, total=total, peak=2.0, floor=0.5)
        angles = torch.linspace(0, math.pi, total - warmup, dtype=torch.float64)
        same(got, 1.25 + 0.75 * angles.cos(), f"rates of steps {warmup}-{total - 1} of {total}, peak=2, floor=0.5")


def test_the_floor_is_kept(warmup_cosine):
    """From step total - 1 on the rate is `floor`, however long training goes on: the cosine does not rise again."""
    steps = (11, 12, 13, 16, 19, 20, 23, 100, 10**6)
    for floor in (0.0, 0.5):
        got = _rates(warmup_cosine, steps, 3, 12, 2.0, floor)
        same(got, torch.full_like(got, floor), f"rates of steps {steps} with warmup=3, total=12, floor={floor}")


def test_the_cosine_without_warm_up(warmup_cosine):
    """With warmup = 0 step 0 has the peak: total = 3 gives peak, half, 0."""
    got = _rates(warmup_cosine, range(4), warmup=0, total=3, peak=6.0)
    same(got, _number(6.0, 3.0, 0.0, 0.0), "rates of steps 0-3 with warmup=0, total=3, peak=6")


def test_the_cosine_needs_two_steps(warmup_cosine):
    """Unless total > warmup + 1 it is a ValueError at any step; total = warmup + 2 leaves peak, then floor."""
    got = _rates(warmup_cosine, (2, 3, 4, 5), 3, 5, 2.0, 0.5)
    same(got, _number(2.0, 2.0, 0.5, 0.5), "rates of steps 2-5 with warmup=3, total=5, peak=2, floor=0.5")
    for warmup, total in ((3, 4), (3, 3), (3, 2), (0, 1), (0, 0)):
        for step in (0, 3, 9):
            what = f"warmup_cosine({step}, warmup={warmup}, total={total}, peak=1.0)"
            raises(ValueError, lambda s=step, w=warmup, t=total: warmup_cosine(s, w, t, 1.0), what)


# clip_gradients ------------------------------------------------------------------------------------------------------


def _with_gradients(*gradients, dtype=torch.float64):
    """One parameter for each gradient; None leaves it without one."""
    made = []
    for gradient in gradients:
        gradient = gradient if gradient is None else torch.as_tensor(gradient, dtype=dtype).clone()
        p = nn.Parameter(torch.ones(() if gradient is None else gradient.shape, dtype=dtype))
        p.grad = gradient
        made.append(p)
    return made


def _random_gradients(scale=1.0, dtype=torch.float64):
    """Parameters with gradients of the shapes above, one without a gradient, one not contiguous."""
    made = _with_gradients(*_weights(), None, dtype=dtype)
    for p in made[:-1]:
        p.grad *= scale
    return made


def _clipped(clip_gradients, parameters, max_norm, what, keep=None):
    """Clip, and look at what must always hold: a scalar comes back, and gradients are there. Returns the scalar."""
    missing = [p.grad is None for p in parameters]
    norm = clip_gradients(parameters if keep is None else keep(parameters), max_norm)
    expect(norm.shape == (), f"{what}: expected a norm of shape (), got {tuple(norm.shape)}")
    expect(not norm.requires_grad, f"{what}: expected a norm without a graph")
    for i, (p, none) in enumerate(zip(parameters, missing, strict=True)):
        before, after = ("None" if gone else "a tensor" for gone in (none, p.grad is None))
        expect(before == after, f"{what}: gradient {i} was {before} before and is {after} after")
    return norm


def probe_clip_gradients(clip_gradients):
    """Results that tell the known mistakes apart."""

    def ask(parameters, max_norm, given=lambda p: p):
        def call():
            before = [p.grad for p in parameters]
            norm = clip_gradients(given(parameters), max_norm)
            return [norm, *(p.grad for p in parameters), [p.grad is g for p, g in zip(parameters, before, strict=True)]]

        return outcome(call)

    half = {"dtype": torch.float16}
    return [
        ask(_with_gradients([3.0], [4.0]), 1.0),
        ask(_with_gradients([3.0], [4.0]), 1.0, lambda p: (x for x in p)),
        ask(_with_gradients([3.0, 4.0]), 1),
        ask(_with_gradients([0.3, 0.4]), 2.0),
        ask(_with_gradients([0.0, 0.0]), 2.0),
        ask(_with_gradients([3.0, -40.0], [1.0, 1.0]), 7.0),
        ask(_with_gradients([3.0], None, [4.0]), 1.0),
        ask(_with_gradients([3.0, math.inf], [4.0]), 1.0),
        ask(_with_gradients([3.0, math.nan], [4.0]), 1.0),
        ask(_with_gradients([3000.0, 0.0], [-4000.0], **half), 1.0),
        ask(_with_gradients([300.0, -200.0], [100.0], **half), 60.0),
        ask(_with_gradients(None, None), 1.0),
        ask([], 1.0),
    ]


def test_three_and_four_make_five(clip_gradients):
    """Gradients 3 and 4 of two parameters: with max_norm 1 they become 0.6 and 0.8, and their norm, 5, is returned."""
    parameters = _with_gradients([3.0], [4.0], dtype=torch.float32)
    norm = _clipped(clip_gradients, parameters, 1.0, "gradients [3], [4]")
    same(norm, torch.tensor(5.0), "the norm of [3] and [4]")
    same(torch.cat([p.grad for p in parameters]), torch.tensor([0.6, 0.8]), "[3] and [4] clipped to 1")


def test_short_gradients_stay(clip_gradients):
    """What is shorter than max_norm never grows: 0.3 and 0.4 with max_norm 2 stay. So do zeros."""
    for values, max_norm in (([0.3, 0.4], 2.0), ([0.0, 0.0], 2.0), ([3.0, 4.0], math.inf), ([3.0, 4.0], 10**6)):
        parameters = _with_gradients(values, [0.0])
        norm = _clipped(clip_gradients, parameters, max_norm, f"gradients {values}, max_norm {max_norm}")
        same(norm, _number(values).norm(), f"the norm of {values}")
        same(parameters[0].grad, _number(*values), f"gradients {values} with max_norm {max_norm}")


def test_one_norm_for_all(clip_gradients):
    """All gradients together are one long vector, shortened to max_norm: its direction stays."""
    parameters = _random_gradients(10.0, torch.float32)
    before = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    norm = _clipped(clip_gradients, parameters, 2.0, "gradients of five shapes")
    after = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    same(norm, before.norm(), "the norm before")
    same(after.norm(), torch.tensor(2.0), "the norm after")
    same(after / after.norm(), before / before.norm(), "the direction of all gradients")


def test_gradients_change_in_place(clip_gradients):
    """The gradients' own tensors change: whoever holds one sees the clipped values, and p.grad is no new tensor."""
    parameters = _with_gradients([3.0], [[4.0]], dtype=torch.float32)
    held = [p.grad for p in parameters]
    _clipped(clip_gradients, parameters, 1.0, "gradients [3], [[4]]")
    for p, g, want in zip(parameters, held, ([0.6], [[0.8]]), strict=True):
        same(g, torch.tensor(want), "a gradient that was taken hold of before")
        expect(p.grad is g, "expected p.grad to be the same tensor as before, got a new one")


def test_equals_torchs_clipping(clip_gradients):
    """Norm and gradients are those of nn.utils.clip_grad_norm_: times max_norm / (norm + 1e-6), in float64 too."""
    for scale, max_norm in ((1.0, 0.5), (1e-4, 1e-5), (1e4, 3), (1.0, 1e3), (1.0, 0.0)):
        ours, theirs = _random_gradients(scale), _random_gradients(scale)
        what = f"random gradients of size {scale:g}, max_norm {max_norm:g}"
        got, want = _clipped(clip_gradients, ours, max_norm, what), nn.utils.clip_grad_norm_(theirs, max_norm)
        same(got / want, torch.ones_like(want), f"{what}: our norm / torch's")
        for i, (p, q) in enumerate(zip(ours[:-1], theirs[:-1], strict=True)):
            same(p.grad / max(max_norm, 1e-9), q.grad / max(max_norm, 1e-9), f"{what}: gradient {i} / max_norm")


def test_any_iterable_of_parameters(clip_gradients):
    """Parameters may come as a list, a tuple or a generator, which can be read only once, as model.parameters() is."""
    ways = {
        "a tuple": tuple,
        "a generator": lambda ps: (p for p in ps),
        "an iterator": iter,
        "model.parameters()": lambda ps: nn.ParameterList(ps).parameters(),
    }
    for way, keep in ways.items():
        parameters = _with_gradients([3.0], [0.0, 4.0], dtype=torch.float32)
        norm = _clipped(clip_gradients, parameters, max_norm=1.0, what=way, keep=keep)
        same(norm, torch.tensor(5.0), f"the norm of gradients from {way}")
        same(parameters[1].grad, torch.tensor([0.0, 0.8]), f"the second gradient, from {way}")


def test_without_gradients_there_is_nothing_to_clip(clip_gradients):
    """A parameter whose grad is None is left out; no gradient at all has the norm 0."""
    parameters = _with_gradients(None, [3.0], None, [4.0], None, dtype=torch.float32)
    norm = _clipped(clip_gradients, parameters, 1.0, "some gradients")
    same(norm, torch.tensor(5.0), "the norm of None, 3, None, 4, None")
    same(parameters[3].grad, torch.tensor([0.8]), "the gradient 4, clipped")
    for parameters in (_with_gradients(None, None), []):
        norm = _clipped(clip_gradients, parameters, 1.0, "no gradients")
        expect(norm.item() == 0, f"expected the norm of no gradients to be 0, got {norm.item():g}")


def test_what_is_not_finite_stays(clip_gradients):
    """If a gradient holds inf or NaN, the norm says so, and all gradients stay as they are."""
    for value in (math.inf, -math.inf, math.nan):
        parameters = _with_gradients([3.0, value], [4.0, 0.0])
        norm = _clipped(clip_gradients, parameters, 1.0, f"gradients with {value}")
        expect(not norm.isfinite(), f"the norm of gradients with {value}: expected inf or NaN, got {norm.item():g}")
        for p, want in zip(parameters, ([3.0, value], [4.0, 0.0]), strict=True):
            same(p.grad, _number(*want), f"a gradient beside {value}")


def test_half_precision_does_not_overflow(clip_gradients):
    """Squares of 300 do not fit into float16: the norm is computed in float32. The gradients stay float16."""
    for dtype in (torch.float16, torch.bfloat16):
        parameters = _with_gradients([300.0, 0.0], [-400.0], dtype=dtype)
        norm = _clipped(clip_gradients, parameters, 50.0, f"gradients in {dtype}")
        same(norm, torch.tensor(500.0), f"the norm of 300 and -400 in {dtype}")
        same(parameters[0].grad, torch.tensor([30.0, 0.0], dtype=dtype), f"the gradient 300 in {dtype}")
        same(parameters[1].grad, torch.tensor([-40.0], dtype=dtype), f"the gradient -400 in {dtype}")
        norm = _clipped(clip_gradients, _with_gradients([1.0, 1.0, 1.0], dtype=dtype), 9.0, f"three ones in {dtype}")
        same(norm, torch.tensor(3.0).sqrt(), f"the norm of three ones in {dtype}, not rounded to {dtype}")
    large = _with_gradients([60_000.0], [60_000.0], dtype=torch.float16)
    norm = _clipped(clip_gradients, large, 600.0, "gradients 60,000 in float16")
    same(norm, torch.tensor(60_000 * 2**0.5), "the norm of 60,000 and 60,000, which float16 could not hold")
    same(large[1].grad, torch.tensor([600 / 2**0.5]).half(), "60,000 and 60,000 in float16, clipped to 600")
    mixed = _with_gradients([300.0], dtype=torch.float16) + _with_gradients([400.0], dtype=torch.float32)
    for parameters in (mixed, mixed[::-1]):
        norm = _clipped(clip_gradients, parameters, 1e3, "gradients in float16 and float32")
        same(norm, torch.tensor(500.0), "the norm of 300 in float16 and 400 in float32")


# parameter_groups ----------------------------------------------------------------------------------------------------


def _named(model, groups):
    """The groups as the checks compare them: names of parameters, and the decay."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [(sorted(names.get(id(p), "?") for p in group["params"]), group["weight_decay"]) for group in groups]


def _expect_groups(parameter_groups, model, decaying, others, weight_decay=0.1):
    """Break the promise unless these names stand in the two groups, each once."""
    groups = parameter_groups(model, weight_decay)
    if groups is None:
        raise Broken("expected a list of two groups, got None. Is a `return` missing?")
    expect(isinstance(groups, list), f"expected a list of two groups, got {type(groups).__name__}")
    expect(len(groups) == 2, f"expected two groups, got {len(groups)}")
    for group, names, decay in zip(groups, (decaying, others), (weight_decay, 0.0), strict=True):
        place = "first" if names is decaying else "second"
        expect(isinstance(group, dict), f"the {place} group: expected a dict, got {type(group).__name__}")
        missing = {"params", "weight_decay"} - set(group)
        expect(not missing, f"the {place} group: expected the keys params and weight_decay, got {', '.join(group)}")
        params = group["params"]
        expect(isinstance(params, (list, tuple)), f"the {place} group: expected a list, got {type(params).__name__}")
        got = _named(model, [group])[0]
        said = f"the {place} group: expected {', '.join(sorted(names)) or 'no parameters'}"
        expect(got[0] == sorted(names), f"{said}; got {', '.join(got[0]) or 'none'}")
        expect(got[1] == decay, f"the {place} group: expected weight_decay {decay}, got {got[1]}")
    return groups


def _model(**parts):
    return nn.ModuleDict(parts)


def _mixed():
    """Layers of many kinds, nested, and two parameters of the model's own."""
    block = _model(attention=nn.Linear(3, 3, bias=False), norm=nn.LayerNorm(3), mlp=nn.Sequential(nn.Linear(3, 5)))
    model = _model(table=nn.Embedding(7, 3), conv=nn.Conv1d(3, 3, 2), block=block, gate=nn.Bilinear(3, 3, 2))
    model.register_parameter("weight", nn.Parameter(torch.ones(3, 3)))
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    model["head"] = nn.Linear(3, 7)
    return model


def _tied(head_first):
    """A head that shares its weight with the embedding, in either order, and a layer between them."""
    table, head = nn.Embedding(7, 3), nn.Linear(3, 7)
    head.weight = table.weight
    parts = {"head": head, "layer": nn.Linear(3, 3), "table": table}
    return _model(**(parts if head_first else dict(reversed(parts.items()))))


def _shared():
    """Two linear layers with one weight, and a third layer that is used twice under two names."""
    one, other, twice = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
    other.weight = one.weight
    return _model(one=one, other=other, twice=twice, again=twice)


def _frozen():
    """A weight that decays, a bias and a table that are frozen."""
    model = _model(table=nn.Embedding(7, 3), one=nn.Linear(3, 3), other=nn.Linear(3, 3))
    for p in (model["table"].weight, model["one"].weight, model["other"].bias):
        p.requires_grad_(False)
    return model


def probe_parameter_groups(parameter_groups):
    """Results that tell the known mistakes apart."""

    def ask(model, weight_decay=0.25):
        return outcome(lambda: _named(model, parameter_groups(model, weight_decay)))

    return [
        ask(_model(layer=nn.Linear(3, 2))),
        ask(nn.Linear(3, 2)),
        ask(_model(norm=nn.LayerNorm(3))),
        ask(_model(table=nn.Embedding(7, 3))),
        ask(_mixed()),
        ask(_tied(True)),
        ask(_tied(False)),
        ask(_shared()),
        ask(_frozen()),
        outcome(lambda: [p.requires_grad for m in [_frozen()] if parameter_groups(m, 0.1) for p in m.parameters()]),
    ]


def test_matrices_decay_and_biases_do_not(parameter_groups):
    """The first group holds the weights of linear layers and the decay, the second the biases and 0.0; two always."""
    model = _model(one=nn.Linear(3, 5), other=nn.Linear(5, 2, bias=False))
    _expect_groups(parameter_groups, model, ["one.weight", "other.weight"], ["one.bias"], weight_decay=0.25)
    _expect_groups(parameter_groups, model, ["one.weight", "other.weight"], ["one.bias"], weight_decay=0.0)
    _expect_groups(parameter_groups, nn.Linear(3, 2), ["weight"], ["bias"])
    _expect_groups(parameter_groups, nn.LayerNorm(3), [], ["weight", "bias"])
    _expect_groups(parameter_groups, nn.Linear(3, 1, bias=False), ["weight"], [])


def test_norms_and_tables_do_not_decay(parameter_groups):
    """No decay for norms, embedding tables, convolutions or a model's own parameters, of whatever name or shape."""
    model = _mixed()
    decaying = ["block.attention.weight", "block.mlp.0.weight", "head.weight"]
    others = [name for name, _ in model.named_parameters() if name not in decaying]
    _expect_groups(parameter_groups, model, decaying, others)


def test_a_tied_head_does_not_decay(parameter_groups):
    """A head that shares its weight with the embedding does not decay, whichever of them comes first in the model."""
    for head_first in (True, False):
        model = _tied(head_first)
        shared = "head.weight" if head_first else "table.weight"
        _expect_groups(parameter_groups, model, ["layer.weight"], [shared, "head.bias", "layer.bias"])


def test_a_shared_weight_appears_once(parameter_groups):
    """Two linear layers with one weight: it stands in the first group once, and so does a layer used twice."""
    groups = _expect_groups(
        parameter_groups, _shared(), ["one.weight", "twice.weight"], ["one.bias", "other.bias", "twice.bias"]
    )
    optimizer = torch.optim.AdamW(groups)
    expect(len(optimizer.param_groups) == 2, "expected torch.optim.AdamW to take the groups")


def test_frozen_parameters_are_left_out(parameter_groups):
    """A parameter that is frozen (requires_grad is False) stands in neither group, and stays frozen."""
    model = _frozen()
    frozen = ["table.weight", "one.weight", "other.bias"]
    _expect_groups(parameter_groups, model, ["other.weight"], ["one.bias"])
    got = [name for name, p in model.named_parameters() if not p.requires_grad]
    expect(sorted(got) == sorted(frozen), f"expected {', '.join(frozen)} to stay frozen; frozen are {', '.join(got)}")
    tied = _tied(False)
    tied["table"].weight.requires_grad_(False)
    _expect_groups(parameter_groups, tied, ["layer.weight"], ["head.bias", "layer.bias"])


def test_torch_trains_with_the_groups(parameter_groups):
    """torch.optim.AdamW takes the groups: with gradients of 0 only what decays shrinks, by lr * weight_decay."""
    model = _mixed()
    decaying = {"block.attention.weight", "block.mlp.0.weight", "head.weight"}
    groups = parameter_groups(model, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        same(p.detach(), before[name] * (0.95 if name in decaying else 1.0), f"{name} after a step")
