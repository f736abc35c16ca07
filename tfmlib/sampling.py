"""From logits to text: how the next token is chosen, and the loop that goes on from there.

Shapes: B batch, T tokens, N beams, V vocabulary. A token that may not be chosen has the logit -inf.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Sharpen or flatten a distribution: logits (..., V) -> (..., V).

    Divides by `temperature`: below 1 likely tokens gain, above 1 unlikely ones do. 0 means greedy: the first maximum
    keeps its logit, all others become -inf. Raises ValueError for a negative temperature, or NaN.

    >>> apply_temperature(torch.tensor([1.0, 3.0, 3.0]), 0)
    tensor([-inf, 3., -inf])
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if temperature > 0:
        return logits / temperature
    best = logits.argmax(-1, keepdim=True)  # the first of several
    return torch.full_like(logits, -math.inf).scatter_(-1, best, logits.gather(-1, best))


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k most likely tokens: logits (..., V) -> (..., V), the rest -inf.

    Exactly k stay, of equal ones those with the lower ids; all where k >= V. Raises ValueError if k < 1.

    >>> keep_top_k(torch.tensor([1.0, 3.0, 3.0, 3.0]), 2)
    tensor([-inf, 3., 3., -inf])
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    best = logits.argsort(dim=-1, descending=True, stable=True)[..., :k]
    return torch.full_like(logits, -math.inf).scatter_(-1, best, logits.gather(-1, best))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the nucleus: the fewest tokens whose probabilities sum to p or more; the rest -inf, (..., V) -> (..., V).

    Tokens enter from the most likely down, of equal ones the lower id first. The one that crosses p stays, so there is
    always one; p >= 1 keeps all. Probabilities in at least float32. Raises ValueError for a negative p, or NaN.
    Holtzman et al. (2020).

    >>> keep_top_p(torch.tensor([0.5, 0.41, 0.09]).log(), 0.9).isfinite()
    tensor([ True,  True, False])
    """
    if not p >= 0:
        raise ValueError(f"p must be 0 or more, got {p}")
    if p >= 1:
        return logits.clone()
    likeliest, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = likeliest.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # what is there without the token itself
    enough = before >= p
    enough[..., 0] = False
    return logits.masked_fill(torch.zeros_like(enough).scatter(-1, order, enough), -math.inf)


def sample(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token from each distribution softmax(logits): (..., V) -> ids (...), int64.

    Probabilities in at least float32. A logit of -inf is never drawn. `generator` is the only source of chance,
    torch's own if None.

    >>> sample(torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]]))
    tensor([0, 1])
    """
    sums = logits.double().softmax(-1).cumsum(-1)  # token i owns the numbers from sums[i - 1] to sums[i]
    total = sums[..., -1:]
    number = torch.rand(total.shape, generator=generator, dtype=sums.dtype, device=sums.device) * total
    last = (sums < total).sum(-1)  # the last token that owns any, should rounding give the total itself
    return torch.searchsorted(sums, number, right=True)[..., 0].minimum(last)


def beam_search(
    log_probs: Callable[[Tensor], Tensor],
    prompt: Tensor,
    n_beams: int,
    max_new_tokens: int,
    eos_id: int | None = None,
    length_penalty: float = 0.0,
) -> list[tuple[Tensor, float]]:
    """Search for the likeliest continuations of a prompt (T,): the best (ids, score) first, at most n_beams.

    `log_probs(ids)` gives the log-probabilities of the next token, (N, T) -> (N, V). `ids` begin with the prompt.
    `score` is the sum of the new tokens' log-probabilities, divided by their number ** length_penalty; 0 if there are
    none. A beam that has chosen `eos_id`, which counts as one of its tokens, grows no more. At each step finished beams
    and all continuations are ranked by score together, and the best n_beams stay. Of equal scores that of the better
    beam of the step before comes first, then the lower id. A token of log-probability -inf is no continuation, so there
    may be fewer beams, or none. Raises ValueError if n_beams < 1.

    >>> log_probs = lambda ids: torch.tensor([[0.6, 0.4]]).log().expand(len(ids), 2)
    >>> [ids.tolist() for ids, score in beam_search(log_probs, torch.tensor([1]), 2, 2)]
    [[1, 0, 0], [1, 0, 1]]
    """
    if n_beams < 1:
        raise ValueError(f"n_beams must be at least 1, got {n_beams}")
    beams = [(prompt, 0.0, False)]  # ids, sum of log-probabilities, and whether it has ended

    def score(beam):
        n_new = len(beam[0]) - len(prompt)
        return beam[1] / n_new**length_penalty if n_new else 0.0

    for _ in range(max_new_tokens):
        growing = [ids for ids, _, ended in beams if not ended]
        if not growing:
            break
        likeliest = log_probs(torch.stack(growing)).double().sort(dim=-1, descending=True, stable=True)
        rows = iter(zip(likeliest.values[:, :n_beams].tolist(), likeliest.indices[:, :n_beams], strict=True))
        candidates = []
        for ids, total, ended in beams:
            if ended:
                candidates.append((ids, total, True))
                continue
            for log_p, token in zip(*next(rows), strict=True):
                if log_p > -math.inf:
                    candidates.append((torch.cat([ids, token[None]]), total + log_p, bool(token == eos_id)))
        beams = sorted(candidates, key=score, reverse=True)[:n_beams]  # equals keep their order
    return [(beam[0], score(beam)) for beam in beams]


def generate(
    model: nn.Module,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    eos_id: int | None = None,
) -> Tensor:
    """Continue every row of ids (B, T), one token at a time: -> (B, T + new), new <= max_new_tokens.

    Each token is drawn from the model's logits at the last position, after temperature, then top_k, then top_p (None
    leaves a step out). `model(ids)` gives (B, T, V). A row that has chosen `eos_id` is filled up with it, and the loop
    stops when all have. While it runs the model is in eval mode and computes no gradients; then every submodule's mode
    is as it was.

    >>> class Count(nn.Module):
    ...     def forward(self, ids):
    ...         return torch.nn.functional.one_hot((ids + 1) % 5, 5).float()
    >>> generate(Count(), torch.tensor([[2]]), 4, temperature=0).tolist()
    [[2, 3, 4, 0, 1]]
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    try:
        with torch.no_grad():
            for _ in range(max_new_tokens):
                logits = apply_temperature(model(ids)[:, -1], temperature)  # (B, V)
                logits = logits if top_k is None else keep_top_k(logits, top_k)
                logits = logits if top_p is None else keep_top_p(logits, top_p)
                chosen = sample(logits, generator)  # (B,)
                if eos_id is not None:
                    chosen = chosen.masked_fill(ended, eos_id)
                    ended |= chosen == eos_id
                ids = torch.cat([ids, chosen[:, None]], dim=1)
                if ended.all():
                    break
    finally:
        for module, training in modes.items():
            module.training = training
    return ids
