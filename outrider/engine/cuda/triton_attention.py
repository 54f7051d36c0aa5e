"""Triton kernels of the CUDA engine, see `attention`. Import this module only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.paged.block_manager import BLOCK_TOKENS

_LOWEST, _LOW = tl.constexpr(-1e30), tl.constexpr(-1e29)
_PAGE = tl.constexpr(BLOCK_TOKENS)


@triton.jit  # type: ignore[untyped-decorator]
def place(  # type: ignore[no-untyped-def]
    qkv, queries, cache, slots, positions, cosines, sines, qkv_stride, cache_stride,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, rotated: tl.constexpr, finite: tl.constexpr,
    some: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys of a token, and write keys and values into the cache."""
    token = tl.program_id(0)
    head = tl.program_id(1) * some + tl.arange(0, some)[:, None]
    at = tl.arange(0, width)[None, :]
    inside = (head < heads + 2 * kv_heads) & (at < dim)
    row = qkv + token.to(tl.int64) * qkv_stride + head * dim
    x = tl.load(row + at, mask=inside, other=0.0)
    if rotated > 0:
        partner = tl.where(at < rotated // 2, at + rotated // 2, tl.where(at < rotated, at - rotated // 2, at))
        position = tl.load(positions + token) * dim + at
        turned = inside & (head < heads + kv_heads)
        cosine = tl.load(cosines + position, mask=at < dim, other=0.0).to(tl.float32)
        sine = tl.load(sines + position, mask=at < dim, other=0.0).to(tl.float32)
        across = tl.load(row + partner, mask=turned, other=0.0).to(tl.float32)
        x = tl.where(turned, x.to(tl.float32) * cosine + across * sine, x.to(tl.float32)).to(x.dtype)
    tl.store(queries + token.to(tl.int64) * heads * dim + head * dim + at, x, mask=inside & (head < heads))
    if finite:  # float16 overflows, and a later session reads the slot with weight 0
        x = tl.where(x == x, tl.minimum(tl.maximum(x.to(tl.float32), -65504.0), 65504.0), 0.0).to(x.dtype)
    slot = (head - heads).to(tl.int64) * cache_stride + tl.load(slots + token) * dim
    tl.store(cache + slot + at, x, mask=inside & (head >= heads))


@triton.jit  # type: ignore[untyped-decorator]
def _visible(  # type: ignore[no-untyped-def]
    index, base, own, chained, linked, tree, inside, used, positions, nearest, windowed: tl.constexpr
):
    """Return which keys the new tokens of a session attend to."""
    new = (index - base)[None, :]
    branch = inside[None, :] & used[:, None] & (new >= 0) & (new < linked)
    link = tl.load(tree + own * linked + new, mask=branch, other=0) != 0
    visible = inside[None, :] & ((new < 0) | link | (new <= chained))
    if windowed:
        known = tl.load(positions - base + index, mask=inside & (index >= base), other=0)
        visible &= tl.where(index < base, index, known)[None, :] > nearest[:, None]
    return visible


@triton.jit  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    queries, cache, flags, items, num_items, lanes, table, tree, positions, parts, stats, out, reached,
    cache_stride, scale, cap, window,
    kv_heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, tile: tl.constexpr, capped: tl.constexpr, windowed: tl.constexpr, flagged: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Attend from a few tokens of a session to a range of its context, item after item.

    A range and its tiles depend on positions alone, so a token's sum does not depend on others. If `whole`, the range
    is all of the context and the result goes to `out`; otherwise to `parts`, with its maximum and sum.
    """
    kv_head = tl.program_id(1)
    m, d = tl.arange(0, block), tl.arange(0, width)
    row = m // group
    head = kv_head * group + m % group
    keys = cache + kv_head.to(tl.int64) * cache_stride
    values = cache + (kv_heads + kv_head).to(tl.int64) * cache_stride
    for item in range(tl.program_id(0), tl.load(num_items), tl.num_programs(0)):
        lane = lanes + tl.load(items + item * 4) * 8
        low, high = tl.load(items + item * 4 + 1).to(tl.int32), tl.load(items + item * 4 + 2).to(tl.int32)
        token, first = tl.load(lane).to(tl.int32), tl.load(lane + 1).to(tl.int32)
        live, base = tl.load(lane + 2).to(tl.int32), tl.load(lane + 3).to(tl.int32)
        count, pages, masks = tl.load(lane + 4).to(tl.int32), tl.load(lane + 5), tl.load(lane + 6)
        own = (first + row)[:, None]
        linked = tl.where(masks >= 0, count, 0)  # tokens of a tree
        chained = own - linked * count  # below 0 in a tree
        all_visible = tl.where(masks >= 0, base, base + first + 1)  # keys before, to all lanes
        if windowed or flagged:
            all_visible = 0
        used = (m < rows * group) & (row < live)
        at = ((token + row).to(tl.int64) * kv_heads * group + head)[:, None] * dim + d[None, :]
        seen = used[:, None] & (d < dim)[None, :]
        query = tl.load(queries + at, mask=seen, other=0.0)
        nearest = tl.load(positions + token + row, mask=used, other=0) - window
        if windowed:
            low = tl.maximum(low, tl.maximum(base - window + 1, 0) // tile * tile)
        top = tl.full((block,), _LOWEST, tl.float32)
        total = tl.zeros((block,), tl.float32)
        sums = tl.zeros((block, width), tl.float32)
        hit = tl.zeros((block,), tl.int32)
        for start in range(low, high, tile):
            index = start + tl.arange(0, tile)
            inside = index < high
            page = tl.load(table + pages + index // _PAGE, mask=inside, other=0)
            slot = page.to(tl.int64) * _PAGE + index % _PAGE
            places = slot[:, None] * dim + d[None, :]
            stored = inside[:, None] & (d < dim)[None, :]
            key = tl.load(keys + places, mask=stored, other=0.0)
            value = tl.load(values + places, mask=stored, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if capped:
                scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
            scores *= 1.4426950408889634  # for powers of two
            if start + tile > all_visible:
                visible = _visible(
                    index, base, own, chained, linked, tree + masks, inside, used,
                    positions + token - first, nearest, windowed,
                )  # fmt: skip
                scores = tl.where(visible, scores, _LOWEST)
                if flagged:
                    flag = tl.load(flags + slot, mask=inside, other=0).to(tl.int32)
                    hit = tl.maximum(hit, tl.max(tl.where(visible, flag[None, :], 0), 1))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - tl.maximum(higher, _LOW)[:, None])  # 0 where nothing is visible
            keep = tl.exp2(top - higher)
            total = total * keep + tl.sum(weights, 1)
            sums = sums * keep[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            top = higher
        if whole:
            tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=seen)
            if flagged:
                tl.store(reached + token + row, hit, mask=used & (head == 0))
        else:
            place = (tl.load(items + item * 4 + 3) + row) * kv_heads * group + head
            tl.store(parts + place.to(tl.int64)[:, None] * dim + d[None, :], sums, mask=seen)
            tl.store(stats + place * 3, top, mask=used)
            tl.store(stats + place * 3 + 1, total, mask=used)
            tl.store(stats + place * 3 + 2, hit.to(tl.float32), mask=used)


@triton.jit  # type: ignore[untyped-decorator]
def combine(  # type: ignore[no-untyped-def]
    parts, stats, joins, out, reached,
    heads: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, chunk: tl.constexpr, flagged: tl.constexpr,
):  # fmt: skip
    """Join the parts of one token's sum, of one head."""
    token, head = tl.program_id(0), tl.program_id(1)
    begin, step, num = tl.load(joins + token * 3), tl.load(joins + token * 3 + 1), tl.load(joins + token * 3 + 2)
    d = tl.arange(0, width)
    top = tl.full((1,), _LOWEST, tl.float32)
    total, hit = tl.zeros((1,), tl.float32), tl.zeros((1,), tl.float32)
    sums = tl.zeros((width,), tl.float32)
    for start in range(0, num, chunk):
        index = start + tl.arange(0, chunk)
        inside = index < num
        place = (begin + index * step) * heads + head
        tops = tl.load(stats + place * 3, mask=inside, other=_LOWEST)
        higher = tl.maximum(top, tl.max(tops, 0, keep_dims=True))
        weights = tl.where(inside, tl.exp2(tops - higher), 0.0)
        keep = tl.exp2(top - higher)
        totals = tl.load(stats + place * 3 + 1, mask=inside, other=0.0)
        total = total * keep + tl.sum(weights * totals, 0, keep_dims=True)
        seen = inside[:, None] & (d < dim)[None, :]
        part = tl.load(parts + place.to(tl.int64)[:, None] * dim + d[None, :], mask=seen, other=0.0)
        sums = sums * keep + tl.sum(weights[:, None] * part, 0)
        if flagged:
            hits = tl.load(stats + place * 3 + 2, mask=inside, other=0.0)
            hit = tl.maximum(hit, tl.max(hits, 0, keep_dims=True))
        top = higher
    if num > 0:
        at = (token.to(tl.int64) * heads + head) * dim + d
        tl.store(out + at, (sums / total).to(out.dtype.element_ty), mask=d < dim)
        if flagged:
            tl.store(reached + token + tl.arange(0, 1), hit.to(tl.int32), mask=tl.arange(0, 1) + head == 0)
