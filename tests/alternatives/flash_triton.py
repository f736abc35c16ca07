"""Other correct kernels of attention. Each takes what `kernels.launch` gives it."""

from tfmlib.kernels import launch, tl, triton

from . import correct


@triton.jit(do_not_specialize=["H", "K", "T", "S"])
def plain_kernel(
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
    first = tl.program_id(0) * BLOCK_Q
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_head = h // (H // K)
    t, d = first + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    q_ptr += b * q_strides[0] + h * q_strides[1]
    k_ptr += b * k_strides[0] + kv_head * k_strides[1]
    v_ptr += b * v_strides[0] + kv_head * v_strides[1]
    out_ptr += b * out_strides[0] + h * out_strides[1]
    q = tl.load(q_ptr + t[:, None] * q_strides[2] + d[None, :] * q_strides[3], mask=t[:, None] < T, other=0.0)
    scale = 1.0 / tl.sqrt(D * 1.0)
    maximum = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, D), tl.float32)
    end = S
    if causal:
        end = tl.minimum(S, tl.maximum(S - T + first + BLOCK_Q, 0))
    for start in range(0, end, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        there = key[:, None] < S
        k = tl.load(k_ptr + key[:, None] * k_strides[2] + d[None, :] * k_strides[3], mask=there, other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_strides[2] + d[None, :] * v_strides[3], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = key[None, :] < S
        if causal:
            seen = seen & (key[None, :] <= S - T + t[:, None])
        scores = tl.where(seen, scores * 1.4426950408889634, -float("inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        origin = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(maximum - origin)
        p = tl.exp2(scores - origin[:, None])
        total = total * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        maximum = higher
    total = tl.where(total == 0.0, 1.0, total)
    out_tile = out_ptr + t[:, None] * out_strides[2] + d[None, :] * out_strides[3]
    tl.store(out_tile, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=t[:, None] < T)
    lse = (maximum + tl.log2(total)) * 0.6931471805599453
    tl.store(lse_ptr + (b * H + h) * T + t, lse, mask=t < T)


@correct("flash_attention_triton")
def every_tile_masked(q, k, v, causal=False):
    """One plain loop over the tiles, each with its mask."""
    return launch(plain_kernel, q, k, v, causal)


@triton.jit(do_not_specialize=["H", "K", "T", "S"])
def backwards_kernel(
    Q,
    K_in,
    V,
    Out,
    L,
    qs,
    ks,
    vs,
    outs,
    H,
    K,
    T,
    S,
    D: tl.constexpr,
    causal: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    i, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group = H // K
    rows = i * M + tl.arange(0, M)
    columns = tl.arange(0, D)
    q = tl.load(Q + b * qs[0] + h * qs[1] + rows[:, None] * qs[2] + columns[None, :] * qs[3], rows[:, None] < T, 0.0)
    q = q.to(tl.float32) / tl.sqrt(tl.full((), D, tl.float32))
    sees = tl.where(rows < T, S - T + rows, -1) if causal else tl.where(rows < T, S - 1, -1)  # the last key of each row
    m = tl.full((M,), float("-inf"), tl.float32)
    n = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    last = tl.max(sees, 0)
    start = tl.where(last >= 0, last // N * N, -1)
    while start >= 0:
        key = start + tl.arange(0, N)
        at = b * ks[0] + (h // group) * ks[1] + key[None, :] * ks[2] + columns[:, None] * ks[3]
        k = tl.load(K_in + at, mask=key[None, :] < S, other=0.0).to(tl.float32)
        x = tl.dot(q, k, input_precision="ieee")
        visible = key[None, :] <= sees[:, None]
        m_new = tl.maximum(m, tl.max(tl.where(visible, x, float("-inf")), axis=1))
        e = tl.where(visible, tl.exp(x - m_new[:, None]), 0.0)
        keep = tl.where(m == float("-inf"), 0.0, tl.exp(m - m_new))
        n = n * keep + tl.sum(e, axis=1)
        at = b * vs[0] + (h // group) * vs[1] + key[:, None] * vs[2] + columns[None, :] * vs[3]
        v = tl.load(V + at, mask=key[:, None] < S, other=0.0).to(tl.float32)
        acc = tl.dot(e, v, acc=acc * keep[:, None], input_precision="ieee")
        m = m_new
        start -= N
    acc = tl.where(n[:, None] > 0, acc / n[:, None], 0.0)
    at = b * outs[0] + h * outs[1] + rows[:, None] * outs[2] + columns[None, :] * outs[3]
    tl.store(Out + at, acc, mask=rows[:, None] < T)
    tl.store(L + (b * H + h) * T + rows, m + tl.log(n), mask=rows < T)


@correct("flash_attention_triton")
def from_the_last_tile(q, k, v, causal=False):
    """A while loop from the last tile to the first, all in float32, with exp and the natural logarithm."""
    return launch(backwards_kernel, q, k, v, causal)


@triton.jit(do_not_specialize=["H", "K", "T", "S"])
def two_pass_kernel(
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
    offset = S - T
    start_t, h, b = tl.program_id(0) * BLOCK_Q, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t, d = start_t + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    g = h * K // H
    q = tl.load(
        q_ptr + b * q_strides[0] + h * q_strides[1] + t[:, None] * q_strides[2] + d[None, :] * q_strides[3],
        mask=t[:, None] < T,
        other=0.0,
    )
    k_tile = k_ptr + b * k_strides[0] + g * k_strides[1] + d[:, None] * k_strides[3]
    v_tile = v_ptr + b * v_strides[0] + g * v_strides[1] + d[None, :] * v_strides[3]
    n_keys = S
    if causal:
        n_keys = tl.minimum(S, offset + start_t + BLOCK_Q)
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    n = tl.zeros((BLOCK_Q,), tl.float32)
    for j in range(0, tl.maximum(tl.cdiv(n_keys, BLOCK_K), 0)):
        s = j * BLOCK_K + tl.arange(0, BLOCK_K)
        k = tl.load(k_tile + s[None, :] * k_strides[2], mask=s[None, :] < S, other=0.0)
        x = tl.dot(q, k, input_precision="ieee") * (D**-0.5)
        x = tl.where(s[None, :] < S, x, float("-inf"))
        if causal:
            x = tl.where(s[None, :] - t[:, None] <= offset, x, float("-inf"))
        new = tl.maximum(top, tl.max(x, 1))
        safe = tl.where(new > float("-inf"), new, 0.0)
        n = n * tl.exp(top - safe) + tl.sum(tl.exp(x - safe[:, None]), 1)
        top = new
    lse = tl.where(n > 0, top + tl.log(n), float("-inf"))
    known = tl.where(n > 0, lse, 0.0)
    out = tl.zeros((BLOCK_Q, D), tl.float32)
    for j in range(0, tl.maximum(tl.cdiv(n_keys, BLOCK_K), 0)):
        s = j * BLOCK_K + tl.arange(0, BLOCK_K)
        k = tl.load(k_tile + s[None, :] * k_strides[2], mask=s[None, :] < S, other=0.0)
        v = tl.load(v_tile + s[:, None] * v_strides[2], mask=s[:, None] < S, other=0.0)
        x = tl.dot(q, k, input_precision="ieee") * (D**-0.5)
        x = tl.where(s[None, :] < S, x, float("-inf"))
        if causal:
            x = tl.where(s[None, :] - t[:, None] <= offset, x, float("-inf"))
        out += tl.dot(tl.exp(x - known[:, None]).to(v.dtype), v, input_precision="ieee")
    o_tile = (
        out_ptr + b * out_strides[0] + h * out_strides[1] + t[:, None] * out_strides[2] + d[None, :] * out_strides[3]
    )
    tl.store(o_tile, out.to(out_ptr.dtype.element_ty), mask=(t < T)[:, None] & (d < D)[None, :])
    tl.store(lse_ptr + b * H * T + h * T + t, lse, mask=t < T)


@correct("flash_attention_triton")
def logsumexp_first(q, k, v, causal=False):
    """Two passes over the keys: the first finds logsumexp, the second mixes values with weights exp(x - logsumexp)."""
    return launch(two_pass_kernel, q, k, v, causal)


@triton.jit()
def _shape_up(x, seen):
    """Natural scores to scores in base 2, -inf where a query may not look."""
    return tl.where(seen, x * 1.4426950408889634, float("-inf"))


@triton.jit(do_not_specialize=["H", "K", "T", "S"])
def transposed_kernel(
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
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv = h // (H // K)
    t, s, d = tile * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, D)
    real = (t < T)[None, :]
    q_at = q_ptr + b * q_strides[0] + h * q_strides[1] + t[None, :] * q_strides[2] + d[:, None] * q_strides[3]
    q = tl.load(q_at, mask=real, other=0.0)  # (D, BLOCK_Q)
    k_at = k_ptr + b * k_strides[0] + kv * k_strides[1] + s[:, None] * k_strides[2] + d[None, :] * k_strides[3]
    v_at = v_ptr + b * v_strides[0] + kv * v_strides[1] + s[None, :] * v_strides[2] + d[:, None] * v_strides[3]
    maximum = tl.full((BLOCK_Q,), -3e38, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((D, BLOCK_Q), tl.float32)
    for start in range(0, S, BLOCK_K):
        needed = start < S
        if causal:
            needed = start < S - T + tile * BLOCK_Q + BLOCK_Q
        if needed:
            left = S - start
            k = tl.load(k_at, mask=s[:, None] < left, other=0.0)
            v = tl.load(v_at, mask=s[None, :] < left, other=0.0)
            seen = s[:, None] < left
            if causal:
                seen = seen & (start + s[:, None] + T <= S + t[None, :])
            scores = _shape_up(tl.dot(k, q, input_precision="ieee") / tl.sqrt(D * 1.0), seen)  # (BLOCK_K, BLOCK_Q)
            higher = tl.maximum(maximum, tl.max(scores, 0))
            p = tl.exp2(scores - higher[None, :])
            shrink = tl.exp2(maximum - higher)
            total = total * shrink + tl.sum(p, 0)
            mixed = mixed * shrink[None, :] + tl.dot(v, p.to(v.dtype), input_precision="ieee")
            maximum = higher
        k_at += BLOCK_K * k_strides[2]
        v_at += BLOCK_K * v_strides[2]
    blind = total == 0.0
    mixed = tl.where(blind[None, :], 0.0, mixed / tl.where(blind, 1.0, total)[None, :])
    out_at = (
        out_ptr + b * out_strides[0] + h * out_strides[1] + t[:, None] * out_strides[2] + d[None, :] * out_strides[3]
    )
    tl.store(out_at, tl.trans(mixed).to(out_ptr.dtype.element_ty), mask=t[:, None] < T)
    lse = tl.where(blind, -float("inf"), (maximum + tl.log2(tl.where(blind, 1.0, total))) / 1.4426950408889634)
    tl.store(lse_ptr + (b * H + h) * T + t, lse, mask=t < T)


@correct("flash_attention_triton")
def with_queries_transposed(q, k, v, causal=False):
    """Scores as (keys, queries), pointers that move from tile to tile, a branch around future tiles, a helper."""
    return launch(transposed_kernel, q, k, v, causal)
