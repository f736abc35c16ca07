"""Other correct implementations of temperature, top-k, top-p, drawing, the loop, and beam search."""

import heapq
import math
from contextlib import contextmanager

import torch
from torch import Tensor

from tfmlib import sampling

from . import correct

INF = math.inf


def _rows(logits, change):
    """Change every row, as a list of numbers, and put the rows together again."""
    rows = [change(row) for row in logits.reshape(-1, logits.shape[-1]).tolist()]
    return torch.tensor(rows, dtype=logits.dtype).view(logits.shape)


def _better(logits):
    """(..., V, V), True at [i, j] where token j comes before token i: likelier, or equal with a lower id."""
    mine, other = logits.unsqueeze(-1), logits.unsqueeze(-2)
    ids = torch.arange(logits.shape[-1])
    return (other > mine) | ((other == mine) & (ids < ids[:, None]))


# apply_temperature ----------------------------------------------------------------------------------------------------


@correct("apply_temperature")
def temperature_by_mask(logits, temperature):
    """A mask of the first maximum: where the running count of maxima is one."""
    if math.isnan(temperature) or temperature < 0:
        raise ValueError("temperature is negative or NaN")
    if temperature > 0:
        return torch.div(logits, temperature)
    top = logits == logits.max(dim=-1, keepdim=True).values
    first = top & (top.cumsum(-1) == 1)
    return torch.where(first, logits, -INF)


@correct("apply_temperature")
def temperature_by_lists(logits, temperature):
    """Plain numbers, row by row."""
    if not temperature >= 0:
        raise ValueError(f"no temperature: {temperature}")

    def change(row):
        if temperature:
            return [x / temperature for x in row]
        best = row.index(max(row))
        return [x if t == best else -INF for t, x in enumerate(row)]

    return _rows(logits, change)


@correct("apply_temperature")
def temperature_in_float32(logits, temperature):
    """Half precision becomes float32; multiplied by the inverse."""
    if not temperature >= 0:
        raise ValueError("negative")
    x = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if temperature == 0:
        out = torch.full(x.shape, -INF, dtype=x.dtype)
        at = x.argmax(dim=-1, keepdim=True)
        out.scatter_(-1, at, x.gather(-1, at))
        return out
    return x * (1.0 / temperature)


# keep_top_k -----------------------------------------------------------------------------------------------------------


@correct("keep_top_k")
def top_k_by_pairs(logits, k):
    """A token stays if fewer than k others come before it."""
    if k <= 0:
        raise ValueError("k is too small")
    return torch.where(_better(logits).sum(-1) < k, logits, -INF)


@correct("keep_top_k")
def top_k_one_by_one(logits, k):
    """The maximum, k times, each time without those that were found."""
    if k < 1:
        raise ValueError("k is too small")
    left = logits.clone()
    stays = torch.zeros_like(logits, dtype=torch.bool)
    for _ in range(min(k, logits.shape[-1])):
        at = left.argmax(-1, keepdim=True)
        stays.scatter_(-1, at, True)
        left.scatter_(-1, at, -INF)
    return torch.where(stays, logits, -INF)


@correct("keep_top_k")
def top_k_by_threshold(logits, k):
    """All above the k-th, then of those that equal it as many as there is room for, counted from the left."""
    if k < 1:
        raise ValueError("k is too small")
    if k >= logits.size(-1):
        return logits
    kth = logits.topk(k, dim=-1).values[..., -1:]
    above, equal = logits > kth, logits == kth
    room = k - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(-1) <= room))), -INF)


@correct("keep_top_k")
def top_k_by_lists(logits, k):
    """Plain numbers, row by row."""
    if k < 1:
        raise ValueError("k is too small")

    def change(row):
        best = set(heapq.nsmallest(k, range(len(row)), key=lambda t: (-row[t], t)))
        return [x if t in best else -INF for t, x in enumerate(row)]

    return _rows(logits, change)


# keep_top_p -----------------------------------------------------------------------------------------------------------


@correct("keep_top_p")
def top_p_by_pairs(logits, p):
    """The mass of all tokens that come before a token, by one product; float64."""
    if p < 0 or p != p:
        raise ValueError("p is negative or NaN")
    if p >= 1:
        return logits
    probabilities = logits.double().softmax(-1)
    better = _better(logits)
    before = (better * probabilities.unsqueeze(-2)).sum(-1)
    return torch.where((before < p) | ~better.any(-1), logits, -INF)


@correct("keep_top_p")
def top_p_by_shift(logits, p):
    """The well-known way: remove what stands after the sum reaches p, the mask moved by one to the right."""
    if not p >= 0:
        raise ValueError("p is negative or NaN")
    if p >= 1.0:
        return logits.clone()
    ranked, ids = torch.sort(logits.float() if logits.dtype != torch.float64 else logits, descending=True, stable=True)
    reached = ranked.softmax(dim=-1).cumsum(dim=-1) >= p
    remove = torch.cat([torch.zeros_like(reached[..., :1]), reached[..., :-1]], dim=-1)
    return logits.masked_fill(remove.gather(-1, ids.argsort(-1)), -INF)


@correct("keep_top_p")
def top_p_by_size(logits, p):
    """The size of the nucleus by a search in the sorted sums, then the tokens' ranks."""
    if not p >= 0:
        raise ValueError("p is negative or NaN")
    order = logits.argsort(dim=-1, descending=True, stable=True)
    sums = logits.double().softmax(-1).gather(-1, order).cumsum(-1)
    V = logits.shape[-1]
    size = V if p >= 1 else (sums < p).sum(-1, keepdim=True) + 1
    return logits.masked_fill(order.argsort(-1) >= size, -INF)


@correct("keep_top_p")
def top_p_by_lists(logits, p):
    """Plain numbers, row by row."""
    if math.isnan(p) or p < 0:
        raise ValueError("p is negative or NaN")

    def change(row):
        if p >= 1:
            return row
        top = max(row)
        weights = [math.exp(x - top) for x in row]
        total, so_far, out = sum(weights), 0.0, [-INF] * len(row)
        for t in sorted(range(len(row)), key=lambda t: (-row[t], t)):
            out[t] = row[t]
            so_far += weights[t] / total
            if so_far >= p:
                break
        return out

    return _rows(logits, change)


# sample ---------------------------------------------------------------------------------------------------------------


@correct("sample")
def by_multinomial(logits, generator=None):
    """torch's own draw, from probabilities in float32 at least."""
    probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    rows = probabilities.reshape(-1, logits.shape[-1])
    return torch.multinomial(rows, 1, generator=generator).view(logits.shape[:-1])


@correct("sample")
def by_gumbel_noise(logits, generator=None):
    """The maximum of logits plus Gumbel noise."""
    u = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
    return (logits.double() - (-u.log()).log()).argmax(dim=-1)


@correct("sample")
def by_exponential_race(logits, generator=None):
    """Every token waits for an exponential time, shorter if it is likely; the first one wins."""
    p = torch.softmax(logits.float(), dim=-1)
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(dim=-1)


@correct("sample")
def by_cumulative_sums(logits, generator=None):
    """A uniform number, and the first token whose running sum is above it."""
    p = logits.to(torch.float64).softmax(-1)
    u = torch.rand(*logits.shape[:-1], 1, generator=generator, dtype=torch.float64)
    sums = p.cumsum(-1)
    return (sums <= u * sums[..., -1:]).sum(dim=-1)


@correct("sample")
def row_by_row(logits, generator=None):
    """One search in the running sums for each row, with numbers that are drawn at once in float32."""
    flat = logits.float().softmax(-1).reshape(-1, logits.shape[-1])
    sums = flat.cumsum(-1)
    u = torch.rand((len(flat), 1), generator=generator) * sums[:, -1:]
    last = (flat > 0).long().cumsum(-1).argmax(-1)
    ids = torch.searchsorted(sums, u, right=True).squeeze(-1)
    return torch.minimum(ids, last).reshape(logits.shape[:-1])


# generate -------------------------------------------------------------------------------------------------------------


@correct("generate")
def with_a_buffer(model, ids, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, generator=None, eos_id=None):
    """All places are there from the start; inference mode; modes by name."""
    modes = {name: module.training for name, module in model.named_modules()}
    B, T = ids.shape
    out = torch.cat([ids, ids.new_zeros(B, max_new_tokens)], dim=1)
    growing = torch.ones(B, dtype=torch.bool)
    length = T
    try:
        model.train(False)
        with torch.inference_mode():
            while length < T + max_new_tokens and growing.any():
                logits = sampling.apply_temperature(model(out[:, :length])[:, -1, :], temperature)
                if top_k is not None:
                    logits = sampling.keep_top_k(logits, top_k)
                if top_p is not None:
                    logits = sampling.keep_top_p(logits, top_p)
                token = sampling.sample(logits, generator)
                if eos_id is not None:
                    token = torch.where(growing, token, torch.full_like(token, eos_id))
                    growing = growing & (token != eos_id)
                out[:, length] = token
                length += 1
    finally:
        for name, module in model.named_modules():
            module.training = modes[name]
    return out[:, :length].clone()


@contextmanager
def _asleep(model):
    awake = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield model
    finally:
        for module in awake:
            module.training = True


@correct("generate")
@torch.no_grad()
def without_the_other_pieces(
    model, ids, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, generator=None, eos_id=None
):
    """One sort does it all: the places of a row from the most likely down, cut off at both limits, then a draw."""

    def choose(logits):
        ranked, order = logits.double().sort(dim=-1, descending=True, stable=True)
        if temperature == 0:
            return order[:, 0]
        weights = ((ranked - ranked[:, :1]) / temperature).exp()
        if top_k is not None:
            weights[:, top_k:] = 0
        if top_p is not None and top_p < 1:
            before = weights.cumsum(-1) - weights
            limit = top_p * weights.sum(-1, keepdim=True)
            first = torch.arange(weights.shape[-1]) == 0
            weights = weights * ((before < limit) | first)
        return order.gather(1, torch.multinomial(weights, 1, generator=generator))[:, 0]

    rows = [list(row) for row in ids.tolist()]
    ended = [False] * len(rows)
    with _asleep(model):
        for _ in range(max_new_tokens):
            tokens = choose(model(torch.tensor(rows))[:, -1]).tolist()
            for i, token in enumerate(tokens):
                rows[i].append(eos_id if ended[i] else token)
                ended[i] = eos_id is not None and rows[i][-1] == eos_id
            if all(ended):
                break
    return torch.tensor(rows)


@correct("generate")
def only_rows_that_grow(
    model, ids, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, generator=None, eos_id=None
):
    """Rows that have ended leave the batch; they are filled up at the end."""
    out = list(ids)
    growing = list(range(len(out)))
    with _asleep(model), torch.no_grad():
        for _ in range(max_new_tokens):
            logits = model(torch.stack([out[i] for i in growing]))[:, -1]
            for change, option in (
                (sampling.apply_temperature, temperature),
                (sampling.keep_top_k, top_k),
                (sampling.keep_top_p, top_p),
            ):
                logits = logits if option is None else change(logits, option)
            for i, token in zip(growing, sampling.sample(logits, generator), strict=True):
                out[i] = torch.cat([out[i], token[None]])
            growing = [i for i in growing if eos_id is None or out[i][-1] != eos_id]
            if not growing:
                break
    return torch.nn.utils.rnn.pad_sequence(out, batch_first=True, padding_value=-1 if eos_id is None else eos_id)


# beam_search ----------------------------------------------------------------------------------------------------------


@correct("beam_search")
def beams_in_tensors(log_probs, prompt, n_beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """Finished beams and all continuations in one row of scores, ranked by a stable sort."""
    if n_beams < 1:
        raise ValueError("no beams")
    beams: list[Tensor] = [prompt]
    sums, ended, T = torch.zeros(1, dtype=torch.float64), [False], len(prompt)
    for step in range(1, max_new_tokens + 1):
        if all(ended):
            break
        table = log_probs(torch.stack([ids for ids, over in zip(beams, ended, strict=True) if not over])).double()
        totals, scores, origin, tokens, row = [], [], [], [], 0
        for i, over in enumerate(ended):
            total = sums[i : i + 1] if over else sums[i] + table[row]
            row += not over
            totals.append(total)
            scores.append(total / (len(beams[i]) - T if over else step) ** length_penalty)
            origin += [i] * len(total)
            tokens += [None] if over else range(len(total))
        totals, scores = torch.cat(totals), torch.cat(scores)
        order = scores.argsort(descending=True, stable=True)
        order = [at for at in order.tolist() if totals[at] > -INF][:n_beams]
        ended = [tokens[at] is None or tokens[at] == eos_id for at in order]
        beams = [
            beams[origin[at]] if tokens[at] is None else torch.cat([beams[origin[at]], torch.tensor([tokens[at]])])
            for at in order
        ]
        sums = totals[order]
    lengths = [max(len(ids) - T, 1) for ids in beams]
    return [(ids, total / n**length_penalty) for ids, total, n in zip(beams, sums.tolist(), lengths, strict=True)]


@correct("beam_search")
def one_question_a_beam(log_probs, prompt, n_beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """Plain numbers, a question for each beam alone, and a heap in place of a sort."""
    if n_beams <= 0:
        raise ValueError("no beams")
    start = tuple(prompt.tolist())

    def score(new, total):
        return total / len(new) ** length_penalty if new else 0.0

    beams = [((), 0.0)]
    for _ in range(max_new_tokens):
        every = []
        for new, total in beams:
            if new and new[-1] == eos_id:
                every.append((-score(new, total), len(every), new, total))
                continue
            (row,) = log_probs(torch.tensor([start + new])).tolist()
            for token, log_p in enumerate(row):
                if log_p != -INF:
                    longer = (*new, token)
                    every.append((-score(longer, total + log_p), len(every), longer, total + log_p))
        beams = [(new, total) for _, _, new, total in heapq.nsmallest(n_beams, every)]
    return [(torch.tensor(start + new), float(score(new, total))) for new, total in beams]


class _Beam:
    def __init__(self, ids, log_p=0.0, before=None, ended=False):
        self.ids, self.ended = ids, ended
        self.total = log_p + (before.total if before else 0.0)
        self.length = before.length + 1 if before else 0

    def score(self, penalty):
        return self.total * self.length**-penalty if self.length else 0.0


@correct("beam_search")
def beams_as_objects(log_probs, prompt, n_beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """Objects that know their sum; float32 as it comes; recursion for the loop."""
    if n_beams < 1:
        raise ValueError("no beams")

    def search(beams, steps):
        growing = [beam for beam in beams if not beam.ended]
        if not growing or steps == 0:
            return beams
        table = dict(zip(map(id, growing), log_probs(torch.stack([beam.ids for beam in growing])), strict=True))
        every = []
        for beam in beams:
            if beam.ended:
                every += [beam]
            else:
                row = table[id(beam)]
                for token in row.isfinite().nonzero()[:, 0]:
                    ids = torch.cat([beam.ids, token.view(1)])
                    every += [_Beam(ids, row[token].item(), beam, token.item() == eos_id)]
        every.sort(key=lambda beam: -beam.score(length_penalty))
        return search(every[:n_beams], steps - 1)

    found = search([_Beam(prompt)], max_new_tokens)
    return [(beam.ids, beam.score(length_penalty)) for beam in found]
