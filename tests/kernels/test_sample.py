"""Tokens are drawn as the reference says, which keeps what transformers' processors keep."""

from dataclasses import fields

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo_kernels import SamplingRows, sample, sample_reference
from octavo_kernels.sample import kept_reference, uniform_reference

pytestmark = pytest.mark.kernels
each_instruction_set = pytest.mark.usefixtures("each_instruction_set")

FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"temperature": 1e-6},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 700},
    {"top_k": 2**31 - 1},
    {"top_p": 0.0},
    {"top_p": 1e-6},
    {"top_p": 0.6},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 700, "top_p": 0.5, "min_p": 1e-3},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]
DTYPES = {"top_k": torch.int32, "seeds": torch.int64, "positions": torch.int64}


@pytest.fixture
def make_rows():
    """Make parameters of `count` rows, whose seeds are 0, 1, 2 …; values may be lists."""

    def make(count: int, **values) -> SamplingRows:
        defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "positions": 5}
        values = {"seeds": list(range(count)), **defaults, **values}
        return SamplingRows(
            **{
                name: torch.tensor(value, dtype=DTYPES.get(name, torch.float32))
                .expand(count)
                .clone()
                for name, value in values.items()
            }
        )

    return make


def select(rows: SamplingRows, chosen: torch.Tensor) -> SamplingRows:
    return SamplingRows(*(getattr(rows, field.name)[chosen] for field in fields(rows)))


def keep_as_transformers(logits, temperature, top_k, top_p, min_p) -> torch.Tensor:
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k > 0:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        processors.append(MinPLogitsWarper(min_p))
    return processors(None, logits[None].double())[0] > -torch.inf


@pytest.mark.parametrize("vocab", [3, 50, 1000])
def test_the_filters_keep_what_those_of_transformers_keep(vocab, make_rows):
    count = 150
    logits = torch.randn(count, vocab) * torch.tensor([0.1, 1.0, 4.0]).repeat(50)[:, None]
    values = {
        "temperature": (torch.rand(count) * 4 - 2).exp(),
        "top_k": torch.where(torch.rand(count) < 0.5, torch.randint(1, 2 * vocab, (count,)), 0),
        "top_p": torch.where(torch.rand(count) < 0.6, torch.rand(count) + 1e-3, 1.0).clamp(max=1),
        "min_p": torch.where(torch.rand(count) < 0.5, torch.rand(count) ** 3, 0.0),
    }
    params = {name: value.tolist() for name, value in values.items()}
    kept = kept_reference(logits, make_rows(count, **params))
    for row, each in enumerate(zip(*params.values(), strict=True)):
        expected = keep_as_transformers(logits[row], *each)
        assert torch.equal(kept[row], expected), each


@each_instruction_set
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 63, 65, 331, 4099])
def test_tokens_are_those_of_the_reference(vocab, filters, make_rows, surround):
    spread = torch.tensor([0.01, 0.3, 2.5, 10.0]).repeat(10)[:, None]
    logits = surround(spread * torch.randn(40, vocab))
    rows = make_rows(40, **filters)
    assert torch.equal(sample(logits, rows), sample_reference(logits, rows))


@each_instruction_set
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_of_a_whole_vocabulary_are_those_of_the_reference(filters, make_rows):
    logits = torch.tensor([0.5, 2.5, 8.0])[:, None] * torch.randn(3, 49_152)
    rows = make_rows(3, **filters)
    assert torch.equal(sample(logits, rows), sample_reference(logits, rows))


@each_instruction_set
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(filters, make_rows):
    num_draws = 4000
    logits = 1.5 * torch.randn(300)
    kept = kept_reference(logits[None], make_rows(1, **filters))[0]
    if filters.get("temperature") == 0.0:
        kept = logits == logits.max()
    exponents = logits.double() / max(filters.get("temperature", 1.0), 1e-30)
    likely = torch.where(kept, (exponents - exponents.max()).exp(), 0.0)
    expected = num_draws * likely / likely.sum()
    # Rows of the same memory: the seed alone sets them apart.
    drawn = sample(logits.expand(num_draws, -1), make_rows(num_draws, **filters))
    counts = torch.bincount(drawn, minlength=300)
    assert counts[~kept].sum() == 0
    common = expected >= 8
    pools = [(counts[common], expected[common]), (counts[~common].sum(), expected[~common].sum())]
    chi_square = sum(((n - e) ** 2 / e.clamp(min=1e-9)).sum().item() for n, e in pools)
    freedom = int(common.sum())
    # Five standard deviations, of at least as many degrees of freedom as there are.
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


@each_instruction_set
def test_equal_tokens_share_their_fate(make_rows):
    logits = torch.tensor([1.0, 2.0, 0.0, 2.0, 1.0, 2.0]).repeat(600, 1)
    cases = [
        ({"top_k": 2}, {1, 3, 5}),
        ({"top_k": 4}, {0, 1, 3, 4, 5}),
        ({"top_p": 0.1}, {1, 3, 5}),
        ({"top_p": 0.9}, {0, 1, 3, 4, 5}),
        ({"min_p": 1.0}, {1, 3, 5}),
        ({"temperature": 1e-30}, {1, 3, 5}),
        ({"temperature": 0.0}, {1}),
    ]
    for filters, expected in cases:
        assert set(sample(logits, make_rows(600, **filters)).tolist()) == expected, filters
    everything = sample(torch.zeros(4000, 70), make_rows(4000, top_k=1, top_p=0.5))
    assert len(set(everything.tolist())) == 70


@each_instruction_set
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_masked_tokens_are_never_drawn(filters, make_rows):
    logits = torch.randn(200, 130)
    allowed = torch.rand(200, 130) < 0.05
    allowed[:, 77] = True
    logits[~allowed] = -torch.inf
    rows = make_rows(200, **filters)
    drawn = sample(logits, rows)
    assert allowed.gather(1, drawn[:, None]).all()
    assert torch.equal(drawn, sample_reference(logits, rows))


@each_instruction_set
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_nothing_is_drawn_from_rows_that_are_not_finite(filters, make_rows):
    logits = torch.randn(9, 1000)
    expected = sample(logits, make_rows(9, **filters))
    for row, token, value in ((1, 0, torch.nan), (3, 999, torch.nan), (4, 500, torch.inf)):
        logits[row, token] = value
    logits[7] = -torch.inf
    expected[[1, 3, 4, 7]] = -1
    assert torch.equal(sample(logits, make_rows(9, **filters)), expected)
    assert torch.equal(sample_reference(logits, make_rows(9, **filters)), expected)


@each_instruction_set
def test_a_row_draws_the_same_token_alone_and_in_any_batch(threads, make_rows, surround):
    count = 2 * len(FILTERS)
    names = ("temperature", "top_k", "top_p", "min_p")
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    each = [{**defaults, **filters} for filters in FILTERS * 2]
    rows = make_rows(count, **{name: [values[name] for values in each] for name in names})
    logits = 2 * torch.randn(count, 3001)
    whole = sample(logits, rows)
    for row in range(count):
        alone = torch.tensor([row])
        assert torch.equal(sample(logits[alone], select(rows, alone)), whole[alone])
    order = torch.randperm(count)
    out = torch.full((count,), -7)
    assert sample(surround(logits[order]), select(rows, order), out=out) is out
    assert torch.equal(out, whole[order])


def mix(state: int) -> int:
    """Return the output of one SplitMix64 step, in plain integers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def unmix(output: int) -> int:
    """Return the state whose step gives this output."""

    def unshift(bits: int, count: int) -> int:
        return bits ^ (bits >> count) ^ (bits >> 2 * count) ^ (bits >> 3 * count)

    state = unshift(output, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    state = unshift(state, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return (unshift(state, 30) - 0x9E3779B97F4A7C15) % 2**64


def to_int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 1234567])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**40])
def test_random_numbers_are_split_mix_64_of_seed_and_position(seed, position):
    bits = mix((mix(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64)
    number = uniform_reference(torch.tensor([seed]), torch.tensor([position]))
    assert number.tolist() == [(bits >> 12) / 2**52]


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_random_numbers_are_uniform_along_seeds_and_along_positions(along):
    counter, fixed = torch.arange(64_000), torch.full((64_000,), 17)
    numbers = uniform_reference(*((counter, fixed) if along == "seeds" else (fixed, counter)))
    assert 0.0 <= numbers.min() < numbers.max() < 1.0
    counts = torch.bincount((numbers * 64).long(), minlength=64)
    # 63 degrees of freedom: mean 63, standard deviation 11.2.
    assert 20 < ((counts - 1000) ** 2 / 1000).sum() < 110
    assert abs(torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]) < 0.02


@each_instruction_set
@pytest.mark.parametrize("filters", [{}, {"top_k": 60}, {"top_p": 0.9999}], ids=str)
def test_the_least_and_the_largest_number_draw_the_first_and_the_last_that_is_kept(
    filters, make_rows
):
    ends = [to_int64(unmix(unmix(bits))) for bits in (0, 2**64 - 1)]
    rows = make_rows(2, seeds=ends, positions=0, **filters)
    assert uniform_reference(rows.seeds, rows.positions).tolist() == [0.0, 1 - 2**-52]
    logits = torch.full((2, 3000), -1000.0)
    logits[:, 1100:1150] = torch.rand(50)
    assert sample(logits, rows).tolist() == sample_reference(logits, rows).tolist() == [1100, 1149]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": torch.zeros(2).long()}, "top_k is torch.int64 but must be torch.int32"),
        ({"top_p": torch.zeros(3)}, r"top_p has shape \[3\] but must be \[2\]"),
        ({"seeds": torch.zeros(2)}, "seeds is torch.float32 but must be torch.int64"),
        ({"positions": torch.zeros(4).long()[::2]}, "positions has strides"),
    ],
)
def test_wrong_arguments_are_refused(change, message, make_rows):
    rows = make_rows(2)
    values = {field.name: getattr(rows, field.name) for field in fields(rows)}
    with pytest.raises(ValueError, match=message):
        sample(torch.ones(2, 4), SamplingRows(**{**values, **change}))
