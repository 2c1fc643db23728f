"""Gradients of the scan in Triton: states and their gradients are carried over chunks, then every chunk stands alone.

Notation as in chunk.py, with h and g [P, N] the state before a chunk and the gradient of the one behind it, d the
gradient of y, z the last row, w_s = exp(L_z - L_s) dt_s, F_ts = (C_t . B_s) exp(L_t - L_s) and Q_ts = d_t . x_s:

    u_s = g B_s, v_t = h C_t
    x_s:  w_s u_s + sum over t of (F_ts dt_s) d_t, + D d_s
    C_t:  sum over heads of (exp(L_t) d_t) h, + sum over s of T_ts B_s; T is the heads' sum of exp(L_t - L_s) dt_s Q_ts
    B_s:  sum over heads of (w_s x_s) g, + sum over t of T_ts C_t
    D:    Q_tt of every token

A dt_r is in exp(L_t - L_s) for s < r <= t. Its gradient l_r is added up from the terms that contain it, and not as a
difference of sums over L, which would lose what the gradients of A and dt are made of:

    l_r   = exp(L_z) h . g + sum over s < r of w_s (x_s . u_s)
            + sum over t >= r of (sum over s < r of F_ts dt_s Q_ts, + exp(L_t) d_t . v_t)
    A:    dt_r l_r of every token;  dt_r: A l_r + (exp(L_z - L_r) x_r . u_r + sum over t of F_tr Q_tr)

The forward pass saves nothing: h and g of all chunks are computed first. They take 8 P N bytes per head and chunk, so
groups of heads are taken in turn. Every sum is a product, some with ones, added from its first term to its last; no
order depends on the layout of a tile, nor on other heads.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles
from megatron_rlzero.kernels.mamba.triton import between, decay, last_of, logs, side_by_side, sizes, time_steps
from megatron_rlzero.kernels.segments import bounds_of, segment_of, tile_bounds

#: numbers of fp32 of the states and their gradients that exist at one time, unless one group has more
HELD = 2**27
#: rows of ones: the smallest side of a product
ONES = tl.constexpr(16)


@triton.jit
def _added(x, total):
    """[columns]: total + the sum over the rows of x [rows, columns]."""
    sums = gpu.dot(
        tl.full((ONES, x.shape[0]), 1.0, tl.float32), x, tl.full((ONES, x.shape[1]), 0.0, tl.float32) + total
    )
    return tl.sum(tl.where(tl.arange(0, ONES)[:, None] == 0, sums, 0.0), axis=0)  # a number and zeros: exact


@triton.jit
def _steps(dt, A, bias, row, real, head, dt_row, least, most):
    """Time steps, 0 where there is no token, and their logs."""
    raw = tl.load(dt + row * dt_row + head, mask=real, other=0.0)
    steps = tl.where(real, time_steps(raw, tl.load(bias + head), least, most), 0.0)
    return steps, logs(tl.load(A + head), steps)


@triton.jit
def _carry(
    x, dt, A, B, bias, bounds, chunks, states, outer, least, most, x_row, x_head, dt_row, B_row, B_group, document_size,
    BACK: tl.constexpr, OUTER: tl.constexpr,
    H, J, P, N, Q: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of the state before each chunk of a document, from ``outer`` on, or from zeros.

    BACK, with dy for x and C for B: of the gradient of the state behind each chunk, and in ``outer`` of the first one.
    """
    document, task = tl.program_id(1), tl.program_id(0)
    columns = (N + K - 1) // K
    head, p, n = task % H, task // (H * columns) * M + tl.arange(0, M), task // H % columns * K + tl.arange(0, K)
    t = tl.arange(0, Q)
    begin, end = tl.load(bounds + document), tl.load(bounds + document + 1)
    count = (end - begin + Q - 1) // Q
    inside, at = (p < P)[:, None] & (n < N)[None, :], (head * P + p)[:, None] * N + n[None, :]
    state = tl.zeros((M, K), dtype=tl.float32)
    outer += document.to(tl.int64) * document_size
    if OUTER and not BACK:
        state = tl.load(outer + at, mask=inside, other=0.0)
    for i in range(0, count):
        chunk = count - 1 - i if BACK else i
        to = states + (tl.load(chunks + document) + chunk).to(tl.int64) * (H * P * N)
        tl.store(to + at, state, mask=inside)
        row = (begin + chunk * Q).to(tl.int64) + t
        real = row < end
        steps, log = _steps(dt, A, bias, row, real, head, dt_row, least, most)
        last = last_of(log, Q)
        factor = decay(log) if BACK else decay(last - log) * steps
        rows = x + row[:, None] * x_row + head * x_head + p[None, :]
        rows = tl.load(rows, mask=real[:, None] & (p < P)[None, :], other=0.0).to(tl.float32)
        b = B + row[:, None] * B_row + head // J * B_group + n[None, :]
        b = tl.load(b, mask=real[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        state = gpu.dot(tl.trans(factor[:, None] * rows), b, state * decay(last))
    if OUTER and BACK:
        tl.store(outer + at, state, mask=inside)


@triton.jit(do_not_specialize=["documents"])
def _tokens(
    x, dt, A, B, C, D, bias, dy, bounds, chunks, before, behind, passed_to, to_x, to_steps, to_A, to_D,
    documents, least, most,
    x_row, x_head, dt_row, B_row, B_group, C_row, C_group, dy_row, dy_head, to_row, token,
    H, J, P, N, Q: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Of one head of a chunk: the gradients of x, and of each token's time step, A and D."""
    head, chunk = tl.program_id(0) % H, tl.program_id(0) // H
    document = segment_of(chunks, documents, chunk)
    begin, end = tl.load(bounds + document), tl.load(bounds + document + 1)
    t, k, group = tl.arange(0, Q), tl.arange(0, K), head // J
    row = (begin + (chunk - tl.load(chunks + document)) * Q).to(tl.int64) + t
    real = row < end
    steps, log = _steps(dt, A, bias, row, real, head, dt_row, least, most)
    last = last_of(log, Q)
    to_end, weights, from_start = decay(last - log), decay(last - log) * steps, decay(log)
    B += row[:, None] * B_row + group * B_group
    C += row[:, None] * C_row + group * C_group
    before += (chunk.to(tl.int64) * H + head) * P * N
    behind += (chunk.to(tl.int64) * H + head) * P * N
    scores = tl.zeros((Q, Q), dtype=tl.float32)
    for first in range(0, N, K):
        n = (first + k)[None, :]
        b = tl.load(B + n, mask=real[:, None] & (n < N), other=0.0)
        c = tl.load(C + n, mask=real[:, None] & (n < N), other=0.0)
        scores = gpu.dot(c, tl.trans(b), scores)
    factors = scores * between(log, Q)
    mixed = tl.trans(factors * steps[None, :])
    passed = tl.zeros((Q, Q), dtype=tl.float32)
    found, read = tl.zeros((Q, M), dtype=tl.float32), tl.zeros((Q, M), dtype=tl.float32)
    through = tl.zeros((M, K), dtype=tl.float32)
    skip = tl.load(D + head)
    for start in range(0, P, M):
        p = start + tl.arange(0, M)
        inside = real[:, None] & (p < P)[None, :]
        rows = tl.load(x + row[:, None] * x_row + head * x_head + p[None, :], mask=inside, other=0.0)
        grad = tl.load(dy + row[:, None] * dy_row + head * dy_head + p[None, :], mask=inside, other=0.0)
        passed = gpu.dot(grad, tl.trans(rows), passed)
        rows, grad = rows.to(tl.float32), grad.to(tl.float32)
        u, v = tl.zeros((Q, M), dtype=tl.float32), tl.zeros((Q, M), dtype=tl.float32)
        for first in range(0, N, K):
            n = (first + k)[None, :]
            b = tl.load(B + n, mask=real[:, None] & (n < N), other=0.0).to(tl.float32)
            c = tl.load(C + n, mask=real[:, None] & (n < N), other=0.0).to(tl.float32)
            at, there = p[:, None] * N + n, (p < P)[:, None] & (n < N)
            h, g = tl.load(before + at, mask=there, other=0.0), tl.load(behind + at, mask=there, other=0.0)
            u = gpu.dot(b, tl.trans(g), u)
            v = gpu.dot(c, tl.trans(h), v)
            through += h * g
        found += rows * u
        read += from_start[:, None] * grad * v
        to = gpu.dot(mixed, grad, weights[:, None] * u) + skip * grad
        at = to_x + row[:, None] * to_row + head * P + p[None, :]
        tl.store(at, gpu.rounded(to, to_x.dtype.element_ty), mask=inside)
    passed_to += ((chunk.to(tl.int64) * H + head) * Q + t)[:, None] * Q + t[None, :]
    tl.store(passed_to, passed)
    # over channels, and over the whole state
    found, read, through = _added(tl.trans(found), 0.0), _added(tl.trans(read), 0.0), _added(through, 0.0)
    through = _added(tl.broadcast_to(through[:, None], (K, ONES)), 0.0)
    through = decay(last) * tl.sum(tl.where(tl.arange(0, ONES) == 0, through, 0.0), axis=0)
    direct = _added(factors * passed, 0.0)
    # over s < r, for every t and r; then over t, where rows before r take part in what moves the state
    earlier = tl.where(t[:, None] < t[None, :], 1.0, 0.0)
    lost = gpu.dot(factors * steps[None, :] * passed, earlier, tl.zeros((Q, Q), dtype=tl.float32))
    lost = tl.where(t[:, None] < t[None, :], (weights * found)[:, None], lost + read[:, None])
    to_log = _added(lost, through)
    skipped = tl.sum(tl.where(t[:, None] == t[None, :], passed, 0.0), axis=0)  # exact
    at = row * token + head
    tl.store(to_steps + at, tl.load(A + head) * to_log + (to_end * found + direct), mask=real)
    tl.store(to_A + at, steps * to_log, mask=real)
    tl.store(to_D + at, skipped, mask=real)


@triton.jit(do_not_specialize=["documents"])
def _groups(
    x, dt, A, B, C, bias, dy, bounds, chunks, before, behind, passed, to_B, to_C, documents, least, most,
    x_row, x_head, dt_row, B_row, B_group, C_row, C_group, dy_row, dy_head, to_row,
    H, J, P, N, Q: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Of one group of a chunk, for K columns: the gradients of B and C, heads added in order."""
    G = H // J
    group, chunk = tl.program_id(0) % G, tl.program_id(0) // G
    document = segment_of(chunks, documents, chunk)
    begin, end = tl.load(bounds + document), tl.load(bounds + document + 1)
    t, n = tl.arange(0, Q), tl.program_id(1) * K + tl.arange(0, K)
    row = (begin + (chunk - tl.load(chunks + document)) * Q).to(tl.int64) + t
    real = row < end
    from_B, from_C = tl.zeros((Q, K), dtype=tl.float32), tl.zeros((Q, K), dtype=tl.float32)
    scores = tl.zeros((Q, Q), dtype=tl.float32)
    for head in range(group * J, group * J + J):
        steps, log = _steps(dt, A, bias, row, real, head, dt_row, least, most)
        weights, from_start = decay(last_of(log, Q) - log) * steps, decay(log)
        source = passed + ((chunk.to(tl.int64) * H + head) * Q + t)[:, None] * Q + t[None, :]
        scores += between(log, Q) * steps[None, :] * tl.load(source)
        state = (chunk.to(tl.int64) * H + head) * P * N
        for start in range(0, P, M):
            p = start + tl.arange(0, M)
            inside = real[:, None] & (p < P)[None, :]
            rows = tl.load(x + row[:, None] * x_row + head * x_head + p[None, :], mask=inside, other=0.0)
            grad = tl.load(dy + row[:, None] * dy_row + head * dy_head + p[None, :], mask=inside, other=0.0)
            at, there = state + p[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]
            h, g = tl.load(before + at, mask=there, other=0.0), tl.load(behind + at, mask=there, other=0.0)
            from_C = gpu.dot(from_start[:, None] * grad.to(tl.float32), h, from_C)
            from_B = gpu.dot(weights[:, None] * rows.to(tl.float32), g, from_B)
    inside = real[:, None] & (n < N)[None, :]
    b = tl.load(B + row[:, None] * B_row + group * B_group + n[None, :], mask=inside, other=0.0).to(tl.float32)
    c = tl.load(C + row[:, None] * C_row + group * C_group + n[None, :], mask=inside, other=0.0).to(tl.float32)
    from_C = gpu.dot(scores, b, from_C)
    from_B = gpu.dot(tl.trans(scores), c, from_B)
    to = row[:, None] * to_row + group * N + n[None, :]
    tl.store(to_B + to, gpu.rounded(from_B, to_B.dtype.element_ty), mask=inside)
    tl.store(to_C + to, gpu.rounded(from_C, to_C.dtype.element_ty), mask=inside)


def gradients(
    inputs: Sequence[Tensor],
    lengths: list[int],
    limit: tuple[float, float],
    initial: Tensor | None,
    saved: Sequence[Tensor],
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """See ``gradients.gradients``; nothing is saved."""
    x, dt, A, B, C, D, bias = (side_by_side(t) for t in inputs)
    (H, P), (G, N), J, dy = x.shape[1:], B.shape[1:], x.shape[1] // B.shape[1], side_by_side(grad)
    to_x, to_B, to_C = (torch.empty(t.shape, dtype=t.dtype, device=x.device) for t in (x, B, C))
    to_tokens = torch.empty(3, *x.shape[:2], dtype=torch.float32, device=x.device)
    initial = None if initial is None else initial.contiguous()
    to_initial = None if initial is None else torch.empty_like(initial)
    bounds = bounds_of(lengths, x.device)
    chunks, count = tile_bounds(bounds, tiles.CHUNK), sum(-(-length // tiles.CHUNK) for length in lengths)
    together = min(max(HELD // (2 * count * J * P * N), 1), G)
    before, behind = torch.empty(2, count * together * J * P * N, dtype=torch.float32, device=x.device)
    passed = torch.empty(count * together * J * tiles.CHUNK**2, dtype=torch.float32, device=x.device)
    for first in range(0, G, together):
        groups = slice(first, min(first + together, G))
        heads = slice(groups.start * J, groups.stop * J)
        x_, dt_, dy_, to_x_ = (t[:, heads] for t in (x, dt, dy, to_x))
        B_, C_, to_B_, to_C_ = (t[:, groups] for t in (B, C, to_B, to_C))
        A_, D_, bias_ = (t[heads] for t in (A, D, bias))
        outer, to_outer = (None if t is None else t[:, heads] for t in (initial, to_initial))
        constants = sizes(x_, B_)
        m, n = triton.cdiv(P, constants["M"]), triton.cdiv(N, constants["K"])
        for back, rows, b, out, ends in ((False, x_, B_, before, outer), (True, dy_, C_, behind, to_outer)):
            _carry[x_.shape[1] * m * n, len(lengths)](
                rows, dt_, A_, b, bias_, bounds, chunks, out, out if ends is None else ends, *limit,
                *rows.stride()[:2], dt_.stride(0), *b.stride()[:2], H * P * N,
                BACK=back, OUTER=ends is not None, **constants,
            )  # fmt: skip
        rows = (x_.stride()[:2], dt_.stride()[:1], B_.stride()[:2], C_.stride()[:2], dy_.stride()[:2])
        strides = [stride for pair in rows for stride in pair]
        _tokens[x_.shape[1] * count,](
            x_, dt_, A_, B_, C_, D_, bias_, dy_, bounds, chunks, before, behind, passed, to_x_,
            *to_tokens[..., heads], len(lengths), *limit, *strides, to_x_.stride(0), H, **constants,
        )  # fmt: skip
        _groups[B_.shape[1] * count, n](
            x_, dt_, A_, B_, C_, bias_, dy_, bounds, chunks, before, behind, passed, to_B_, to_C_, len(lengths), *limit,
            *strides, to_B_.stride(0), **constants,
        )  # fmt: skip
    return to_x, to_tokens.movedim(0, 2), to_B, to_C, to_initial
