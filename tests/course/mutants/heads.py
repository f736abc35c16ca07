"""Mutants of chapter 04."""

MUTANTS = {
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
        ("x.unsqueeze(2).expand(-1, -1, n_repeat, -1, -1).flatten(1, 2)", "x.repeat_interleave(2, dim=1)"),
        (
            "x.unsqueeze(2).expand(-1, -1, n_repeat, -1, -1).flatten(1, 2)",
            "x.repeat_interleave(n_repeat, dim=1).flip(1)",
        ),
        (
            "x.unsqueeze(2).expand(-1, -1, n_repeat, -1, -1).flatten(1, 2)",
            "x.repeat_interleave(n_repeat, dim=1) / n_repeat",
        ),
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
