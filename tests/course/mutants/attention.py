"""Mutants of chapter 03."""

MUTANTS = {
    "softmax": [
        ("x.detach().amax(dim, keepdim=True)", "x.detach().amin(dim, keepdim=True)"),
        ("shifted.exp_()", "shifted.exp().clamp(min=1e-3)"),
        ("e.sum(dim, keepdim=True)", "(e.sum(dim, keepdim=True) + 1e-4)"),
        ("x.detach().amax(dim, keepdim=True)", "x.detach().float().amax(dim, keepdim=True).half()"),
        ("shifted.exp_()", "shifted.detach().exp()"),
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
}
