import pytest
import torch

from octavo_kernels import layer_norm_reference
from octavo_kernels._launch import choose_rms_norm, rms_norm_configs
from octavo_kernels._triton.layer_norm import launch_layer_norm


def draw(*shape, dtype):
    x = (torch.randn(*shape) + 2).to(dtype)
    return x, torch.randn(shape[-1]), torch.randn(shape[-1])


@pytest.mark.parametrize("shape", [(1, 1), (7, 100), (5, 256), (3, 577), (7, 5, 18)])
def test_layer_norm_agrees_with_reference(
    shape, dtype, capability, surround, assert_surrounded, assert_near
):
    x, weight, bias = draw(*shape, dtype=dtype)
    out = surround(torch.zeros_like(x))
    tensors = (surround(x), weight.to(out.device), bias.to(out.device), out)
    launch_layer_norm(tensors, 1e-5, choose_rms_norm(shape[-1], capability))
    assert_near(out.cpu(), layer_norm_reference(x, weight, bias, 1e-5))
    assert_surrounded(out)


def test_every_configuration_agrees_on_its_longest_rows(capability, device, assert_near):
    for config in rms_norm_configs(capability):
        x, weight, bias = draw(config.block_rows + 1, config.block_size, dtype=torch.float32)
        out = torch.empty_like(x, device=device)
        launch_layer_norm((*(t.to(device) for t in (x, weight, bias)), out), 1e-5, config)
        assert_near(out.cpu(), layer_norm_reference(x, weight, bias, 1e-5))


def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype, capability, device):
    x, weight, bias = (tensor.to(device) for tensor in draw(19, 577, dtype=dtype))
    config, whole = choose_rms_norm(577, capability), torch.empty_like(x)
    launch_layer_norm((x, weight, bias, whole), 1e-5, config)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 19)):
        part = torch.empty_like(x[rows])
        launch_layer_norm((x[rows], weight, bias, part), 1e-5, config)
        assert torch.equal(part, whole[rows])
