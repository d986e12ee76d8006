"""A mixture of experts: who is chosen, and that a token's bits are its own."""

import pytest
import torch

from octavo.model.experts import Experts, choose_experts, group_by_expert
from octavo.model.grouped_linear import GroupedLinear
from octavo.model.layers import PackedLinear
from octavo.model.quantization import QUANTIZED
from octavo.model.spec import ExpertSpec
from octavo_kernels import packs_weights

CPU = torch.device("cpu")
HIDDEN, INNER, NUM_EXPERTS = 60, 27, 7


def make_spec(**changes):
    values = {
        "num_experts": NUM_EXPERTS,
        "experts_per_token": 3,
        "intermediate_size": INNER,
        "normalizes_weights": True,
        "layers": (True,),
    }
    return ExpertSpec(**(values | changes))


# Relative to sizes of about 1: bfloat16 is rounded twice on the way; 8-bit integers are 127 steps;
# fp8 has four bits.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 5e-2, "fp8": 2e-1}


@pytest.fixture(params=TOLERANCES)
def kind(request):
    if request.param == "int8" and not packs_weights(torch.float32, CPU):
        pytest.skip("no native code is built here")
    return request.param


@pytest.fixture
def dtype(kind):
    return torch.bfloat16 if kind == "bfloat16" else torch.float32


@pytest.fixture
def weights(dtype):
    """Random weights of the router, of gate and up, and of down."""
    torch.manual_seed(3)
    gate_up, down = (NUM_EXPERTS, 2 * INNER, HIDDEN), (NUM_EXPERTS, HIDDEN, INNER)
    shapes = ((NUM_EXPERTS, HIDDEN), gate_up, down)
    return [(torch.randn(shape) / shape[-1] ** 0.5).to(dtype) for shape in shapes]


@pytest.fixture
def experts(kind, dtype, weights):
    router, *others = weights
    grouped = []
    for weight, is_gated in zip(others, (True, False), strict=True):
        shape, stored_as = tuple(weight.shape), QUANTIZED.get(kind)
        linear = GroupedLinear(shape, dtype, CPU, is_gated=is_gated, stored_as=stored_as)
        for index, each in enumerate(weight):
            linear.fill(index, each)
        grouped.append(linear)
    return Experts(make_spec(), PackedLinear(router), *grouped)


def test_a_token_is_the_weighted_sum_of_what_its_experts_make(experts, weights, kind, dtype):
    router, gate_up, down = (weight.float() for weight in weights)
    x = torch.randn(40, HIDDEN).to(dtype)
    choice = choose_experts((x.float() @ router.T).to(dtype).float(), make_spec())
    expected = torch.zeros(40, HIDDEN)
    for token in range(40):
        for expert, weight in zip(choice.experts[token], choice.weights[token], strict=True):
            gate, up = (gate_up[expert] @ x[token].float()).chunk(2)
            expected[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    tolerance = TOLERANCES[kind]
    torch.testing.assert_close(experts(x).float(), expected, rtol=tolerance, atol=tolerance)


def test_a_token_has_the_same_bits_alone_and_beside_any_others_on_any_threads(experts, dtype):
    x = torch.randn(300, HIDDEN).to(dtype)
    whole = experts(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            assert torch.equal(experts(x), whole)
            for rows in (slice(0, 1), slice(7, 9), slice(150, 171), slice(299, 300)):
                assert torch.equal(experts(x[rows]), whole[rows])
        # Neighbours that all go where it goes, and that go elsewhere.
        for neighbour in (5, 123):
            crowd = torch.cat([x[5:6], x[neighbour : neighbour + 1].expand(200, -1)])
            assert torch.equal(experts(crowd)[0], whole[5])
    finally:
        torch.set_num_threads(threads)


def test_a_token_that_is_not_finite_stays_alone(experts, dtype):
    x = torch.randn(20, HIDDEN).to(dtype)
    expected = experts(x)
    x[4] = torch.nan
    actual = experts(x)
    rest = [index for index in range(20) if index != 4]
    assert torch.equal(actual[rest], expected[rest])
    assert not actual[4].isfinite().any()


def test_of_equal_experts_those_of_the_lower_indices_are_chosen():
    logits = torch.zeros(5, NUM_EXPERTS)
    logits[:, 4] = 1.0
    choice = choose_experts(logits, make_spec())
    assert choice.experts.tolist() == [[4, 0, 1]] * 5


@pytest.mark.parametrize("normalizes", [True, False])
def test_weights_are_probabilities_and_add_up_to_one_if_they_are_to(normalizes):
    logits = torch.randn(9, NUM_EXPERTS)
    choice = choose_experts(logits, make_spec(normalizes_weights=normalizes))
    probabilities = logits.double().softmax(-1).gather(1, choice.experts)
    if normalizes:
        probabilities /= probabilities.sum(-1, keepdim=True)
    torch.testing.assert_close(choice.weights.double(), probabilities, rtol=1e-6, atol=0)
    assert bool((choice.weights.diff(dim=1) <= 0).all())


@pytest.mark.parametrize("num_experts", [2, 7, 64, 128])
def test_a_choice_has_the_same_bits_for_any_number_of_tokens(num_experts):
    spec = make_spec(num_experts=num_experts, experts_per_token=min(8, num_experts))
    logits = torch.randn(600, num_experts)
    experts, weights = choose_experts(logits, spec)
    for count in (*range(1, 40), 255, 599):
        own = choose_experts(logits[-count:], spec)
        assert torch.equal(own.experts, experts[-count:])
        assert torch.equal(own.weights, weights[-count:])


def test_rows_are_sorted_by_expert_and_found_again():
    chosen = torch.tensor([[4, 1], [4, 0], [1, 4]])
    tokens, starts, places = group_by_expert(chosen, 6)
    assert tokens.tolist() == [1, 0, 2, 0, 1, 2]
    assert starts.tolist() == [0, 1, 3, 3, 3, 6, 6]
    assert places.tolist() == [[3, 1], [4, 0], [2, 5]]
