"""Mutants of chapter 13's kernel."""

MUTANTS = {
    "flash_attention_triton": [
        ("(tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q", "(tl.num_programs(0) - tl.program_id(0)) * BLOCK_Q"),
        ("tl.maximum(S - T + first + BLOCK_Q, 0)", "tl.maximum(S - T + first + BLOCK_Q - 1, 0)"),
        ("tl.maximum(S - T + first + 1, 0)", "tl.maximum(S - T + first + BLOCK_K, 0)"),
        ("whole = whole // BLOCK_K * BLOCK_K", "whole = (whole + BLOCK_K - 1) // BLOCK_K * BLOCK_K"),
        ("out_ptr += b * out_strides[0] + h * out_strides[1]", "out_ptr += b * out_strides[0] + h * q_strides[1]"),
        ("h // (H // K)", "h // K"),
        ("b * v_strides[0]", "b * k_strides[0]"),
        ("d[None, :] * q_strides[3], mask=t[:, None] < T", "d[None, :] * q_strides[3], mask=t[:, None] <= T"),
        ("tl.sqrt(D * 1.0)", "tl.sqrt(16.0)"),
        ("shrink = tl.exp2(maximum - origin)", "shrink = tl.exp2(maximum - higher)"),
        ("maximum = higher\n", "maximum = tl.max(scores, 1)\n"),
        ("(b * H + h) * T + t, lse, mask=t < T", "(b * K + h) * T + t, lse, mask=t < T"),
        ("tl.where(total == 0.0, 1.0, total)[:, None]", "total[:, None]"),
        ("higher = tl.maximum(maximum, tl.max(scores, 1))", "higher = tl.max(scores, 1)"),
        ("return launch(flash_kernel, q, k, v, causal)", "return launch(flash_kernel, q, k, v)"),
    ],
}
