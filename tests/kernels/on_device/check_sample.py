from dataclasses import fields

import pytest
import torch

from octavo_kernels import SamplingRows, greedy_reference, token_logprobs_reference
from octavo_kernels._launch import PiecesConfig
from octavo_kernels._sampling_launch import SampleConfig, choose_row_scan, choose_sample
from octavo_kernels._triton.greedy import launch_greedy
from octavo_kernels._triton.sample import launch_sample
from octavo_kernels._triton.token_logprobs import launch_token_logprobs
from octavo_kernels.sample import kept_reference, uniform_reference

#: Small enough that a row has many pieces, and more candidates than can be listed.
SMALL = SampleConfig(block_size=64, max_listed=128, num_warps=1)
SMALL_SCAN = PiecesConfig(block_size=64, num_warps=1)

#: temperature, top_k, top_p, min_p
FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (1e-6, 0, 1.0, 0.0),
    (100.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, 200, 1.0, 0.0),
    (1.0, 2**31 - 1, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 0.6, 0.0),
    (3.0, 0, 0.97, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (2.0, 20, 0.9, 0.02),
    (1.0, 200, 0.5, 1e-3),
]


def make_rows(count: int, first: int = 0) -> SamplingRows:
    """Return parameters for `count` rows: those of FILTERS from `first` on, in a circle."""
    chosen = [FILTERS[(first + i) % len(FILTERS)] for i in range(count)]
    temperature, top_k, top_p, min_p = map(list, zip(*chosen, strict=True))
    return SamplingRows(
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.arange(count) - 2**62,
        torch.arange(count) * 3,
    )


@pytest.fixture
def draw(device):
    def launch(
        logits: torch.Tensor, rows: SamplingRows, config: SampleConfig = SMALL
    ) -> torch.Tensor:
        out = torch.full((len(logits),), -7, device=device)
        moved = SamplingRows(*(getattr(rows, field.name).to(device) for field in fields(rows)))
        launch_sample(logits.to(device), moved, out, config)
        return out.cpu()

    return launch


def assert_drawn(token_ids: torch.Tensor, logits: torch.Tensor, rows: SamplingRows) -> None:
    """Check that each row's number falls into its token's share of what is kept.

    A GPU's e^x may shift the shares by a rounding.
    """
    greedy_rows = rows.temperature == 0
    assert torch.equal(token_ids[greedy_rows], greedy_reference(logits)[greedy_rows])
    logits, token_ids = logits[~greedy_rows], token_ids[~greedy_rows, None]
    chosen = SamplingRows(*(getattr(rows, field.name)[~greedy_rows] for field in fields(rows)))
    kept = kept_reference(logits, chosen)
    assert kept.gather(1, token_ids).all()
    exponents = (logits - logits.amax(-1, keepdim=True)).double() / chosen.temperature[:, None]
    weights = torch.where(kept, exponents.exp(), 0.0)
    ends = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    begins = ends - weights / weights.sum(-1, keepdim=True)
    number = uniform_reference(chosen.seeds, chosen.positions)[:, None]
    assert (begins.gather(1, token_ids) <= number + 1e-5).all()
    assert (ends.gather(1, token_ids) >= number - 1e-5).all()


@pytest.mark.parametrize("vocab", [1, 7, 64, 130, 331])
@pytest.mark.parametrize("spread", [0.1, 2.5])
def test_tokens_are_drawn_as_the_reference_says(vocab, spread, draw, surround):
    logits, rows = spread * torch.randn(len(FILTERS), vocab), make_rows(len(FILTERS))
    assert_drawn(draw(surround(logits), rows), logits, rows)


def test_the_launched_configuration_draws_as_the_reference_says(draw, capability):
    logits, rows = 2 * torch.randn(len(FILTERS), 5000), make_rows(len(FILTERS))
    assert_drawn(draw(logits, rows, choose_sample(capability)), logits, rows)


def test_a_row_draws_the_same_token_alone_and_in_any_batch(draw):
    logits, rows = torch.randn(5, 200), make_rows(5, first=9)
    whole = draw(logits, rows)
    for row in range(5):
        alone = SamplingRows(
            *(getattr(rows, field.name)[row : row + 1].clone() for field in fields(rows))
        )
        assert draw(logits[row : row + 1], alone).tolist() == whole[row : row + 1].tolist()


def test_masked_tokens_and_rows_that_are_not_finite_are_not_drawn(draw):
    rows = make_rows(len(FILTERS))
    logits = torch.randn(len(FILTERS), 200)
    logits[:, 3:197] = -torch.inf
    assert_drawn(draw(logits, rows), logits, rows)
    logits[::3, 198] = torch.nan
    logits[1::3, 0] = torch.inf
    logits[2::3] = -torch.inf
    assert draw(logits, rows).tolist() == [-1] * len(FILTERS)


@pytest.mark.parametrize("vocab", [1, 63, 64, 500])
def test_the_first_of_the_best_is_taken(vocab, device, surround, capability):
    logits = torch.randn(6, vocab)
    logits[1], logits[2, 0], logits[3, -1], logits[4] = 0.5, torch.nan, torch.inf, -torch.inf
    for config in (SMALL_SCAN, choose_row_scan(capability)):
        out = torch.full((6,), -7, device=device)
        launch_greedy(surround(logits), out, config)
        assert torch.equal(out.cpu(), greedy_reference(logits))


@pytest.mark.parametrize("vocab", [1, 64, 500])
def test_log_probabilities_are_those_of_the_reference(
    vocab, device, surround, capability, assert_near
):
    logits = 3 * torch.randn(6, vocab)
    logits[3, 0], logits[4] = torch.nan, -torch.inf
    rows = torch.tensor([5, 0, 3, 4, 6, -1, 0, 0])
    token_ids = torch.tensor([0, vocab - 1, 0, 0, 0, 0, vocab, -1])
    expected = token_logprobs_reference(logits, rows, token_ids)
    assert expected[2:].isnan().all()
    for config in (SMALL_SCAN, choose_row_scan(capability)):
        out = torch.full((8,), 7.0, device=device)
        moved = rows.to(device), token_ids.to(device)
        launch_token_logprobs(surround(logits), *moved, out, config)
        assert_near(out.cpu()[:2], expected[:2])
        assert out[2:].isnan().all()


def test_rows_may_lie_far_apart(device, draw, capability):
    stride = 2**30
    memory = torch.empty(2 * stride + 40, device=device)
    logits = memory.as_strided((3, 40), (stride, 1))
    logits.copy_(torch.randn(3, 40))
    out = torch.full((3,), -7, device=device)
    launch_greedy(logits, out, choose_row_scan(capability))
    assert torch.equal(out.cpu(), greedy_reference(logits.cpu()))
    assert_drawn(draw(logits, make_rows(3)), logits.cpu(), make_rows(3))
