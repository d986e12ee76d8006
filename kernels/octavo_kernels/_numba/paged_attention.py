"""Paged attention in Python that numba compiles. Importing this module imports numba.

Keys are reduced in tiles of fixed absolute positions, one after the other, and a row's arithmetic
does not depend on the rows that share its tile: its bits depend on its own past alone. Sums inside
a row may be reordered by the compiler, once, at compile time. Knows nothing of torch.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

# Threads run at once; a division by zero is infinity, and costs no check.
_OPTIONS = {"nogil": True, "error_model": "numpy"}
_TILE = 64  # positions
_MOST_ROWS = 32  # rows that share one conversion of a tile to float32
_SUMS = {"reassoc", "contract"}  # what the compiler may do to a sum of products; NaN stays NaN

_BFLOAT16, _FLOAT16, _FLOAT32 = range(3)  # kinds of elements in the bits of a cache


@numba.njit(**_OPTIONS)
def _widen_half(bits, values):
    """Complete float16 whose 15 lower bits, `bits` & 0x7fff, stand in float32's place."""
    words = values.view(np.uint32)
    for i in range(len(bits)):
        values[i] *= np.float32(2.0**112)  # the difference of the exponents' biases
        half = np.uint32(bits[i])
        special = np.uint32(0x7F800000) if half & np.uint32(0x7C00) == 0x7C00 else np.uint32(0)
        words[i] |= special | (half & np.uint32(0x8000)) << np.uint32(16)


@numba.njit(**_OPTIONS)
def _widen(cache, kind, layer, part, table, head, first, end, target):
    """Convert the keys (part 0) or values (1) of positions [first, end) of a tile to float32."""
    block_size, words = cache.shape[3], target.view(np.uint32)
    for position in range(first, end):
        block, slot, row = table[position // block_size], position % block_size, position % _TILE
        if kind == _BFLOAT16:
            for d in range(target.shape[1]):
                bits = np.uint32(cache[block, layer, part, slot, head, d])
                words[row, d] = bits << np.uint32(16)
        elif kind == _FLOAT32:
            for d in range(target.shape[1]):
                words[row, d] = cache[block, layer, part, slot, head, d]
        else:
            for d in range(target.shape[1]):
                bits = np.uint32(cache[block, layer, part, slot, head, d])
                words[row, d] = (bits & np.uint32(0x7FFF)) << np.uint32(13)
            _widen_half(cache[block, layer, part, slot, head], target[row])


@numba.njit(fastmath=_SUMS, **_OPTIONS)
def _score(query, keys, begin, end, scale, scores):
    """Set scores[i] to scale * query . keys[i] for i of [begin, end)."""
    for i in range(begin, end):
        total = np.float32(0.0)
        for d in range(len(query)):
            total += query[d] * keys[i, d]
        scores[i] = total * scale


@numba.njit(fastmath=_SUMS, **_OPTIONS)
def _sum(values):
    total = np.float32(0.0)
    for i in range(len(values)):
        total += values[i]
    return total


@numba.njit(fastmath={"contract"}, **_OPTIONS)
def _accumulate(result, decay, weights, values, begin, end):
    """Set result to result * decay + the sum of weights[i] * values[i] for i of [begin, end)."""
    for d in range(len(result)):
        result[d] *= decay
    whole = begin + (end - begin) // 4 * 4
    for i in range(begin, whole, 4):  # four at a time: the result is read and written less
        a, b, c, e = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for d in range(len(result)):
            x = result[d] + a * values[i, d]
            x = x + b * values[i + 1, d]
            x = x + c * values[i + 2, d]
            result[d] = x + e * values[i + 3, d]
    for i in range(whole, end):
        for d in range(len(result)):
            result[d] += weights[i] * values[i, d]


@numba.njit(fastmath={"contract"}, **_OPTIONS)
def _exponentials(values, base, powers):
    """Replace values by e^(value - base); `powers` is room for as many uint32."""
    for i in range(len(values)):
        x = values[i] - base
        scaled = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
        # Comparisons with NaN are false: its power is one, and NaN times it is NaN.
        whole = scaled if scaled > np.float32(-127.0) else np.float32(-127.0)
        whole = whole if whole < np.float32(127.0) else np.float32(127.0)
        r = x - whole * np.float32(0.693359375) - whole * np.float32(-2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        p = p * (r * r) + r + np.float32(1.0)
        powers[i] = np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23)
        values[i] = np.float32(0.0) if x < np.float32(-87.0) else p
    factors = powers.view(np.float32)
    for i in range(len(values)):
        values[i] *= factors[i]


def _find_invalid(starts, lens, tables, window, num_tokens, num_blocks, block_size):
    """Return the first sequence whose numbers point outside the arrays, or -1."""
    for seq in range(len(lens)):
        begin, end, length = np.int64(starts[seq]), np.int64(starts[seq + 1]), np.int64(lens[seq])
        if begin < 0 or end < begin or end > num_tokens or length < end - begin:
            return seq
        if begin == end:
            continue
        blocks = (length + block_size - 1) // block_size
        if blocks > tables.shape[1]:
            return seq
        unseen = max(0, length - (end - begin) - window + 1) // block_size if window > 0 else 0
        for i in range(blocks):
            if not (-1 if i < unseen else 0) <= tables[seq, i] < num_blocks:
                return seq
    return -1


@numba.njit(**_OPTIONS)
def _attend_tile(query, keys, values, begin, end, state, result, softmax, scratch):
    """Add the positions [begin, end) of one tile to a row's running softmax.

    `state` [2] are the highest score and the sum of weights so far, and `result` [head_dim] the
    weighted sum; all three are changed.
    """
    scale, soft_cap = softmax
    scores, powers = scratch
    _score(query, keys, begin, end, scale, scores)
    if soft_cap > 0:
        for i in range(begin, end):
            scores[i] = soft_cap * np.float32(math.tanh(scores[i] / soft_cap))
    highest = state[0]
    for i in range(begin, end):
        highest = max(highest, scores[i])
    # A row that has seen nothing yet keeps a maximum of -inf: subtract 0 instead of it.
    base = np.float32(0.0) if highest == -np.inf else highest
    scores[end] = state[0]  # what becomes of earlier weights is one more of these powers
    _exponentials(scores[begin : end + 1], base, powers)
    state[0], state[1] = highest, state[1] * scores[end] + _sum(scores[begin:end])
    _accumulate(result, scores[end], scores, values, begin, end)


@numba.njit(**_OPTIONS)
def _attend_rows(q, out, cache, kind, layer, table, head, rows, computed, window, softmax, sinks):
    """Attend from some rows of one sequence and KV head; `rows` are first, past the last, group.

    q and out are [tokens, q_heads, head_dim] float32 of the sequence alone, `computed` its tokens
    before them. The query heads that share keys count as neighbouring rows.
    """
    begin_row, end_row, group = rows
    head_dim = cache.shape[5]
    keys, values = np.empty((_TILE, head_dim), np.float32), np.empty((_TILE, head_dim), np.float32)
    scratch = np.empty(_TILE + 1, np.float32), np.empty(_TILE + 1, np.uint32)
    state = np.zeros((end_row - begin_row, 2), np.float32)
    result = np.zeros((end_row - begin_row, head_dim), np.float32)
    for r in range(begin_row, end_row):
        # A sink is where a row's running softmax begins: a maximum, and e^0 in the sum.
        sink = sinks[head * group + r % group] if len(sinks) > 0 else np.float32(-np.inf)
        state[r - begin_row, 0] = sink
        state[r - begin_row, 1] = 1.0 if sink > -np.inf else 0.0
    first, last = computed + begin_row // group, computed + (end_row - 1) // group
    first = max(0, first - window + 1) if window > 0 else 0
    for start in range(first // _TILE * _TILE, last + 1, _TILE):
        positions = max(first, start), min(last + 1, start + _TILE)
        _widen(cache, kind, layer, 0, table, head, *positions, keys)
        _widen(cache, kind, layer, 1, table, head, *positions, values)
        for r in range(begin_row, end_row):
            own = computed + r // group
            begin = max(own - window + 1 - start, 0) if window > 0 else 0
            end = min(own + 1 - start, _TILE)
            if begin < end:
                _attend_tile(
                    q[r // group, head * group + r % group],
                    keys,
                    values,
                    begin,
                    end,
                    state[r - begin_row],
                    result[r - begin_row],
                    softmax,
                    scratch,
                )
    for r in range(begin_row, end_row):
        for d in range(head_dim):
            out[r // group, head * group + r % group, d] = (
                result[r - begin_row, d] / state[r - begin_row, 1]
            )


def _attend(
    kind,
    q,
    out,
    cache,
    layer,
    starts,
    lens,
    tables,
    scale,
    window,
    soft_cap,
    sinks,
    worker,
    workers,
):
    """Compute every `workers`th piece of the work, from `worker` on; see Kernel.attend."""
    kv_heads = cache.shape[4]
    group = q.shape[1] // kv_heads
    piece = 0
    for seq in range(len(lens)):
        begin, end = starts[seq], starts[seq + 1]
        computed = np.int64(lens[seq]) - (end - begin)
        for head in range(kv_heads):
            for row in range(0, (end - begin) * group, _MOST_ROWS):
                if piece % workers == worker:
                    _attend_rows(
                        *(q[begin:end], out[begin:end], cache, kind, layer, tables[seq], head),
                        *((row, min(row + _MOST_ROWS, (end - begin) * group), group), computed),
                        *(window, (scale, soft_cap), sinks),
                    )
                piece += 1


class Kernel(NamedTuple):
    """Compiled functions over numpy arrays.

    A cache is [blocks, layers, 2, block_size, kv_heads, head_dim] of bits, uint16 or uint32.
    """

    attend: Callable[..., None]
    """Takes q and out [tokens, q_heads, head_dim] float32, cache, layer, query_start_loc, seq_lens
    and block_tables int32, scale float32, window (0 for all), soft_cap float32 (0 for none), sinks
    [q_heads] or [0] float32, worker, workers: writes the part of `out` that is one worker's.
    """
    find_invalid: Callable[..., int]
    """Takes query_start_loc, seq_lens, block_tables, window, num_tokens, num_blocks, block_size:
    returns the first sequence that points outside the arrays, or -1.
    """


def compile_kernel(element: str, directory: Path) -> Kernel:
    """Return the kernel for a cache of "bfloat16", "float16" or "float32".

    It is compiled unless `directory`, which keeps what has been, holds it. Numba makes its files
    whole before it names them, and knows sources and processors apart.
    """
    kinds = {"bfloat16": _BFLOAT16, "float16": _FLOAT16, "float32": _FLOAT32}
    rows, numbers, table = "f4[:,:,::1]", "i4[::1]", "i4[:,::1]"
    cache = f"u{4 if element == 'float32' else 2}[:,:,:,:,:,::1]"
    attend = f"void(i8,{rows},{rows},{cache},i8,{numbers},{numbers},{table},f4,i8,f4,f4[::1],i8,i8)"
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(directory)
    try:
        compiled = numba.njit(attend, cache=True, **_OPTIONS)(_attend)
        find = numba.njit(f"i8({numbers},{numbers},{table},i8,i8,i8,i8)", cache=True, **_OPTIONS)
        return Kernel(functools.partial(compiled, kinds[element]), find(_find_invalid))
    finally:
        numba.config.CACHE_DIR = before
