import pytest
import torch

from octavo_kernels import weighted_sum, weighted_sum_reference

pytestmark = pytest.mark.kernels


def draw(tokens, count, size, dtype):
    rows = torch.randn(tokens * count, size).to(dtype)
    places = torch.randperm(tokens * count).view(tokens, count)
    return rows, places, torch.rand(tokens, count)


@pytest.mark.parametrize(
    ("tokens", "count", "size"), [(0, 2, 8), (1, 1, 1), (5, 3, 33), (40, 8, 64)]
)
def test_it_has_the_bits_of_the_reference(
    tokens, count, size, dtype, each_instruction_set, threads
):
    arguments = draw(tokens, count, size, dtype)
    actual = weighted_sum(*arguments)
    assert actual.dtype == dtype
    assert torch.equal(actual, weighted_sum_reference(*arguments))


def test_rows_are_added_in_order():
    rows = torch.tensor([[1.0], [2.0**-24], [-1.0]])
    ones = torch.ones(1, 3)
    assert weighted_sum(rows, torch.tensor([[0, 1, 2]]), ones).item() == 0
    assert weighted_sum(rows, torch.tensor([[0, 2, 1]]), ones).item() == 2.0**-24


def test_a_token_has_the_same_bits_alone_and_in_any_batch(dtype):
    rows, places, weights = draw(100, 4, 70, dtype)
    whole = weighted_sum(rows, places, weights)
    for tokens in (slice(0, 1), slice(7, 41), slice(68, 100)):
        assert torch.equal(weighted_sum(rows, places[tokens], weights[tokens]), whole[tokens])


def test_rows_may_be_slices_and_out_is_filled(dtype, surround, make_poisoned):
    rows, places, weights = draw(5, 2, 33, dtype)
    whole = make_poisoned(5, 40, dtype=dtype)
    out = whole[:, 4:37]
    assert weighted_sum(surround(rows), places, weights, out=out) is out
    assert torch.equal(out, weighted_sum(rows, places, weights))
    out.zero_()
    assert int(whole.isnan().sum()) == 5 * 7


def test_a_place_outside_is_refused(make_poisoned):
    out = make_poisoned(2, 4, dtype=torch.float32)
    for place in (-1, 3):
        places = torch.tensor([[0, 1], [place, 2]])
        with pytest.raises(IndexError, match=rf"^weighted_sum: places of token 1 are \[{place}, 2"):
            weighted_sum(torch.ones(3, 4), places, torch.ones(2, 2), out=out)
    assert bool(out.isnan().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.ones(4)}, r"^weighted_sum: rows has shape \[4\] but must be \[any, any\]$"),
        ({"places": torch.zeros(2, 2).int()}, r"places is torch\.int32 but must be torch\.int64$"),
        ({"weights": torch.ones(2, 3)}, r"weights has shape \[2, 3\] but must be \[2, 2\]$"),
        ({"weights": torch.ones(2, 2).half()}, r"weights is torch\.float16 but must be"),
        ({"weights": torch.ones(2, 4)[:, ::2]}, r"weights has strides \[4, 2\] but its last 2"),
        ({"out": torch.ones(2, 3)}, r"out has shape \[2, 3\] but must be \[2, 4\]$"),
    ],
)
def test_what_it_does_not_take_is_refused(change, message):
    arguments = {
        "rows": torch.ones(3, 4),
        "places": torch.zeros(2, 2).long(),
        "weights": torch.ones(2, 2),
        "out": None,
    }
    with pytest.raises(ValueError, match=message):
        weighted_sum(**(arguments | change))
