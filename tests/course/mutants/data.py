"""Mutants of chapter 09's batches."""

MUTANTS = {
    "token_batches": [
        ("len(tokens) - T\n", "min(len(tokens) - T, 500)\n"),
        ("if n_starts < 1:", "if n_starts < 0:"),
        ("if n_starts < 1:", "if not n_starts:"),
        ("(B, 1), generator=generator)", "(B, 1), generator=generator).sort(dim=0).values"),
        ("(B, 1), generator=generator)", "(B, 1), generator=generator) // 2 * 2"),
        ("torch.randint(n_starts,", "torch.randint(100_000, "),
        ("torch.randint(n_starts, (B, 1)", "torch.randint(n_starts, (max(B, 2), 1)"),
        ("(B, 1), generator=generator)", "(B, T + 1), generator=generator)"),
        (".long()", ".float()"),
        (".long()", ".int()"),
        ("windows[:, 1:]", "windows[:, 1:].flip(0)"),
        ("windows[:, 1:]", "windows[:, 1:].flip(1)"),
        ("yield windows[:, :-1], windows[:, 1:]", "yield windows[:, 1:], windows[:, :-1]"),
        ("yield windows[:, :-1], windows[:, 1:]", "yield windows[:, :-1], windows[:, -1]"),
        ("yield windows[:, :-1], windows[:, 1:]", "yield windows"),
        ("yield windows[:, :-1], windows[:, 1:]", "yield windows[:, :-1].clone(), windows[:, 1:]; tokens[0] = 0"),
        ("            starts =", "            torch.rand(1)\n            starts ="),
        ("while True:", "for _ in range(90):"),
        ("return batches()", "return list(__import__('itertools').islice(batches(), 1000))"),
        (
            "return batches()",
            "made = batches()\n    first = next(made)\n    return __import__('itertools').chain([first], made)",
        ),
    ],
}
