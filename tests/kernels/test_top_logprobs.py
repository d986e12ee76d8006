import pytest
import torch

from octavo_kernels import TopLogprobs, token_logprobs, top_logprobs, top_logprobs_reference
from octavo_kernels.top_logprobs import _in_torch_operations

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("each_instruction_set")]

ROWS = torch.tensor([4, 0, 4, 2, 1])
WAYS = (top_logprobs, top_logprobs_reference, _in_torch_operations)


def by_hand(logits: list[float], k: int) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]


@pytest.mark.parametrize("compute", WAYS)
@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 1025, 5000])
def test_they_are_the_largest_of_the_logarithm_of_the_softmax(compute, vocab, surround):
    logits, token_ids, k = 3 * torch.randn(5, vocab), torch.randint(vocab, (5,)), min(vocab, 7)
    logits[2] = -torch.inf
    logits[2, vocab // 2 :] = torch.randn(vocab - vocab // 2).round()
    ids, logprobs, ranks = compute(surround(logits), ROWS, token_ids, k)
    chosen = logits[ROWS]
    assert ids[:, 0].tolist() == token_ids.tolist()
    assert ids[:, 1:].tolist() == [by_hand(row, k) for row in chosen.tolist()]
    expected = chosen.double().log_softmax(-1).gather(1, ids).float()
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=1e-6)
    picked = chosen.gather(1, ids)
    assert torch.equal(ranks, 1 + (chosen[:, None] > picked[..., None]).sum(-1))


@pytest.mark.parametrize("compute", WAYS)
def test_of_equal_logits_the_lowest_ids_come_first_and_share_a_rank(compute):
    logits = torch.zeros(1, 500)
    logits[0, [450, 70, 69, 300]] = 1.0
    logits[0, 200:210] = -0.0
    ids, _, ranks = compute(logits, torch.tensor([0]), torch.tensor([205]), 6)
    assert ids.tolist() == [[205, 69, 70, 300, 450, 0, 1]]
    assert ranks.tolist() == [[5, 1, 1, 1, 1, 5, 5]]


@pytest.mark.parametrize("compute", WAYS)
@pytest.mark.parametrize("k", [0, 3])
def test_there_is_nothing_of_what_does_not_exist_or_is_not_finite(compute, k):
    logits = torch.randn(4, 70)
    logits[0, 69], logits[1, 0], logits[2] = torch.nan, torch.inf, -torch.inf
    rows = torch.tensor([0, 1, 2, 3, 3, 4, -1])
    token_ids = torch.tensor([1, 1, 1, 70, -1, 0, 0])
    ids, logprobs, ranks = compute(logits, rows, token_ids, k)
    assert (ids == -1).all()
    assert logprobs.isnan().all()
    assert (ranks == 0).all()


def test_the_given_token_has_the_bits_of_token_logprobs():
    logits, token_ids = 3 * torch.randn(5, 3001), torch.randint(3001, (5,))
    expected = token_logprobs(logits, ROWS, token_ids)
    for k in (0, 1, 20):
        assert torch.equal(top_logprobs(logits, ROWS, token_ids, k).logprobs[:, 0], expected)


def test_a_row_has_the_same_bits_alone_in_any_batch_and_for_any_k(threads):
    logits, token_ids = 3 * torch.randn(40, 3000), torch.randint(3000, (40,))
    whole = top_logprobs(logits, torch.arange(40), token_ids, 9)
    for rows in (torch.tensor([17]), torch.arange(39, -1, -1), torch.randperm(40)[:11]):
        for k in (4, 9):
            alone = top_logprobs(logits[rows], torch.arange(len(rows)), token_ids[rows], k)
            for one, every in zip(alone, whole, strict=True):
                assert torch.equal(one, every[rows, : 1 + k])


def test_results_go_where_they_are_wanted(surround):
    logits = torch.randn(5, 9)
    out = TopLogprobs(torch.full((5, 3), 99), torch.full((5, 3), torch.nan), torch.full((5, 3), 99))
    assert top_logprobs(logits, ROWS, ROWS, 2, out=out) is out
    for given, made in zip(out, top_logprobs(logits, ROWS, ROWS, 2), strict=True):
        assert torch.equal(given, made)


def test_wrong_arguments_are_refused():
    logits = torch.randn(5, 9)
    with pytest.raises(ValueError, match=r"k is 10 but must be from 0 to 9"):
        top_logprobs(logits, ROWS, ROWS, 10)
    with pytest.raises(ValueError, match=r"token_ids has shape \[5\] but must be \[2\]"):
        top_logprobs(logits, ROWS[:2], ROWS, 1)
    short = TopLogprobs(torch.zeros(5, 2).long(), torch.zeros(5, 2), torch.zeros(5, 1).long())
    with pytest.raises(ValueError, match=r"out ranks has shape \[5, 1\] but must be \[5, 2\]"):
        top_logprobs(logits, ROWS, ROWS, 1, out=short)
