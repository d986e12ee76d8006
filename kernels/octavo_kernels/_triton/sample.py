"""Drawing of tokens on a GPU; see octavo_kernels.sample for what is drawn.

A program draws the token of one row, and sorts nothing. It looks for a bound that the wanted logits
surely reach, lists what reaches it, and finds the filters' own bounds in that list by bisection
over the order of floats; where too many reach it, in the row itself.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from octavo_kernels._launch import Architecture
from octavo_kernels._logits import SamplingRows
from octavo_kernels._sampling_launch import SampleConfig, choose_sample
from octavo_kernels._triton.ahead_of_time import KernelCase
from octavo_kernels._triton.rows import find_best


@triton.jit
def _order(x):
    """Return integers in the order of floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _at_order(number):
    bits = number.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, best, scale, least_logit, least_exponent):
    exponent = (x - best) * scale
    return tl.where((x >= least_logit) & (exponent >= least_exponent), tl.exp(exponent), 0.0)


@triton.jit
def _load(tokens, start, count, SIZE: tl.constexpr):
    place = start + tl.arange(0, SIZE)
    return tl.load(tokens + place, mask=place < count, other=float("-inf"))


@triton.jit
def _bound_of_largest(tokens, count, k, best, SIZE: tl.constexpr):
    """Return the largest bound that at least k logits reach."""
    low, high = _order(tl.full([], float("-inf"), tl.float32)), _order(best)
    while low < high:
        middle = low + (high - low + 1) // 2
        reach = tl.zeros([SIZE], tl.int32)
        for start in range(0, count, SIZE):
            reach += (_load(tokens, start, count, SIZE) >= _at_order(middle)).to(tl.int32)
        enough = tl.sum(reach, 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return _at_order(low)


@triton.jit
def _mass_above(tokens, count, bound, best, scale, least, SIZE: tl.constexpr):
    """Return what the logits above a bound weigh, of those that reach `least`."""
    mass = tl.zeros([SIZE], tl.float32)
    for start in range(0, count, SIZE):
        x = _load(tokens, start, count, SIZE)
        weight = _weights(x, best, scale, least, float("-inf"))
        mass += tl.where(x > bound, weight, 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _bound_of_mass(tokens, count, goal, least, best, scale, SIZE: tl.constexpr):
    """Return the least bound, of those from `least` on, above which less than `goal` lies."""
    low, high = _order(least), _order(best)
    while low < high:
        middle = low + (high - low) // 2
        mass = _mass_above(tokens, count, _at_order(middle), best, scale, least, SIZE)
        low = tl.where(mass < goal, low, middle + 1)
        high = tl.where(mass < goal, middle, high)
    return _at_order(low)


@triton.jit
def _find_depth(row, vocab, best, scale, share, SIZE: tl.constexpr):
    """Return an exponent above which lies the share of a row's weight, and what that share is."""
    step = tl.arange(0, 8)
    depth = -0.25 * (step + 1) * (step + 2)  # from -0.5 down to -18
    mass = tl.zeros([SIZE, 8], tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    for start in range(0, vocab, SIZE):
        exponent = (_load(row, start, vocab, SIZE) - best) * scale
        weight = tl.exp(exponent)
        total += weight
        mass += tl.where(exponent[:, None] > depth[None, :], weight[:, None], 0.0)
    goal = share * tl.sum(total, 0)
    return tl.max(tl.where(tl.sum(mass, 0) >= goal, depth, float("-inf")), 0), goal


@triton.jit
def _list(
    row, vocab, bound, depth, best, scale, logits, ids, MAX: tl.constexpr, SIZE: tl.constexpr
):
    """List tokens in the order of their ids, MAX at most; return how many there are, and the least.

    Those are listed that reach the bound, and whose exponents reach the depth.
    """
    count = 0
    least = tl.full([SIZE], float("inf"), tl.float32)
    for start in range(0, vocab, SIZE):
        x = _load(row, start, vocab, SIZE)
        wanted = (x >= bound) & ((x - best) * scale >= depth) & (x > float("-inf"))
        place = count + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(logits + place, x, mask=wanted & (place < MAX))
        tl.store(ids + place, start + tl.arange(0, SIZE), mask=wanted & (place < MAX))
        count += tl.sum(wanted.to(tl.int32), 0)
        least = tl.minimum(least, tl.where(wanted, x, float("inf")))
    return count, tl.min(least, 0)


@triton.jit
def _mix(state):
    state += 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _uniform(seed, position):
    """Return 52 random bits as a float64 in [0, 1)."""
    state = _mix(seed.to(tl.uint64)) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    return (_mix(state) >> 12).to(tl.float64) * (1.0 / 4503599627370496.0)


@triton.jit
def _draw(tokens, count, uniform, best, scale, least_logit, least_exponent, SIZE: tl.constexpr):
    """Return the place of the token in which `uniform` of all weight is reached."""
    total = tl.zeros([], tl.float64)
    for start in range(0, count, SIZE):
        x = _load(tokens, start, count, SIZE)
        weight = _weights(x, best, scale, least_logit, least_exponent)
        total += tl.sum(weight, 0).to(tl.float64)
    target = uniform * total  # less than the total, even when rounded
    before, reached = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    end = 0
    while (reached <= target) & (end < count):
        before = reached
        x = _load(tokens, end, count, SIZE)
        weight = _weights(x, best, scale, least_logit, least_exponent)
        reached += tl.sum(weight, 0).to(tl.float64)
        end += SIZE
    begin = tl.maximum(end - SIZE, 0)
    x = _load(tokens, begin, count, SIZE)
    weight = _weights(x, best, scale, least_logit, least_exponent)
    place = tl.arange(0, SIZE)
    within = (tl.cumsum(weight, 0) > (target - before).to(tl.float32)) & (weight > 0)
    first = tl.min(tl.where(within, place, SIZE), 0)
    # Sums of another order may miss the target by a rounding.
    last = tl.max(tl.where(weight > 0, place, 0), 0)
    return begin + tl.minimum(first, last)


@triton.jit
def _filter(
    row, vocab, k, share, lanes, best, scale, listed, ids, MAX: tl.constexpr, SIZE: tl.constexpr
):
    """Apply top-k and top-p, one of which keeps less than all.

    Returns where the tokens lie now, how many, whether they are listed, and the bound of those that
    are kept.
    """
    bound, depth, goal = float("-inf"), float("-inf"), 0.0
    if k == vocab:
        depth, goal = _find_depth(row, vocab, best, scale, share, SIZE)
    elif k <= SIZE:
        # At least k logits reach the kth largest of the lanes' best.
        tl.store(listed + tl.arange(0, SIZE), lanes)
        tl.debug_barrier()
        bound = _bound_of_largest(listed, SIZE, k, best, SIZE)
        tl.debug_barrier()
    number, least = _list(row, vocab, bound, depth, best, scale, listed, ids, MAX, SIZE)
    tl.debug_barrier()
    is_listed = number <= MAX
    tokens = tl.where(is_listed, listed, row)
    count = tl.where(is_listed, number, vocab)
    if k < vocab:
        least = _bound_of_largest(tokens, count, k, best, SIZE)
        goal = share * _mass_above(tokens, count, float("-inf"), best, scale, least, SIZE)
    if share < 1:
        least = _bound_of_mass(tokens, count, goal, least, best, scale, SIZE)
    return tokens, count, is_listed, least


@triton.jit
def sample_kernel(
    logits,  # [rows, vocab]
    temperature,  # [rows] float32, as top_p and min_p
    top_k,  # [rows] int32
    top_p,
    min_p,
    seeds,  # [rows] int64, as positions
    positions,
    listed_logits,  # [rows, MAX] float32
    listed_ids,  # [rows, MAX] int32
    out,  # [rows] int64
    vocab,
    stride,
    MAX: tl.constexpr,
    SIZE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    tokens = logits + i * stride
    lanes, best, token, finite = find_best(tokens, vocab, SIZE)
    heat = tl.load(temperature + i)
    if finite & (heat > 0):
        scale = 1.0 / tl.maximum(heat, 1e-30)
        k, share, least = tl.load(top_k + i), tl.load(top_p + i), tl.load(min_p + i)
        k = tl.where((k > 0) & (k < vocab), k, vocab)
        exponent = tl.log(tl.minimum(tl.maximum(least, 1e-38), 1.0))
        least_exponent = tl.where(least > 0, exponent, float("-inf"))
        ids, listed = listed_ids + i * MAX, listed_logits + i * MAX
        count, is_listed, least_logit = vocab, False, float("-inf")
        if (k < vocab) | (share < 1):
            tokens, count, is_listed, least_logit = _filter(
                tokens, vocab, k, share, lanes, best, scale, listed, ids, MAX, SIZE
            )
        uniform = _uniform(tl.load(seeds + i), tl.load(positions + i))
        token = _draw(tokens, count, uniform, best, scale, least_logit, least_exponent, SIZE)
        if is_listed:
            token = tl.load(ids + token)
    tl.store(out + i, tl.where(finite, token, -1).to(tl.int64))


def launch_sample(
    logits: torch.Tensor, rows: SamplingRows, out: torch.Tensor, config: SampleConfig
) -> None:
    """Draw a token from each row of logits [rows, vocab]."""
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    shape = (num_rows, config.max_listed)
    sample_kernel[(num_rows,)](
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seeds,
        rows.positions,
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
        out,
        vocab,
        logits.stride(0),
        MAX=config.max_listed,
        SIZE=config.block_size,
        num_warps=config.num_warps,
    )


def kernel_cases(capability: Architecture, dtype: str) -> Iterator[KernelCase]:
    """Yield what is launched for tensors of this type; see catalog."""
    if dtype == "fp32":
        config = choose_sample(capability)
        types = ["*fp32", "*fp32", "*i32", "*fp32", "*fp32", "*i64", "*i64"]
        types += ["*fp32", "*i32", "*i64", "i32", "i32"]
        constants = {"MAX": config.max_listed, "SIZE": config.block_size}
        yield KernelCase(sample_kernel, dtype, types, constants, config.num_warps)
