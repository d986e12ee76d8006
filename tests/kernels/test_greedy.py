import pytest
import torch

from octavo_kernels import greedy, greedy_reference

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("each_instruction_set")]


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 63, 64, 65, 1000, 49_152])
def test_the_best_token_of_each_row_is_taken(vocab, surround):
    logits = torch.randn(7, vocab)
    expected = logits.double().argmax(-1)
    assert torch.equal(greedy_reference(logits), expected)
    assert torch.equal(greedy(surround(logits)), expected)


@pytest.mark.parametrize("places", [[3, 4], [0, 299], [64, 65, 128], [299]])
def test_the_first_of_equal_tokens_wins(places):
    logits = torch.full((2, 300), -5.0)
    logits[:, places] = -1.0
    assert greedy(logits).tolist() == greedy_reference(logits).tolist() == [places[0]] * 2


def test_zero_is_zero_whatever_its_sign():
    logits = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]])
    assert greedy(logits).tolist() == greedy_reference(logits).tolist() == [1, 1]


def test_tokens_are_never_taken_from_rows_that_are_not_finite():
    logits = torch.randn(5, 200)
    logits[0, 150], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, :199] = -torch.inf
    expected = [-1, -1, -1, 199, int(logits[4].argmax())]
    assert greedy(logits).tolist() == greedy_reference(logits).tolist() == expected


def test_results_go_where_they_are_wanted(threads):
    logits = torch.randn(40, 3000)
    out = torch.full((40,), -7)
    assert greedy(logits, out=out) is out
    assert torch.equal(out, logits.argmax(-1))
    assert greedy(torch.empty(0, 5)).tolist() == []


@pytest.mark.parametrize(
    ("logits", "out", "message"),
    [
        (torch.ones(2, 4).half(), None, "greedy: logits is torch.float16 but must be"),
        (torch.ones(4), None, r"greedy: logits has shape \[4\] but must be \[any, any\]"),
        (torch.ones(4, 2).t(), None, r"greedy: logits has strides \[1, 2\] but its last 1"),
        (torch.ones(2, 0), None, r"logits has shape \[2, 0\] but must have a vocabulary"),
        (torch.ones(2, 4), torch.ones(3).long(), r"out has shape \[3\] but must be \[2\]"),
        (torch.ones(2, 4), torch.ones(2).int(), "out is torch.int32 but must be torch.int64"),
    ],
)
def test_wrong_arguments_are_refused(logits, out, message):
    with pytest.raises(ValueError, match=message):
        greedy(logits, out=out)
