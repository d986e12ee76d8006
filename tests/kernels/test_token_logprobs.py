import pytest
import torch

from octavo_kernels import token_logprobs, token_logprobs_reference

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("each_instruction_set")]

ROWS = torch.tensor([4, 0, 4, 2])


@pytest.mark.parametrize("vocab", [1, 5, 64, 1023, 1025, 49_152])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_it_is_the_logarithm_of_the_softmax(vocab, spread, surround):
    logits = spread * torch.randn(5, vocab)
    token_ids = torch.randint(vocab, (4,))
    expected = logits[ROWS].double().log_softmax(-1).gather(1, token_ids[:, None])[:, 0].float()
    for compute in (token_logprobs, token_logprobs_reference):
        actual = compute(surround(logits), ROWS, token_ids)
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-6)


def test_a_masked_token_has_no_probability_and_huge_logits_do_not_overflow():
    logits = torch.tensor([[1e30, -torch.inf, 1e30, -1e30]])
    rows, token_ids = torch.zeros(4).long(), torch.arange(4)
    half = -torch.tensor(2.0).log().item()
    expected = torch.tensor([half, -torch.inf, half, -2e30])
    torch.testing.assert_close(token_logprobs(logits, rows, token_ids), expected)


def test_there_is_none_of_what_does_not_exist_or_is_not_finite():
    logits = torch.randn(4, 70)
    logits[0, 69], logits[1, 0], logits[2] = torch.nan, torch.inf, -torch.inf
    rows = torch.tensor([0, 1, 2, 3, 3, 4, -1])
    token_ids = torch.tensor([1, 1, 1, 70, -1, 0, 0])
    for compute in (token_logprobs, token_logprobs_reference):
        assert compute(logits, rows, token_ids).isnan().all()


def test_a_row_has_the_same_bits_alone_and_in_any_batch(threads):
    logits, token_ids = 3 * torch.randn(40, 3000), torch.randint(3000, (40,))
    whole = token_logprobs(logits, torch.arange(40), token_ids)
    for rows in (torch.tensor([17]), torch.arange(39, -1, -1), torch.randperm(40)[:11]):
        alone = token_logprobs(logits[rows], torch.arange(len(rows)), token_ids[rows])
        assert torch.equal(alone, whole[rows])
        assert torch.equal(token_logprobs(logits, rows, token_ids[rows]), whole[rows])


def test_results_go_where_they_are_wanted():
    logits, out = torch.randn(5, 9), torch.full((4,), torch.nan)
    assert token_logprobs(logits, ROWS, ROWS, out=out) is out
    assert torch.equal(out, token_logprobs(logits, ROWS, ROWS))
    with pytest.raises(ValueError, match=r"token_ids has shape \[4\] but must be \[2\]"):
        token_logprobs(logits, ROWS[:2], ROWS)
    with pytest.raises(ValueError, match=r"rows is torch.float32 but must be torch.int64"):
        token_logprobs(logits, ROWS.float(), ROWS)
