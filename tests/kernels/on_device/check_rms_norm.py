import pytest
import torch

from octavo_kernels import add_rms_norm_reference, rms_norm_reference
from octavo_kernels._launch import choose_rms_norm, rms_norm_configs
from octavo_kernels._triton.rms_norm import launch_add_rms_norm, launch_rms_norm

SHAPES = [(1, 1), (7, 100), (5, 256), (3, 577), (2, 2050)]


@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_rms_norm_agrees_with_reference(
    tokens, hidden, dtype, capability, surround, assert_surrounded, assert_near
):
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(hidden)
    out = surround(torch.zeros_like(x))
    config = choose_rms_norm(hidden, capability)
    launch_rms_norm(surround(x), weight.to(out.device), 1e-5, out, config)
    assert_near(out.cpu(), rms_norm_reference(x, weight, 1e-5))
    assert_surrounded(out)


def test_every_configuration_agrees_on_its_longest_rows(capability, device, assert_near):
    for config in rms_norm_configs(capability):
        x = torch.randn(config.block_rows + 1, config.block_size)
        weight, out = torch.randn(config.block_size), torch.empty_like(x, device=device)
        launch_rms_norm(x.to(device), weight.to(device), 1e-5, out, config)
        assert_near(out.cpu(), rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_add_rms_norm_agrees_with_reference(
    tokens, hidden, dtype, capability, draw_addends, surround, assert_surrounded, assert_near
):
    x, residual = draw_addends(tokens, hidden, dtype=dtype)
    weight = torch.randn(hidden)
    out, residual_out = surround(torch.zeros_like(x)), surround(torch.zeros_like(x), 1, 9)
    tensors = (surround(x), surround(residual, 8, 0), weight.to(out.device), out, residual_out)
    launch_add_rms_norm(tensors, 1e-5, choose_rms_norm(hidden, capability))
    normed, total = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert torch.equal(residual_out.cpu(), total)
    assert_near(out.cpu(), normed)
    assert_surrounded(out)
    assert_surrounded(residual_out)


@pytest.mark.parametrize("hidden", [100, 577])
def test_adding_first_or_inside_gives_the_same_bits_in_place(
    hidden, dtype, capability, device, draw_addends
):
    x, residual = (addend.to(device) for addend in draw_addends(5, hidden, dtype=dtype))
    weight = torch.randn(hidden).to(device)
    config = choose_rms_norm(hidden, capability)
    expected = torch.empty_like(x)
    launch_rms_norm(x + residual, weight, 1e-5, expected, config)
    total = x + residual
    launch_add_rms_norm((x, residual, weight, x, residual), 1e-5, config)
    assert torch.equal(x, expected)
    assert torch.equal(residual, total)


def test_heads_of_a_fused_projection_are_normalised_in_place(
    dtype, capability, surround, assert_surrounded, assert_near
):
    heads, weight = torch.randn(7, 5, 18).to(dtype), torch.randn(18)
    placed = surround(heads)
    config = choose_rms_norm(18, capability)
    launch_rms_norm(placed, weight.to(placed.device), 1e-5, placed, config)
    assert_near(placed.cpu(), rms_norm_reference(heads, weight, 1e-5))
    assert_surrounded(placed)


def test_one_row_without_tokens_is_normalised(capability, device, assert_near):
    x, weight, out = torch.randn(33), torch.randn(33), torch.empty(33, device=device)
    launch_rms_norm(x.to(device), weight.to(device), 1e-5, out, choose_rms_norm(33, capability))
    assert_near(out.cpu(), rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("hidden", [100, 577])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(hidden, dtype, capability, device):
    x = torch.randn(19, hidden).to(dtype).to(device)
    weight, config = torch.randn(hidden).to(device), choose_rms_norm(hidden, capability)
    whole = torch.empty_like(x)
    launch_rms_norm(x, weight, 1e-5, whole, config)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 19)):
        part = torch.empty_like(x[rows])
        launch_rms_norm(x[rows], weight, 1e-5, part, config)
        assert torch.equal(part, whole[rows])
