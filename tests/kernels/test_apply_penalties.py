from dataclasses import replace

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from octavo_kernels import Penalties, apply_penalties, apply_penalties_reference

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("each_instruction_set")]


def make_penalties(
    prompts: dict[int, list[int]], outputs: dict[int, list[int]], **factors: float
) -> Penalties:
    """Penalise the rows of `outputs` for the tokens of their output, and of a prompt if any."""
    starts, token_ids, counts = [0], [], []
    for row, output in outputs.items():
        seen = sorted({*prompts.get(row, []), *output})
        token_ids += seen
        counts += [output.count(token_id) for token_id in seen]
        starts.append(len(token_ids))
    each = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0, **factors}
    return Penalties(
        rows=torch.tensor(list(outputs), dtype=torch.int64),
        row_starts=torch.tensor(starts),
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        output_counts=torch.tensor(counts, dtype=torch.int32),
        **{name: torch.full((len(outputs),), value) for name, value in each.items()},
    )


@pytest.fixture(params=[apply_penalties, apply_penalties_reference])
def apply(request):
    return request.param


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 7.0])
def test_repetition_is_that_of_transformers(apply, factor):
    logits = torch.randn(3, 500)
    prompts, outputs = torch.randint(500, (3, 60)), torch.randint(500, (3, 20))
    penalties = make_penalties(
        dict(enumerate(prompts.tolist())), dict(enumerate(outputs.tolist())), repetition=factor
    )
    processor = RepetitionPenaltyLogitsProcessor(factor)
    expected = processor(torch.cat([prompts, outputs], 1), logits.clone())
    torch.testing.assert_close(apply(logits, penalties), expected, atol=0, rtol=1e-6)


def test_presence_and_frequency_are_of_the_output_alone(apply):
    logits = torch.zeros(1, 6)
    penalties = make_penalties({0: [1, 2]}, {0: [2, 3, 3, 3]}, presence=0.5, frequency=0.25)
    expected = torch.tensor([[0.0, 0.0, -0.75, -1.25, 0.0, 0.0]])
    assert torch.equal(apply(logits, penalties), expected)


def test_repetition_comes_before_the_others(apply):
    logits = torch.tensor([[4.0, -4.0]])
    penalties = make_penalties({}, {0: [0, 1]}, repetition=2.0, presence=1.0, frequency=2.0)
    assert apply(logits, penalties).tolist() == [[-1.0, -11.0]]


def test_only_the_listed_rows_change_each_by_its_own_factors(apply):
    logits = torch.ones(4, 5)
    penalties = replace(make_penalties({}, {3: [0], 1: [4]}), presence=torch.tensor([1.0, 2.0]))
    changed = apply(logits, penalties)
    assert changed[3].tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert changed[1].tolist() == [1.0, 1.0, 1.0, 1.0, -1.0]
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])


def test_rows_and_tokens_that_do_not_exist_are_passed_over(apply):
    outputs = {-1: [0], 2: [0], 1: [-3, 0, 5, 2**40]}
    penalties = make_penalties({}, outputs, presence=1.0)
    changed = apply(torch.zeros(2, 5), penalties)
    assert changed.tolist() == [[0.0] * 5, [-1.0, 0.0, 0.0, 0.0, 0.0]]


def test_a_masked_token_stays_masked_and_others_may_be_in_place(surround, threads):
    logits = torch.randn(3, 900)
    logits[1, 7] = -torch.inf
    output = [7, *range(100, 900)]
    penalties = make_penalties({}, dict.fromkeys(range(3), output))
    penalties = replace(penalties, repetition=torch.tensor([1.5, 2.0, 0.5]))
    expected = apply_penalties_reference(logits, penalties)
    assert expected[1, 7] == -torch.inf
    assert torch.equal(apply_penalties(logits, penalties), expected)
    placed, out = surround(logits), surround(torch.zeros_like(logits))
    assert apply_penalties(placed, penalties, out=out) is out
    assert torch.equal(placed, logits)
    assert apply_penalties(placed, penalties, out=placed) is placed
    assert torch.equal(out, expected)
    assert torch.equal(placed, expected)


def test_no_rows_change_nothing(apply):
    logits = torch.randn(2, 5)
    assert torch.equal(apply(logits, make_penalties({}, {})), logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_starts": torch.zeros(1).long()}, r"row_starts has shape \[1\] but must be \[2\]"),
        ({"token_ids": torch.zeros(1)}, "token_ids is torch.float32 but must be torch.int64"),
        ({"output_counts": torch.zeros(9).int()}, r"output_counts has shape \[9\] but must be"),
        ({"presence": torch.zeros(2)}, r"presence has shape \[2\] but must be \[1\]"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    penalties = make_penalties({}, {0: [1]})
    with pytest.raises(ValueError, match=message):
        apply_penalties(torch.ones(2, 4), replace(penalties, **change))
