"""Rows that lie more than 2**31 elements apart are read and written where they are."""

import pytest
import torch

from octavo_kernels import (
    add_rms_norm_reference,
    apply_rope_reference,
    rms_norm_reference,
    silu_and_mul_reference,
)
from octavo_kernels._launch import choose_apply_rope, choose_gated, choose_rms_norm
from octavo_kernels._triton.apply_rope import launch_apply_rope
from octavo_kernels._triton.gated import launch_gated
from octavo_kernels._triton.rms_norm import launch_add_rms_norm, launch_rms_norm
from octavo_kernels._triton.rope_and_write_kv_cache import launch_rope_and_write_kv_cache


@pytest.fixture
def place_apart(device):
    """Place three rows 2**30 elements apart; of the memory between, nothing is ever touched."""

    def place(rows: torch.Tensor) -> torch.Tensor:
        stride = 2**30
        memory = torch.empty(2 * stride + rows[0].numel(), dtype=rows.dtype, device=device)
        view = memory.as_strided(rows.shape, (stride, *rows.stride()[1:]))
        return view.copy_(rows)

    return place


def test_norms(place_apart, capability, device, assert_near):
    x, weight = torch.randn(3, 40).half(), torch.ones(40)
    config, zeros = choose_rms_norm(40, capability), torch.zeros_like(x)
    placed, scale = place_apart(x), weight.to(device)
    launch_rms_norm(placed, scale, 1e-5, placed, config)
    assert_near(placed.cpu(), rms_norm_reference(x, weight, 1e-5))
    placed, carried = place_apart(x), place_apart(zeros)
    launch_add_rms_norm((placed, carried, scale, placed, carried), 1e-5, config)
    normed, total = add_rms_norm_reference(x, zeros, weight, 1e-5)
    assert_near(placed.cpu(), normed)
    assert_near(carried.cpu(), total)


def test_gated_activations(place_apart, capability, assert_near):
    gate_up = torch.randn(3, 80).half()
    out = place_apart(torch.zeros(3, 40).half())
    launch_gated("silu_and_mul", place_apart(gate_up), out, choose_gated(capability))
    assert_near(out.cpu(), silu_and_mul_reference(gate_up))


def test_rope(place_apart, capability, device, assert_near):
    q, k, table = torch.randn(3, 2, 8).half(), torch.randn(3, 1, 8).half(), torch.randn(5, 8)
    placed, positions = (place_apart(q), place_apart(k)), torch.arange(3)
    config = choose_apply_rope(4, capability)
    tensors, on_device = (*placed, *placed), (positions.to(device), table.to(device))
    launch_apply_rope(tensors, *on_device, config, interleaved=False)
    expected = apply_rope_reference(q, k, positions, table)
    assert_near(placed[0].cpu(), expected[0])
    assert_near(placed[1].cpu(), expected[1])


def test_rope_and_cache(place_apart, capability, device, assert_near):
    q, k, v = torch.randn(3, 2, 8).half(), torch.randn(3, 1, 8).half(), torch.randn(3, 1, 8).half()
    table, positions = torch.randn(4, 8), torch.arange(3)
    tensors = tuple(place_apart(x) for x in (q, k, v, torch.zeros_like(q)))
    layer = tuple(place_apart(torch.zeros(3, 1, 4, 8).half()) for _ in range(2))
    slots = torch.tensor([9, 0, 7], device=device)
    launch_rope_and_write_kv_cache(
        *(tensors, layer, positions.to(device), table.to(device), slots),
        choose_apply_rope(4, capability),
        interleaved=False,
    )
    expected = apply_rope_reference(q, k, positions, table)
    assert_near(tensors[3].cpu(), expected[0])
    keys, values = (x.flatten(0, 2).cpu()[slots.cpu()] for x in layer)
    assert_near(keys, expected[1][:, 0])
    assert torch.equal(values, v[:, 0])
