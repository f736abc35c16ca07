"""The reference, broken on purpose in small ways that nobody's misconception describes: its checks must notice.

Each mutant replaces one piece of text in the reference's source by another.
"""

import inspect

import pytest

from tfmlib import pieces
from tfmlib.course.check import examine

MUTANTS = {
    "softmax": [
        ("x.amax(dim, keepdim=True)", "x.amin(dim, keepdim=True)"),
        ("shifted.exp()", "shifted.exp().clamp(min=1e-3)"),
        ("e.sum(dim, keepdim=True)", "(e.sum(dim, keepdim=True) + 1e-4)"),
        ("x.amax(dim, keepdim=True)", "x.detach().float().amax(dim, keepdim=True).half()"),
        ("shifted.exp()", "shifted.detach().exp()"),
    ],
    "causal_mask": [
        (".tril(S - T)", ".tril(S // T - 1)"),
        ("torch.ones(T, S, dtype=torch.bool)", "torch.ones(S, S, dtype=torch.bool)"),
        ("if T > S:", "if T > S + 1:"),
        ("S = T if S is None else S", "S = T if S is None else min(S, 6)"),
    ],
    "padding_mask": [
        ("is_token[:, None, None, :]", "is_token[:1, None, None, :].expand(len(is_token), 1, 1, -1)"),
        ("is_token[:, None, None, :]", "is_token[:, None, None, :].flip(-1)"),
        ("is_token[:, None, None, :]", "is_token[:, None, None, :].byte()"),
        ("is_token[:, None, None, :]", "is_token.cumprod(-1).bool()[:, None, None, :]"),
    ],
    "attention_weights": [
        ("math.sqrt(q.shape[-1])", "math.sqrt(q.shape[-1] + 1)"),
        ("~mask & ~blind, -math.inf", "~mask & ~blind, -30.0"),
        (".masked_fill(blind, 0.0)", ".masked_fill(blind, 1e-3)"),
        ("mask.any(-1, keepdim=True)", "mask.any()"),
        ("return softmax(scores)\n", "return softmax(scores.float()).to(scores.dtype)\n"),
        ("if mask.dtype != torch.bool:", "if mask.is_floating_point():"),
    ],
    "scaled_dot_product_attention": [
        (
            "attention_weights(q, k, mask) @ v",
            "attention_weights(q, k) @ v if mask is None else attention_weights(q, k, mask[:1]) @ v",
        ),
        ("attention_weights(q, k, mask) @ v", "attention_weights(q, k.detach(), mask) @ v"),
        ("attention_weights(q, k, mask) @ v", "(attention_weights(q, k, mask) @ v).float()"),
        ("attention_weights(q, k, mask) @ v", "attention_weights(q, k, mask) @ v.relu()"),
    ],
    "split_heads": [
        (".transpose(1, 2)", ".transpose(1, 2).flip(1)"),
        ("if width % n_heads:", "if width < n_heads:"),
        (
            "x.view(B, T, n_heads, width // n_heads)",
            "x.contiguous().view(T, B, n_heads, width // n_heads).transpose(0, 1)",
        ),
        (".transpose(1, 2)", ".transpose(1, 2).float()"),
    ],
    "merge_heads": [
        ("x.transpose(1, 2).flatten(2)", "x.flip(1).transpose(1, 2).flatten(2)"),
        ("x.transpose(1, 2).flatten(2)", "x.transpose(1, 2).flatten(1)"),
        ("x.transpose(1, 2).flatten(2)", "x.transpose(1, 2).flatten(2).double()"),
    ],
    "repeat_kv": [
        ("x.repeat_interleave(n_repeat, dim=1)", "x.repeat_interleave(2, dim=1)"),
        ("x.repeat_interleave(n_repeat, dim=1)", "x.repeat_interleave(n_repeat, dim=1).flip(1)"),
        ("x.repeat_interleave(n_repeat, dim=1)", "x.repeat_interleave(n_repeat, dim=1) / n_repeat"),
    ],
    "MultiHeadAttention": [
        ("source = x if context is None else context", "source = x"),
        ("if self.rope_base is not None and context is None:", "if self.rope_base is not None:"),
        ("start = 0 if cache is None else cache.length", "start = 0 if cache is None else cache.length + 1"),
        ("if positions is None:\n", "if positions is None or positions.ndim > 1:\n"),
        ("k, v = cache.append(k, v)  #", "k, v = cache.append(k, v)[0], v  #"),
        ("self.o_proj(merge_heads(mixed))", "self.o_proj(merge_heads(mixed.flip(1)))"),
        ("repeat_kv(k, group), repeat_kv(v, group)", "repeat_kv(k, group), repeat_kv(k, group)"),
        ("(q, k, v, mask)", "(q, k, v, mask if cache is None else None)"),
        ("(q, k, v, mask)", "(q, k, v, mask if context is None else None)"),
        ("nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)", "nn.Linear(d_model, n_kv_heads * head_dim)"),
        ("n_heads if n_kv_heads is None else n_kv_heads", "n_heads"),
        ("rotary.apply_rope(k, positions, self.rope_base)", "rotary.apply_rope(k, positions + 1, self.rope_base)"),
    ],
}

CASES = [(name, old, new) for name, table in MUTANTS.items() for old, new in table]


def test_every_piece_is_broken_in_at_least_three_ways():
    assert list(MUTANTS) == list(pieces.PIECES)
    assert min(map(len, MUTANTS.values())) >= 3


@pytest.mark.parametrize(("name", "old", "new"), CASES, ids=[f"{n}-{new[:40]}" for n, _, new in CASES])
def test_a_mutant_of_the_reference_is_rejected(name, old, new):
    source = inspect.getsource(pieces.reference(name))
    assert old in source
    scope = dict(vars(pieces.find(name).home))
    exec(compile(source.replace(old, new), f"<mutant of {name}>", "exec"), scope)
    assert not examine(scope[name], name).passed
