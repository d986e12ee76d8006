import pytest
import torch

from octavo_kernels import apply_rope_reference
from octavo_kernels._launch import choose_apply_rope
from octavo_kernels._triton.apply_rope import launch_apply_rope

pytestmark = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def make_table(max_len: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(max_len), 100.0 ** -torch.linspace(0, 1, rotary_dim // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@pytest.mark.parametrize(
    ("tokens", "q_heads", "k_heads", "head_dim", "rotary_dim"),
    [
        (0, 2, 1, 8, 8),
        (1, 1, 1, 64, 64),
        (5, 17, 3, 128, 32),
        (3, 9, 2, 10, 6),
        (2, 5, 5, 200, 130),
    ],
)
def test_it_agrees_with_reference(
    tokens,
    q_heads,
    k_heads,
    head_dim,
    rotary_dim,
    interleaved,
    dtype,
    capability,
    surround,
    assert_surrounded,
    assert_near,
):
    q = torch.randn(tokens, q_heads, head_dim).to(dtype)
    k = torch.randn(tokens, k_heads, head_dim).to(dtype)
    positions, table = torch.randint(50, (tokens,)), make_table(50, rotary_dim)
    outs = surround(torch.zeros_like(q)), surround(torch.zeros_like(k), 1, 9)
    device, config = outs[0].device, choose_apply_rope(rotary_dim // 2, capability)
    launch_apply_rope(
        (surround(q, 6), surround(k), *outs),
        positions.to(device),
        table.to(device),
        config,
        interleaved=interleaved,
    )
    expected = apply_rope_reference(q, k, positions, table, interleaved=interleaved)
    for out, reference in zip(outs, expected, strict=True):
        assert_near(out.cpu(), reference)
        assert_surrounded(out)


def test_slices_of_a_fused_projection_turn_in_place(interleaved, dtype, capability, device):
    fused = torch.randn(5, 10 * 16).to(dtype).to(device)
    q, k, v = fused.split([96, 32, 32], dim=1)
    q, k, before = q.view(5, 6, 16), k.view(5, 2, 16), v.clone()
    positions, table = torch.arange(5, device=device), make_table(8, 12).to(device)
    config, expected = choose_apply_rope(6, capability), [torch.empty_like(q), torch.empty_like(k)]
    launch_apply_rope((q, k, *expected), positions, table, config, interleaved=interleaved)
    launch_apply_rope((q, k, q, k), positions, table, config, interleaved=interleaved)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert torch.equal(v, before)


@pytest.mark.parametrize("position", [-1, 8, 2**40])
def test_a_row_whose_position_is_outside_the_table_is_nan_and_no_other(
    interleaved, position, capability, device
):
    q, k = torch.ones(2, 1, 4, device=device), torch.ones(2, 1, 4, device=device)
    positions = torch.tensor([position, 0], device=device)
    config = choose_apply_rope(2, capability)
    table = make_table(8, 4).to(device)
    launch_apply_rope((q, k, q, k), positions, table, config, interleaved=interleaved)
    assert q.isnan().flatten(1).all(1).tolist() == [True, False]
    assert k.isnan().flatten(1).any(1).tolist() == [True, False]
