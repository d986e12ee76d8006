"""The public functions launch the kernels, and agree with their references."""

import pytest
import torch

import octavo_kernels
from octavo_kernels import _choice


def test_a_gpus_tensor_tells_its_capability(device, capability):
    expected = None if device.type == "cpu" else capability
    assert _choice.gpu_capability(torch.ones(1, device=device)) == expected


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gated_activations(name, device, as_on_a_gpu, assert_near):
    as_on_a_gpu("_gated")
    gate_up = torch.randn(3, 50)
    actual = getattr(octavo_kernels, name)(gate_up.to(device))
    assert_near(actual.cpu(), getattr(octavo_kernels, f"{name}_reference")(gate_up))


def test_norms(device, as_on_a_gpu, assert_near):
    as_on_a_gpu("rms_norm")
    (x, residual), weight = torch.randn(2, 3, 50), torch.randn(50)
    on_device = [tensor.to(device) for tensor in (x, residual, weight)]
    actual = octavo_kernels.rms_norm(on_device[0], on_device[2], 1e-5)
    assert_near(actual.cpu(), octavo_kernels.rms_norm_reference(x, weight, 1e-5))
    actual = octavo_kernels.add_rms_norm(*on_device, 1e-5)
    expected = octavo_kernels.add_rms_norm_reference(x, residual, weight, 1e-5)
    assert_near(actual[0].cpu(), expected[0])
    assert_near(actual[1].cpu(), expected[1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved, device, as_on_a_gpu, assert_near):
    as_on_a_gpu("apply_rope")
    arguments = (torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.arange(3), torch.randn(5, 6))
    on_device = [tensor.to(device) for tensor in arguments]
    actual = octavo_kernels.apply_rope(*on_device, interleaved=interleaved)
    expected = octavo_kernels.apply_rope_reference(*arguments, interleaved=interleaved)
    assert_near(actual[0].cpu(), expected[0])
    assert_near(actual[1].cpu(), expected[1])


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(has_bias, device, as_on_a_gpu, assert_near):
    as_on_a_gpu("linear")
    arguments = (torch.randn(3, 40), torch.randn(7, 40), torch.randn(7) if has_bias else None)
    on_device = (None if tensor is None else tensor.to(device) for tensor in arguments)
    actual = octavo_kernels.linear(*on_device)
    assert_near(actual.cpu(), octavo_kernels.linear_reference(*arguments))


def test_linear_of_a_weight_of_8_bits(kind, device, as_on_a_gpu, assert_near):
    for name in ("linear", "grouped_linear"):
        as_on_a_gpu(name)
    x, starts = torch.randn(3, 40), torch.tensor([0, 3])
    elements, scales = octavo_kernels.quantize_weight(torch.randn(7, 40), kind)
    expected = octavo_kernels.linear_reference(x, elements, scales=scales)
    x, starts, elements, scales = (t.to(device) for t in (x, starts, elements, scales))
    assert_near(octavo_kernels.linear(x, elements, scales=scales).cpu(), expected)
    grouped = octavo_kernels.grouped_linear(x, elements[None], starts, scales=scales[None])
    assert_near(grouped.cpu(), expected)


def test_grouped_linear(device, as_on_a_gpu, assert_near):
    as_on_a_gpu("grouped_linear")
    arguments = (torch.randn(3, 40), torch.randn(2, 7, 40), torch.tensor([0, 1, 3]))
    actual = octavo_kernels.grouped_linear(*(tensor.to(device) for tensor in arguments))
    assert_near(actual.cpu(), octavo_kernels.grouped_linear_reference(*arguments))


def test_weighted_sum(device, as_on_a_gpu, assert_near):
    as_on_a_gpu("weighted_sum")
    arguments = (torch.randn(6, 50), torch.tensor([[5, 0], [2, 2]]), torch.randn(2, 2))
    actual = octavo_kernels.weighted_sum(*(tensor.to(device) for tensor in arguments))
    assert_near(actual.cpu(), octavo_kernels.weighted_sum_reference(*arguments))


def test_choice_of_tokens(device, as_on_a_gpu, assert_near):
    for name in ("greedy", "sample", "token_logprobs"):
        as_on_a_gpu(name)
    logits = torch.randn(3, 50)
    moved, best = logits.to(device), logits.argmax(-1)
    assert torch.equal(octavo_kernels.greedy(moved).cpu(), best)
    one, rows = torch.ones(3, device=device), torch.arange(3, device=device)
    only = octavo_kernels.SamplingRows(one, one.int(), one, 0 * one, rows, rows)
    assert torch.equal(octavo_kernels.sample(moved, only).cpu(), best)
    actual = octavo_kernels.token_logprobs(moved, rows, best.to(device))
    assert_near(actual.cpu(), logits.log_softmax(-1).amax(-1))


def test_changes_of_logits(device, as_on_a_gpu, assert_near):
    for name in ("apply_penalties", "apply_token_bitmask"):
        as_on_a_gpu(name)
    logits = torch.randn(3, 50, device=device)
    row, two = torch.tensor([1], device=device), torch.tensor([2.0], device=device)
    starts, ids = torch.tensor([0, 2], device=device), torch.tensor([4, 9], device=device)
    penalties = octavo_kernels.Penalties(row, starts, ids, (ids > 4).int(), two, two, two)
    actual = octavo_kernels.apply_penalties(logits, penalties)
    assert_near(actual, octavo_kernels.apply_penalties_reference(logits, penalties))
    bitmask = torch.tensor([[12345]], dtype=torch.int32, device=device)
    actual = octavo_kernels.apply_token_bitmask(logits, bitmask, row)
    expected = octavo_kernels.apply_token_bitmask_reference(logits, bitmask, row)
    assert torch.equal(actual, expected)
