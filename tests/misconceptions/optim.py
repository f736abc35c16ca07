"""Mistakes that people make in AdamW, learning-rate schedules, clipping, and the choice of what decays."""

import math

import torch
from torch import nn

from . import wrong

# AdamW ---------------------------------------------------------------------------------------------------------------
#
# The variants share a correct body whose steps are methods; each variant gets one step wrong.


class _Steps(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        self.complain(lr, betas, eps, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def complain(self, lr, betas, eps, weight_decay):
        if min(lr, eps, weight_decay) < 0 or not all(self.allowed(beta) for beta in betas):
            raise ValueError("a value that cannot be")

    def allowed(self, beta):
        return 0 <= beta < 1

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.loss(closure)
        for group in self.param_groups:
            values = self.values(group)
            for p in group["params"]:
                g = self.gradient(p)
                if g is not None:
                    self.move(p, g, **values)
        self.finish()
        return loss

    def loss(self, closure):
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def values(self, group):
        return {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}

    def gradient(self, p):
        return p.grad

    def memory(self, p):
        return self.state[p]

    def count(self, state):
        state["step"] += 1
        return state["step"]

    def move(self, p, g, lr, betas, eps, weight_decay):
        g = self.with_decay(g, p, weight_decay)
        state = self.memory(p)
        if not state:
            state.update(self.begin(p, g))
        t = self.count(state)
        state["exp_avg"] = self.mean(state["exp_avg"], g, betas[0])
        state["exp_avg_sq"] = self.square(state["exp_avg_sq"], g, betas[1])
        m, v = self.corrected(state["exp_avg"], betas[0], t), self.corrected_square(state["exp_avg_sq"], betas, t)
        update = lr * self.update(m, v, eps, betas, t)
        self.change(p, self.kept(lr, weight_decay), update)

    def with_decay(self, g, p, weight_decay):
        return g

    def begin(self, p, g):
        return {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def mean(self, m, g, beta):
        return beta * m + (1 - beta) * g

    def square(self, v, g, beta):
        return beta * v + (1 - beta) * g * g

    def corrected(self, average, beta, t):
        return average / (1 - beta**t)

    def corrected_square(self, average, betas, t):
        return self.corrected(average, betas[1], t)

    def update(self, m, v, eps, betas, t):
        return m / (v.sqrt() + eps)

    def kept(self, lr, weight_decay):
        return 1 - lr * weight_decay

    def change(self, p, kept, update):
        p.copy_(p * kept - update)

    def finish(self):
        pass


@wrong(
    "AdamW",
    caught_by="test_two_steps_by_hand",
    hint="The weights do not move: `p = p - ...` only gives the name p to a new tensor. "
    "Change the parameter itself: `p.sub_(...)` under `torch.no_grad()`.",
)
class NewNameForTheResult(_Steps):
    def change(self, p, kept, update):
        p = p * kept - update


@wrong(
    "AdamW",
    caught_by="test_two_steps_by_hand",
    hint="The update is added: the loss is climbed. Subtract it.",
)
class Uphill(_Steps):
    def change(self, p, kept, update):
        p.copy_(p * kept + update)


@wrong(
    "AdamW",
    caught_by="test_the_first_step_is_lr_long",
    hint="There is no bias correction: m and v start at 0, so the first averages are far too small. "
    "Divide them by 1 - beta^t.",
)
class WithoutBiasCorrection(_Steps):
    def corrected(self, average, beta, t):
        return average


@wrong(
    "AdamW",
    caught_by="test_two_steps_by_hand",
    hint="The bias correction divides by 1 - beta at every step. It fades: divide by 1 - beta ** t.",
)
class CorrectedWithoutThePower(_Steps):
    def corrected(self, average, beta, t):
        return average / (1 - beta)


@wrong(
    "AdamW",
    caught_by="test_the_first_step_is_lr_long",
    hint="v is corrected with beta1. Each average has its own: v' = v / (1 - beta2 ** t).",
)
class CorrectedWithOneBeta(_Steps):
    def corrected_square(self, average, betas, t):
        return self.corrected(average, betas[0], t)


@wrong(
    "AdamW",
    caught_by="test_the_first_step_is_lr_long",
    hint="v is not corrected, only m is. Both start at 0: v' = v / (1 - beta2 ** t).",
)
class OnlyTheMeanCorrected(_Steps):
    def corrected_square(self, average, betas, t):
        return average


@wrong(
    "AdamW",
    caught_by="test_two_steps_by_hand",
    hint="t is 0 at the first step, so 1 - beta ** t is 0. Count the step before you use it: t = 1, 2, ...",
)
class CountedAfterUse(_Steps):
    def count(self, state):
        state["step"] += 1
        return state["step"] - 1


@wrong(
    "AdamW",
    caught_by="test_equals_torch",
    hint="The bias correction is computed in float32: `1 - beta2 ** t` with t in a tensor loses half of its digits. "
    "Keep t a Python number, or take `t.item()`.",
)
class CorrectedInFloat32(_Steps):
    def corrected(self, average, beta, t):
        return average / (1 - beta ** torch.tensor(float(t), dtype=torch.float32))


@wrong(
    "AdamW",
    caught_by="test_eps_is_added_to_the_root",
    hint="eps stands inside the root: sqrt(v' + eps). It is added afterwards: sqrt(v') + eps.",
)
class EpsInsideTheRoot(_Steps):
    def update(self, m, v, eps, betas, t):
        return m / (v + eps).sqrt()


@wrong(
    "AdamW",
    caught_by="test_eps_is_added_to_the_root",
    hint="eps is added before the bias correction, and then divided with it. Correct v first: sqrt(v') + eps.",
)
class EpsBeforeTheCorrection(_Steps):
    def update(self, m, v, eps, betas, t):
        correction = (1 - betas[1] ** t) ** 0.5
        return m / ((v.sqrt() * correction + eps) / correction)


@wrong(
    "AdamW",
    caught_by="test_two_steps_by_hand",
    hint="m is divided by v', not by its root, so large gradients make small steps. Divide by sqrt(v') + eps.",
)
class RootForgotten(_Steps):
    def update(self, m, v, eps, betas, t):
        return m / (v + eps)


@wrong(
    "AdamW",
    caught_by="test_two_steps_by_hand",
    hint="m is a sum: beta1 * m + g, as in plain momentum. Adam's is an average: beta1 * m + (1 - beta1) * g.",
)
class SumInPlaceOfMean(_Steps):
    def mean(self, m, g, beta):
        return beta * m + g


@wrong(
    "AdamW",
    caught_by="test_two_steps_by_hand",
    hint="v averages the gradient, not its square: beta2 * v + (1 - beta2) * g * g.",
)
class NotSquared(_Steps):
    def square(self, v, g, beta):
        return beta * v + (1 - beta) * g.abs()


@wrong(
    "AdamW",
    caught_by="test_equals_torch",
    hint="The betas are exchanged: m forgets with the first, v with the second.",
)
class BetasExchanged(_Steps):
    def values(self, group):
        return super().values(group) | {"betas": group["betas"][::-1]}


@wrong(
    "AdamW",
    caught_by="test_two_steps_by_hand",
    hint="m and v start at the first gradient and its square. They start at 0: the bias correction counts on it.",
)
class StartedAtTheFirstGradient(_Steps):
    def begin(self, p, g):
        return {"step": 0, "exp_avg": g.clone(), "exp_avg_sq": g * g}


@wrong(
    "AdamW",
    caught_by="test_decay_is_decoupled",
    hint="The decay is added to the gradient, as in plain Adam, and so is divided by sqrt(v') as well. "
    "In AdamW it is decoupled: p = p - lr * weight_decay * p, apart from the gradient.",
)
class DecayInTheGradient(_Steps):
    def with_decay(self, g, p, weight_decay):
        return g + weight_decay * p

    def kept(self, lr, weight_decay):
        return 1.0


@wrong(
    "AdamW",
    caught_by="test_decay_is_decoupled",
    hint="The decay is not multiplied by lr: p = p - lr * weight_decay * p.",
)
class DecayWithoutRate(_Steps):
    def kept(self, lr, weight_decay):
        return 1 - weight_decay


@wrong(
    "AdamW",
    caught_by="test_decay_is_decoupled",
    hint="The decay comes after the step, so that the step shrinks as well. First shrink the weight, then move it.",
)
class DecayAfterTheStep(_Steps):
    def change(self, p, kept, update):
        p.copy_((p - update) * kept)


@wrong(
    "AdamW",
    caught_by="test_decay_is_decoupled",
    hint="weight_decay is ignored: weights never shrink.",
)
class WithoutDecay(_Steps):
    def kept(self, lr, weight_decay):
        return 1.0


@wrong(
    "AdamW",
    caught_by="test_decay_is_decoupled",
    hint="The decay has the wrong sign: weights grow. Shrink them: p = p - lr * weight_decay * p.",
)
class DecayThatGrows(_Steps):
    def kept(self, lr, weight_decay):
        return 1 + lr * weight_decay


@wrong(
    "AdamW",
    caught_by="test_a_zero_gradient_still_decays",
    hint="A weight whose gradient is 0 is skipped. Only `grad is None` means no step; a gradient of 0 decays, "
    "fades the averages, and counts.",
)
class ZeroGradientsSkipped(_Steps):
    def gradient(self, p):
        return p.grad if p.grad is not None and p.grad.any() else None


@wrong(
    "AdamW",
    caught_by="test_a_weight_without_gradient_is_left_alone",
    hint="A missing gradient is taken for 0: the weight decays and its averages fade. Skip it where `grad is None`.",
)
class MissingGradientIsZero(_Steps):
    def gradient(self, p):
        return torch.zeros_like(p) if p.grad is None else p.grad


@wrong(
    "AdamW",
    caught_by="test_a_weight_without_gradient_is_left_alone",
    hint="One t counts the steps of all weights. A weight without a gradient takes no step: each needs a t of its own.",
)
class OneCountForAll(_Steps):
    t = 0

    def loss(self, closure):
        self.t += 1
        return super().loss(closure)

    def count(self, state):
        state["step"] = self.t
        return self.t


@wrong(
    "AdamW",
    caught_by="test_equals_torch",
    hint="t goes up with every weight, not with every step: the later a weight comes, the larger its t. "
    "Keep one t for each weight in `state`.",
)
class CountedWithEveryWeight(_Steps):
    t = 0

    def count(self, state):
        self.t += 1
        state["step"] = self.t
        return self.t


@wrong(
    "AdamW",
    caught_by="test_groups_have_their_own_values",
    hint="The values of the groups are ignored. Read lr, betas, eps and weight_decay from each group, in every step.",
)
class ValuesOfTheConstructor(_Steps):
    def values(self, group):
        return super().values(self.defaults)


@wrong(
    "AdamW",
    caught_by="test_a_changed_learning_rate_counts",
    hint="The learning rate is read once, when the optimizer is made. Schedules write a new one into `param_groups`: "
    'read group["lr"] in every step.',
)
class RateReadOnce(_Steps):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rates = [group["lr"] for group in self.param_groups]

    def values(self, group):
        where = next(i for i, other in enumerate(self.param_groups) if other is group)
        return super().values(group) | {"lr": self.rates[where]}


@wrong(
    "AdamW",
    caught_by="test_gradients_stay_as_they_are",
    hint="The step clears the gradients. Whoever trains does that, with zero_grad: others may still need them.",
)
class GradientsCleared(_Steps):
    def finish(self):
        self.zero_grad()


@wrong(
    "AdamW",
    caught_by="test_gradients_stay_as_they_are",
    hint="The gradients are changed in place (`mul_`, `add_`, `*=`). They are the caller's: compute new tensors.",
)
class GradientsChanged(_Steps):
    def mean(self, m, g, beta):
        self.own = g.clone()
        return beta * m + g.mul_(1 - beta)

    def square(self, v, g, beta):
        return super().square(v, self.own, beta)


@wrong(
    "AdamW",
    caught_by="test_training_goes_on_after_loading",
    hint="t, m and v are kept outside `state`, so state_dict() does not hold them and training cannot go on after "
    "loading. Keep them in self.state[p].",
)
class MemoryOfItsOwn(_Steps):
    def memory(self, p):
        if not hasattr(self, "own"):
            self.own = {}
        return self.own.setdefault(p, {})


@wrong(
    "AdamW",
    caught_by="test_a_closure_gives_the_loss",
    hint="The closure runs without gradients, because all of `step` does. "
    "It calls backward(): run it under `torch.enable_grad()`.",
)
class ClosureWithoutGradients(_Steps):
    def loss(self, closure):
        return None if closure is None else closure()


@wrong(
    "AdamW",
    caught_by="test_a_closure_gives_the_loss",
    hint="The closure is never called. It computes the loss and the gradients: call it before the step.",
)
class ClosureIgnored(_Steps):
    def loss(self, closure):
        return None


@wrong(
    "AdamW",
    caught_by="test_a_closure_gives_the_loss",
    hint="The closure is called, but its loss is not returned.",
)
class LossNotReturned(_Steps):
    def loss(self, closure):
        super().loss(closure)


@wrong(
    "AdamW",
    caught_by="test_values_that_cannot_be",
    hint="Nothing is refused. Raise a ValueError for an lr, eps or weight_decay below 0, or a beta outside [0, 1).",
)
class AnythingGoes(_Steps):
    def complain(self, lr, betas, eps, weight_decay):
        pass


@wrong(
    "AdamW",
    caught_by="test_values_that_cannot_be",
    hint="A beta of 1 is accepted: an average that never changes, and 1 - beta ** t is 0. Raise a ValueError.",
)
class BetaOfOne(_Steps):
    def allowed(self, beta):
        return 0 <= beta <= 1


@wrong(
    "AdamW",
    caught_by="test_values_that_cannot_be",
    hint="A beta of 0 is refused. It is allowed: the average is then the newest gradient.",
)
class NoBetaOfZero(_Steps):
    def allowed(self, beta):
        return 0 < beta < 1


@wrong(
    "AdamW",
    caught_by="test_values_that_cannot_be",
    hint="An lr or eps of 0 is refused. It is allowed; only what is below 0 is a ValueError.",
)
class NothingOfZero(_Steps):
    def complain(self, lr, betas, eps, weight_decay):
        super().complain(lr, betas, eps, weight_decay)
        if min(lr, eps) == 0:
            raise ValueError("a value of 0")


# warmup_inverse_sqrt -------------------------------------------------------------------------------------------------


def _line(step, warmup, peak):
    return peak * (step + 1) / warmup


@wrong(
    "warmup_inverse_sqrt",
    caught_by="test_up_in_a_line",
    hint="Step 0 gets the rate 0 and learns nothing. Steps count from 0: peak * (step + 1) / warmup.",
)
def line_from_zero(step, warmup, peak):
    return peak * step / warmup if step < warmup else peak * math.sqrt(max(warmup, 1) / (step + 1))


@wrong(
    "warmup_inverse_sqrt",
    caught_by="test_down_with_the_root",
    hint="After the warm-up the root is taken of `step`. Steps count from 0: peak * sqrt(warmup / (step + 1)).",
)
def root_of_step(step, warmup, peak):
    return _line(step, warmup, peak) if step < warmup else peak * math.sqrt(max(warmup, 1) / max(step, 1))


@wrong(
    "warmup_inverse_sqrt",
    caught_by="test_up_in_a_line",
    hint="Everything is one step late: step 0 has the rate 0, and step `warmup` the peak. Count with step + 1.",
)
def one_step_late(step, warmup, peak):
    return peak * step / warmup if step < warmup else peak * math.sqrt(max(warmup, 1) / max(step, 1))


@wrong(
    "warmup_inverse_sqrt",
    caught_by="test_the_root_without_warm_up",
    hint="Without warm-up the rate is 0 for ever, since sqrt(warmup / ...) is. With warmup = 0: peak / sqrt(step + 1).",
)
def nothing_without_warmup(step, warmup, peak):
    return _line(step, warmup, peak) if step < warmup else peak * math.sqrt(warmup / (step + 1))


@wrong(
    "warmup_inverse_sqrt",
    caught_by="test_the_root_without_warm_up",
    hint="With warmup = 0 something is divided by 0. Take care of that case: peak / sqrt(step + 1).",
)
def divides_by_warmup(step, warmup, peak):
    n = step + 1
    return peak * warmup**0.5 * min(n**-0.5, n * warmup**-1.5)


@wrong(
    "warmup_inverse_sqrt",
    caught_by="test_the_root_without_warm_up",
    hint="Without warm-up the rate stays at the peak. It falls as ever: peak / sqrt(step + 1).",
)
def constant_without_warmup(step, warmup, peak):
    if warmup == 0:
        return peak
    return _line(step, warmup, peak) if step < warmup else peak * math.sqrt(warmup / (step + 1))


@wrong(
    "warmup_inverse_sqrt",
    caught_by="test_up_in_a_line",
    hint="The highest rate is peak / sqrt(warmup): this is the paper's formula, whose factor is no peak. "
    "Multiply by sqrt(warmup).",
)
def peak_never_reached(step, warmup, peak):
    n = step + 1
    return peak * min(n**-0.5, n * max(warmup, 1) ** -1.5)


@wrong(
    "warmup_inverse_sqrt",
    caught_by="test_down_with_the_root",
    hint="The root counts from the end of the warm-up, and the rate falls far too fast. "
    "It counts all steps: sqrt(warmup / (step + 1)).",
)
def root_since_the_peak(step, warmup, peak):
    return _line(step, warmup, peak) if step < warmup else peak / math.sqrt(step - warmup + 1)


@wrong(
    "warmup_inverse_sqrt",
    caught_by="test_down_with_the_root",
    hint="After the warm-up the rate falls as 1 / step: the root is missing.",
)
def without_root(step, warmup, peak):
    return _line(step, warmup, peak) if step < warmup else peak * max(warmup, 1) / (step + 1)


@wrong(
    "warmup_inverse_sqrt",
    caught_by="test_down_with_the_root",
    hint="After the warm-up the rate stays at the peak. It falls: peak * sqrt(warmup / (step + 1)).",
)
def stays_at_the_peak(step, warmup, peak):
    return _line(step, warmup, peak) if step < warmup else peak


@wrong(
    "warmup_inverse_sqrt",
    caught_by="test_down_with_the_root",
    hint="After the warm-up the rate drops at once: the root is not scaled to begin at the peak. "
    "It is peak * sqrt(warmup / (step + 1)).",
)
def drops_after_warmup(step, warmup, peak):
    return _line(step, warmup, peak) if step < warmup else peak / math.sqrt(step + 1)


# warmup_cosine -------------------------------------------------------------------------------------------------------


def _cosine(step, warmup, total, peak, floor, until=1):
    progress = min(1.0, (step - warmup) / (total - until - warmup))
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


def _enough(warmup, total):
    if total <= warmup + 1:
        raise ValueError("total must be above warmup + 1")


@wrong(
    "warmup_cosine",
    caught_by="test_up_to_the_peak",
    hint="Step 0 gets the rate 0 and learns nothing. Steps count from 0: peak * (step + 1) / warmup.",
)
def cosine_line_from_zero(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    return peak * step / warmup if step < warmup else _cosine(step, warmup, total, peak, floor)


@wrong(
    "warmup_cosine",
    caught_by="test_up_to_the_peak",
    hint="The warm-up starts at the floor. It comes up from 0: peak * (step + 1) / warmup, whatever the floor.",
)
def up_from_the_floor(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    up = step < warmup
    return floor + (peak - floor) * (step + 1) / warmup if up else _cosine(step, warmup, total, peak, floor)


@wrong(
    "warmup_cosine",
    caught_by="test_the_floor_is_kept",
    hint="After the end the cosine rises again. Stop it: progress is at most 1.",
)
def rises_again(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    if step < warmup:
        return _line(step, warmup, peak)
    progress = (step - warmup) / (total - 1 - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


@wrong(
    "warmup_cosine",
    caught_by="test_from_step_0_to_the_end",
    hint="The floor is reached at step `total`, which is never run. The last step is total - 1: "
    "divide by total - 1 - warmup.",
)
def ends_one_late(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    return _line(step, warmup, peak) if step < warmup else _cosine(step, warmup, total, peak, floor, until=0)


@wrong(
    "warmup_cosine",
    caught_by="test_half_a_cosine_with_a_floor",
    hint="The floor is added on top, so the cosine starts above the peak. Only peak - floor swings: "
    "floor + (peak - floor) * (1 + cos) / 2.",
)
def floor_on_top(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    return _line(step, warmup, peak) if step < warmup else floor + _cosine(step, warmup, total, peak, 0.0)


@wrong(
    "warmup_cosine",
    caught_by="test_half_a_cosine_with_a_floor",
    hint="The floor cuts a cosine that goes down to 0. It goes down to the floor: "
    "floor + (peak - floor) * (1 + cos) / 2.",
)
def cut_at_the_floor(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    return _line(step, warmup, peak) if step < warmup else max(floor, _cosine(step, warmup, total, peak, 0.0))


@wrong(
    "warmup_cosine",
    caught_by="test_half_a_cosine_with_a_floor",
    hint="The floor is ignored: the cosine goes down to 0.",
)
def without_floor(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    return _line(step, warmup, peak) if step < warmup else _cosine(step, warmup, total, peak, 0.0)


@wrong(
    "warmup_cosine",
    caught_by="test_from_step_0_to_the_end",
    hint="The cosine starts at step 0, beneath the warm-up, and does not begin at the peak. "
    "Progress is (step - warmup) / (total - 1 - warmup).",
)
def cosine_since_step_0(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    return _line(step, warmup, peak) if step < warmup else _cosine(step, 0, total, peak, floor)


@wrong(
    "warmup_cosine",
    caught_by="test_half_a_cosine_with_a_floor",
    hint="It goes down in a straight line. Half a cosine is flat at both ends: (1 + cos(pi * progress)) / 2.",
)
def down_in_a_line(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    if step < warmup:
        return _line(step, warmup, peak)
    return floor + (peak - floor) * (1 - min(1.0, (step - warmup) / (total - 1 - warmup)))


@wrong(
    "warmup_cosine",
    caught_by="test_from_step_0_to_the_end",
    hint="A quarter of a cosine: it begins flat and ends steep. Half a one is (1 + cos(pi * progress)) / 2.",
)
def a_quarter(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    if step < warmup:
        return _line(step, warmup, peak)
    progress = min(1.0, (step - warmup) / (total - 1 - warmup))
    return floor + (peak - floor) * math.cos(math.pi / 2 * progress)


@wrong(
    "warmup_cosine",
    caught_by="test_from_step_0_to_the_end",
    hint="A whole cosine: down and up again. Half a one is (1 + cos(pi * progress)) / 2.",
)
def a_whole_one(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    if step < warmup:
        return _line(step, warmup, peak)
    progress = min(1.0, (step - warmup) / (total - 1 - warmup))
    return floor + (peak - floor) * (1 + math.cos(2 * math.pi * progress)) / 2


@wrong(
    "warmup_cosine",
    caught_by="test_the_floor_is_kept",
    hint="After the end the rate is 0. It stays at the floor.",
)
def nothing_after_the_end(step, warmup, total, peak, floor=0.0):
    _enough(warmup, total)
    if step < warmup:
        return _line(step, warmup, peak)
    return _cosine(step, warmup, total, peak, floor) if step < total else 0.0


@wrong(
    "warmup_cosine",
    caught_by="test_the_cosine_needs_two_steps",
    hint="A total without room for the cosine is accepted: raise a ValueError unless total > warmup + 1.",
)
def any_total(step, warmup, total, peak, floor=0.0):
    if step < warmup:
        return _line(step, warmup, peak)
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


@wrong(
    "warmup_cosine",
    caught_by="test_the_cosine_needs_two_steps",
    hint="total = warmup + 1 is accepted. The cosine needs two steps, its ends: raise a ValueError for it too.",
)
def one_step_too_few(step, warmup, total, peak, floor=0.0):
    if total <= warmup:
        raise ValueError("total must be above warmup")
    if step < warmup:
        return _line(step, warmup, peak)
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


@wrong(
    "warmup_cosine",
    caught_by="test_the_cosine_needs_two_steps",
    hint="The ValueError comes only once the warm-up is over. Look at total and warmup first, at every step.",
)
def complains_late(step, warmup, total, peak, floor=0.0):
    if step < warmup:
        return _line(step, warmup, peak)
    _enough(warmup, total)
    return _cosine(step, warmup, total, peak, floor)


@wrong(
    "warmup_cosine",
    caught_by="test_the_cosine_needs_two_steps",
    hint="total = warmup + 2 is refused. Two steps are enough for the cosine: the peak, then the floor.",
)
def one_step_too_many(step, warmup, total, peak, floor=0.0):
    _enough(warmup + 1, total)
    return _line(step, warmup, peak) if step < warmup else _cosine(step, warmup, total, peak, floor)


# clip_gradients ------------------------------------------------------------------------------------------------------


def _gradients(parameters):
    return [p.grad for p in parameters if p.grad is not None]


def _norm(gradients, p=2):
    """The norm of all, in float32 or wider."""
    if not gradients:
        return torch.tensor(0.0)
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    return torch.cat([g.flatten().to(wide) for g in gradients]).norm(p)


def _shorten(gradients, norm, max_norm):
    if norm.isfinite():
        for g in gradients:
            g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


@wrong(
    "clip_gradients",
    caught_by="test_three_and_four_make_five",
    hint="Each parameter's gradient is clipped by its own norm, which turns the whole. There is one norm, of all.",
)
def each_on_its_own(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    for g in gradients:
        _shorten([g], _norm([g]) if norm.isfinite() else norm, max_norm)
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_short_gradients_stay",
    hint="Short gradients are stretched to max_norm. Where the factor is above 1, leave them as they are.",
)
def always_scaled(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    if norm.isfinite():
        for g in gradients:
            g.mul_(max_norm / (norm + 1e-6))
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_three_and_four_make_five",
    hint="Each entry is cut at max_norm, which changes the direction. Multiply all gradients by one factor.",
)
def entries_cut(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    if norm.isfinite():
        for g in gradients:
            g.clamp_(-max_norm, max_norm)
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_three_and_four_make_five",
    hint="The norm after clipping is returned. What one wants to see is the norm before.",
)
def norm_after(parameters, max_norm):
    gradients = _gradients(parameters)
    _shorten(gradients, _norm(gradients), max_norm)
    return _norm(gradients)


@wrong(
    "clip_gradients",
    caught_by="test_any_iterable_of_parameters",
    hint="`parameters` is read twice, but a generator such as model.parameters() is empty the second time, "
    "so nothing is clipped. Make a list of it first.",
)
def read_twice(parameters, max_norm):
    norm = _norm(_gradients(parameters))
    _shorten(_gradients(parameters), norm, max_norm)
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_without_gradients_there_is_nothing_to_clip",
    hint="Parameters without a gradient are not left out: their `grad` is None.",
)
def every_parameter_has_one(parameters, max_norm):
    gradients = [p.grad.view_as(p) for p in parameters]
    norm = _norm(gradients)
    _shorten(gradients, norm, max_norm)
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_without_gradients_there_is_nothing_to_clip",
    hint="It fails where no parameter has a gradient. Then there is nothing to clip, and the norm is 0.",
)
def at_least_one(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = torch.stack([_norm([g]) for g in gradients]).norm()
    _shorten(gradients, norm, max_norm)
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_what_is_not_finite_stays",
    hint="One inf or NaN spoils all gradients: max_norm / inf is 0, and 0 * inf is NaN. "
    "Leave them as they are if the norm is not finite.",
)
def spoiled_by_one(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    for g in gradients:
        g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_what_is_not_finite_stays",
    hint="If the norm is not finite the gradients are set to 0, which hides the trouble. Leave them as they are.",
)
def trouble_hidden(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    if norm.isfinite():
        _shorten(gradients, norm, max_norm)
    else:
        for g in gradients:
            g.zero_()
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_gradients_change_in_place",
    hint="The gradients are not changed in place: each parameter gets a new tensor. Use `mul_`.",
)
def new_gradients(parameters, max_norm):
    parameters = [p for p in parameters if p.grad is not None]
    norm = _norm(_gradients(parameters))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) if norm.isfinite() else torch.ones_like(norm)
    for p in parameters:
        p.grad = p.grad * scale
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_three_and_four_make_five",
    hint="The norm is right, but nothing is clipped. `g = g * scale` only makes a new tensor: use `g.mul_(scale)`.",
)
def new_names(parameters, max_norm):
    return _norm(_gradients(parameters))


@wrong(
    "clip_gradients",
    caught_by="test_half_precision_does_not_overflow",
    hint="The squares are computed in float16, where they overflow. Compute the norm in float32.",
)
def squares_in_half(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = sum([(g * g).sum() for g in gradients], torch.tensor(0.0)).sqrt()
    _shorten(gradients, norm, max_norm)
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_three_and_four_make_five",
    hint="The squares are added, but the root is not taken.",
)
def squared(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients) ** 2
    _shorten(gradients, norm, max_norm)
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_three_and_four_make_five",
    hint="The norms of the parameters are added. Squares add up: take the root of the sum of their squares.",
)
def norms_added(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = sum([_norm([g]) for g in gradients], torch.tensor(0.0))
    _shorten(gradients, norm, max_norm)
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_three_and_four_make_five",
    hint="This is the largest entry. The norm is the root of the sum of all squares.",
)
def largest_entry(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients, math.inf)
    _shorten(gradients, norm, max_norm)
    return norm


@wrong(
    "clip_gradients",
    caught_by="test_equals_torchs_clipping",
    hint="The 1e-6 is missing: torch multiplies by max_norm / (norm + 1e-6).",
)
def divided_by_the_norm_alone(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    _shorten(gradients, norm - 1e-6 if norm > 0 else norm, max_norm)
    return norm


# parameter_groups ----------------------------------------------------------------------------------------------------


def _groups(decaying, others, weight_decay):
    return [{"params": list(decaying), "weight_decay": weight_decay}, {"params": list(others), "weight_decay": 0.0}]


def _by(decays, model, weight_decay):
    """Two groups of all that is trained, by a rule for (name, parameter)."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return _groups([p for n, p in named if decays(n, p)], [p for n, p in named if not decays(n, p)], weight_decay)


def _weights(model, kind):
    return {id(module.weight) for module in model.modules() if isinstance(module, kind)}


def _decaying(model):
    return _weights(model, nn.Linear) - _weights(model, nn.Embedding)


@wrong(
    "parameter_groups",
    caught_by="test_norms_and_tables_do_not_decay",
    hint="Whatever has two axes decays, tables and convolutions too. Only weights of `nn.Linear` do: look at modules.",
)
def by_axes(model, weight_decay):
    return _by(lambda name, p: p.ndim >= 2, model, weight_decay)


@wrong(
    "parameter_groups",
    caught_by="test_matrices_decay_and_biases_do_not",
    hint="Everything decays. Biases, norms and tables belong into the second group, without decay.",
)
def all_decay(model, weight_decay):
    return _by(lambda name, p: True, model, weight_decay)


@wrong(
    "parameter_groups",
    caught_by="test_norms_and_tables_do_not_decay",
    hint="Names decide: what is not called bias or norm decays, tables too. Look at the kind of the module instead.",
)
def by_name(model, weight_decay):
    return _by(lambda name, p: "bias" not in name and "norm" not in name, model, weight_decay)


@wrong(
    "parameter_groups",
    caught_by="test_matrices_decay_and_biases_do_not",
    hint="The biases of linear layers decay, too. Of `nn.Linear` only the weight does.",
)
def biases_too(model, weight_decay):
    linear = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()}
    linear -= _weights(model, nn.Embedding)
    return _by(lambda name, p: id(p) in linear, model, weight_decay)


@wrong(
    "parameter_groups",
    caught_by="test_a_tied_head_does_not_decay",
    hint="A head that shares its weight with the embedding decays, and the table with it. Take shared weights out.",
)
def tied_heads_decay(model, weight_decay):
    linear = _weights(model, nn.Linear)
    return _by(lambda name, p: id(p) in linear, model, weight_decay)


@wrong(
    "parameter_groups",
    caught_by="test_a_tied_head_does_not_decay",
    hint="Which module comes first decides about a shared weight. "
    "A weight that any embedding has must not decay, in whatever order they stand.",
)
def first_come(model, weight_decay):
    seen, kinds = set(), {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if id(p) not in seen:
                seen.add(id(p))
                kinds[id(p)] = isinstance(module, nn.Linear) and p is module.weight
    return _by(lambda name, p: kinds[id(p)], model, weight_decay)


@wrong(
    "parameter_groups",
    caught_by="test_a_tied_head_does_not_decay",
    hint="A shared weight stands in both groups, and torch refuses that. Each parameter belongs into one group.",
)
def in_both_groups(model, weight_decay):
    decaying, others = {}, {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            linear = isinstance(module, nn.Linear) and p is module.weight
            if p.requires_grad:
                (decaying if linear else others)[id(p)] = p
    return _groups(decaying.values(), others.values(), weight_decay)


@wrong(
    "parameter_groups",
    caught_by="test_a_shared_weight_appears_once",
    hint="A weight that two layers share appears twice. Keep what you have seen, by `id(p)`.",
)
def shared_twice(model, weight_decay):
    tables = _weights(model, nn.Embedding)
    own = [(m, p) for m in model.modules() for p in m.parameters(recurse=False) if p.requires_grad]
    decaying = [p for m, p in own if isinstance(m, nn.Linear) and p is m.weight and id(p) not in tables]
    chosen = {id(p) for p in decaying}
    others = {id(p): p for _, p in own if id(p) not in chosen}
    return _groups(decaying, others.values(), weight_decay)


@wrong(
    "parameter_groups",
    caught_by="test_frozen_parameters_are_left_out",
    hint="Frozen parameters are included. Leave out those whose requires_grad is False.",
)
def frozen_too(model, weight_decay):
    chosen = _decaying(model)
    found = list(model.parameters())
    return _groups(
        [p for p in found if id(p) in chosen], [p for p in found if id(p) not in chosen], weight_decay=weight_decay
    )


@wrong(
    "parameter_groups",
    caught_by="test_matrices_decay_and_biases_do_not",
    hint="The groups stand in the wrong order: what decays comes first.",
)
def wrong_order(model, weight_decay):
    chosen = _decaying(model)
    return _by(lambda name, p: id(p) in chosen, model, weight_decay)[::-1]


@wrong(
    "parameter_groups",
    caught_by="test_matrices_decay_and_biases_do_not",
    hint="Both groups have the same weight_decay. The second has 0.0.",
)
def the_same_decay(model, weight_decay):
    chosen = _decaying(model)
    first, second = _by(lambda name, p: id(p) in chosen, model, weight_decay)
    return [first, second | {"weight_decay": weight_decay}]


@wrong(
    "parameter_groups",
    caught_by="test_matrices_decay_and_biases_do_not",
    hint="The second group has no weight_decay of its own, so the optimizer gives it its default. Say 0.0.",
)
def no_decay_said(model, weight_decay):
    chosen = _decaying(model)
    first, second = _by(lambda name, p: id(p) in chosen, model, weight_decay)
    return [first, {"params": second["params"]}]


@wrong(
    "parameter_groups",
    caught_by="test_norms_and_tables_do_not_decay",
    hint="Parameters that belong to no known kind of layer are in no group, and so are never trained. "
    "Start from model.parameters(): what does not decay is all the rest.",
)
def known_kinds_only(model, weight_decay):
    chosen = _decaying(model)
    kinds = (nn.Linear, nn.LayerNorm, nn.Embedding)
    known = {id(p) for m in model.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
    groups = _by(lambda name, p: id(p) in chosen, model, weight_decay)
    return [group | {"params": [p for p in group["params"] if id(p) in known]} for group in groups]


@wrong(
    "parameter_groups",
    caught_by="test_norms_and_tables_do_not_decay",
    hint="Only the model's own children are looked at, so linear layers deeper inside do not decay. "
    "Use model.modules(), which reaches all.",
)
def children_only(model, weight_decay):
    layers = [model, *model.children()]
    chosen = {id(m.weight) for m in layers if isinstance(m, nn.Linear)} - _weights(model, nn.Embedding)
    return _by(lambda name, p: id(p) in chosen, model, weight_decay)


@wrong(
    "parameter_groups",
    caught_by="test_matrices_decay_and_biases_do_not",
    hint="An empty group is dropped. There are always two: who sets values by place, as groups[1], relies on it.",
)
def empty_group_dropped(model, weight_decay):
    chosen = _decaying(model)
    return [g for g in _by(lambda name, p: id(p) in chosen, model, weight_decay) if g["params"]]
