"""A learner whose kernel is right: one plain loop over the tiles of keys."""

from tfmlib.kernels import launch, tl, triton


@triton.jit(do_not_specialize=["H", "K", "T", "S"])
def flash_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    H,
    K,
    T,
    S,
    D: tl.constexpr,
    causal: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    i, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    g = h // (H // K)
    t = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, D)
    q_head = q_ptr + b * q_strides[0] + h * q_strides[1]
    k_head = k_ptr + b * k_strides[0] + g * k_strides[1]
    v_head = v_ptr + b * v_strides[0] + g * v_strides[1]
    out_head = out_ptr + b * out_strides[0] + h * out_strides[1]
    q = tl.load(q_head + t[:, None] * q_strides[2] + d[None, :] * q_strides[3], mask=t[:, None] < T, other=0.0)
    m = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    end = S
    if causal:
        end = tl.minimum(S, tl.maximum(0, S - T + (i + 1) * BLOCK_Q))
    for start in range(0, end, BLOCK_K):
        s = start + tl.arange(0, BLOCK_K)
        k = tl.load(k_head + s[None, :] * k_strides[2] + d[:, None] * k_strides[3], mask=s[None, :] < S, other=0.0)
        v = tl.load(v_head + s[:, None] * v_strides[2] + d[None, :] * v_strides[3], mask=s[:, None] < S, other=0.0)
        x = tl.dot(q, k, input_precision="ieee") / tl.sqrt(D * 1.0)
        x = tl.where(s[None, :] < S, x, -float("inf"))
        if causal:
            x = tl.where(s[None, :] <= S - T + t[:, None], x, -float("inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        shrink = tl.exp(m - m_safe)
        p = tl.exp(x - m_safe[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    safe = tl.where(total == 0.0, 1.0, total)
    out = (acc / safe[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_head + t[:, None] * out_strides[2] + d[None, :] * out_strides[3], out, mask=t[:, None] < T)
    tl.store(lse_ptr + (b * H + h) * T + t, m + tl.log(safe), mask=t < T)


def flash_attention_triton(q, k, v, causal=False):
    return launch(flash_kernel, q, k, v, causal)
