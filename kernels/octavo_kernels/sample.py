"""Draw a token from each row of logits, among those that its filters keep.

With M the largest logit, token i has the exponent z_i = (x_i - M) / temperature and weighs e^z_i.
The filters come in the order of transformers, and each is a bound, so that equal tokens share their
fate and the best is always kept:

    top-k   x_i is at least the k-th largest
    top-p   the tokens that top-k keeps with x > x_i weigh less than top_p of all that it keeps
    min-p   e^z_i >= min_p, taken as z_i >= ln min_p

Of what they keep, in the order of ids, the token is drawn whose share holds the number u in [0, 1):
52 bits of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014) of the row's seed and position. The Gumbel trick draws from the same distribution with a
number and two logarithms a token; one number a row is cheaper by orders of magnitude on a CPU.

A row's token depends on that row alone, to the bit, on any one device and instruction set. Knows
nothing of sequences.
"""

import torch

from octavo_kernels._choice import gpu_capability
from octavo_kernels._logits import SamplingRows, check_beside, check_logits
from octavo_kernels._native.library import library_for
from octavo_kernels._register import register
from octavo_kernels._sampling_launch import choose_sample

_COLDEST = 1e-30  # so that 0 / temperature stays 0
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def uniform_reference(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each (seed, position), [rows] int64 each, as float64."""
    bits = _mix(_mix(seeds) + positions * _GOLDEN)
    return _shift_right(bits, 12).double() * 2.0**-52


def kept_reference(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Say which tokens of logits [rows, vocab] the filters keep, as [rows, vocab] bool.

    Rows without top-k and top-p are not sorted; which they are, a GPU must be waited for.
    """
    best = logits.amax(-1, keepdim=True)
    kept = _exponents(logits, best, rows.temperature) >= rows.min_p.log()[:, None]
    chosen = ((rows.top_k > 0) | (rows.top_p < 1)).nonzero()[:, 0]
    if len(chosen):
        top_k, top_p = rows.top_k[chosen, None], rows.top_p[chosen, None]
        kept[chosen] &= _in_top(logits[chosen], rows.temperature[chosen], top_k, top_p)
    return kept


def sample_reference(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Draw a token from each row of logits [rows, vocab], as [rows] int64."""
    best = logits.amax(-1, keepdim=True)
    # Nothing but the first of the best is kept at a temperature of 0.
    ids = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(logits == best, ids, logits.shape[1]).amin(-1)
    exponents = _exponents(logits, best, rows.temperature)
    weights = torch.where(kept_reference(logits, rows), exponents.exp(), 0.0)
    mass = weights.double().cumsum(-1)
    target = uniform_reference(rows.seeds, rows.positions)[:, None] * mass[:, -1:]
    drawn = torch.searchsorted(mass, target, right=True)
    # Should rounding leave the target beyond everything, the last that weighs something is drawn.
    last = torch.where(weights > 0, ids, 0).amax(-1, keepdim=True)
    token_ids = torch.where(rows.temperature > 0, drawn.minimum(last)[:, 0], first)
    return torch.where(best[:, 0].isfinite(), token_ids, -1)


def sample(
    logits: torch.Tensor, rows: SamplingRows, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw a token from each row.

    Args:
        logits: [rows, vocab] float32; rows contiguous, and strided as they like. Those of -infinity
            are never drawn.
        rows: How, for the same rows.
        out: Receives the result, [rows] int64.

    Returns:
        `out`, or a new tensor; -1 for a row that holds NaN or infinity, or nothing above -infinity.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    check_logits("sample: logits", logits)
    num_rows = logits.shape[0]
    for name, tensor, dtype in (
        ("temperature", rows.temperature, torch.float32),
        ("top_k", rows.top_k, torch.int32),
        ("top_p", rows.top_p, torch.float32),
        ("min_p", rows.min_p, torch.float32),
        ("seeds", rows.seeds, torch.int64),
        ("positions", rows.positions, torch.int64),
    ):
        check_beside(f"sample: {name}", tensor, num_rows, dtype, logits)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    else:
        check_beside("sample: out", out, num_rows, torch.int64, logits)
    filters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    _sample(logits, *filters, rows.seeds, rows.positions, out)
    return out


@register(
    "sample",
    "Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
    "Tensor positions, Tensor(a!) out",
)
def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute `sample` of checked tensors into `out`."""
    rows = SamplingRows(temperature, top_k, top_p, min_p, seeds, positions)
    capability = gpu_capability(logits)
    if capability is not None:
        from octavo_kernels._triton.sample import launch_sample

        launch_sample(logits, rows, out, choose_sample(capability))
        return
    library = library_for(logits)
    if library is None:
        out.copy_(sample_reference(logits, rows))
        return
    library.octavo_sample(
        logits.data_ptr(),
        temperature.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        out.data_ptr(),
        *logits.shape,
        logits.stride(0),
        torch.get_num_threads(),
    )


def _exponents(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return (logits - best) * (1.0 / temperature.clamp(min=_COLDEST))[:, None]


def _in_top(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Say which tokens of logits [rows, vocab] top-k and top-p [rows, 1] keep."""
    vocab = logits.shape[1]
    falling, order = logits.sort(-1, descending=True)
    last = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab) - 1
    in_top_k = logits >= falling.gather(1, last.long())
    exponents = _exponents(logits, falling[:, :1], temperature)
    weights = torch.where(in_top_k, exponents.exp(), 0.0).double()
    mass = torch.nn.functional.pad(weights.gather(1, order).cumsum(-1), (1, 0))
    above = mass.gather(1, torch.searchsorted(-falling, -logits))
    in_top_p = (above < top_p * mass[:, -1:]) | (logits == falling[:, :1]) | (top_p >= 1)
    return in_top_k & in_top_p


def _mix(state: torch.Tensor) -> torch.Tensor:
    """Make one step of SplitMix64, in integers that wrap around."""
    state = state + _GOLDEN
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift without regard to the sign."""
    shifted: torch.Tensor = (bits >> count) & (2 ** (64 - count) - 1)
    return shifted
