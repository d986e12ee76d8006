import pytest
import torch

from octavo_kernels import apply_token_bitmask, apply_token_bitmask_reference

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("each_instruction_set")]


def pack(allowed: torch.Tensor) -> torch.Tensor:
    """Return [n, words] int32 for allowed [n, tokens] bool."""
    words = -(-allowed.shape[1] // 32)
    bits = torch.nn.functional.pad(allowed, (0, 32 * words - allowed.shape[1])).view(-1, words, 32)
    # The sum of distinct powers of two wraps around into the sign.
    return (bits.long() << torch.arange(32)).sum(-1).to(torch.int32)


@pytest.fixture(params=[apply_token_bitmask, apply_token_bitmask_reference])
def apply(request):
    return request.param


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 500, 4097])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_tokens_whose_bit_is_clear_are_ruled_out(apply, vocab, share):
    logits = torch.randn(5, vocab)
    allowed = torch.rand(3, vocab) < share
    rows = torch.tensor([4, 0, 2])
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~allowed, -torch.inf)
    assert torch.equal(apply(logits, pack(allowed), rows), expected)


def test_a_padded_vocabulary_is_ruled_out_and_more_words_do_no_harm(apply):
    logits, everything = torch.zeros(2, 70), torch.full((2, 2), -1, dtype=torch.int32)
    rows = torch.tensor([0, 1])
    assert apply(logits, everything, rows)[0].tolist() == [0.0] * 64 + [-torch.inf] * 6
    more = torch.full((2, 5), -1, dtype=torch.int32)
    assert torch.equal(apply(logits, more, rows), logits)
    none = torch.empty((2, 0), dtype=torch.int32)
    assert torch.equal(apply(logits, none, rows), torch.full((2, 70), -torch.inf))


def test_rows_that_do_not_exist_are_passed_over_and_masks_of_one_row_add_up(apply):
    logits = torch.zeros(2, 4)
    bitmask = torch.tensor([[0b0011], [0b0110], [0], [0]], dtype=torch.int32)
    masked = apply(logits, bitmask, torch.tensor([1, 1, 2, -1]))
    assert masked.tolist() == [[0.0] * 4, [-torch.inf, 0.0, -torch.inf, -torch.inf]]


def test_what_is_allowed_is_not_looked_at_and_may_be_in_place(surround, threads):
    logits = torch.randn(6, 9000)
    logits[2, 5] = torch.nan
    allowed = torch.rand(6, 9000) < 0.3
    allowed[2, 5] = True
    placed, out = surround(logits), surround(torch.zeros_like(logits))
    expected = logits.masked_fill(~allowed, -torch.inf)
    assert apply_token_bitmask(placed, pack(allowed), torch.arange(6), out=out) is out
    assert apply_token_bitmask(placed, pack(allowed), torch.arange(6), out=placed) is placed
    torch.testing.assert_close(out, expected, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(placed, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("bitmask", "message"),
    [
        (torch.zeros(3, 1).int(), r"bitmask has shape \[3, 1\] but must be \[2, any\]"),
        (torch.zeros(2, 1), "bitmask is torch.float32 but must be torch.int32"),
        (torch.zeros(2, 4).int()[:, ::2], "bitmask has strides"),
    ],
)
def test_wrong_arguments_are_refused(bitmask, message):
    with pytest.raises(ValueError, match=message):
        apply_token_bitmask(torch.ones(2, 4), bitmask, torch.tensor([0, 1]))
