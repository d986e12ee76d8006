import pytest
import torch

from octavo_kernels import apply_rope, apply_rope_reference

pytestmark = pytest.mark.kernels


def make_table(max_len: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(max_len), 100.0 ** -torch.linspace(0, 1, rotary_dim // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def test_reference_turns_complex_numbers_by_the_angle():
    q, k = torch.randn(2, 6, 2, 10)
    table, positions = make_table(20, 10), torch.tensor([3, 0, 19, 7, 7, 1])
    turned, _ = apply_rope_reference(q, k, positions, table)
    numbers = torch.complex(q[..., :5].double(), q[..., 5:].double())
    turn = torch.complex(table[positions, :5].double(), table[positions, 5:].double())
    expected = numbers * turn[:, None]
    torch.testing.assert_close(
        turned.double(), torch.cat([expected.real, expected.imag], -1), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 129])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 32), (10, 6), (7, 2)])
def test_apply_rope_agrees_with_reference(
    tokens, head_dim, rotary_dim, interleaved, dtype, assert_near
):
    q = torch.randn(tokens, 6, head_dim).to(dtype)
    k = torch.randn(tokens, 2, head_dim).to(dtype)
    positions, table = torch.randint(50, (tokens,)), make_table(50, rotary_dim)
    expected = apply_rope_reference(q, k, positions, table, interleaved=interleaved)
    actual = apply_rope(q, k, positions, table, interleaved=interleaved)
    assert_near(actual[0], expected[0])
    assert_near(actual[1], expected[1])
    assert torch.equal(actual[0][..., rotary_dim:], q[..., rotary_dim:])


@pytest.mark.parametrize("rope", [apply_rope, apply_rope_reference])
@pytest.mark.parametrize("rotary_dim", [16, 12, 2])
def test_interleaved_pairs_turn_as_halves_do_to_the_bit(rope, rotary_dim, dtype):
    q, k = torch.randn(5, 6, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    positions, table = torch.arange(5), make_table(8, rotary_dim)
    order = torch.cat(
        [torch.arange(rotary_dim).view(-1, 2).T.flatten(), torch.arange(rotary_dim, 16)]
    )
    expected = rope(q[..., order], k[..., order], positions, table)
    actual = rope(q, k, positions, table, interleaved=True)
    assert torch.equal(actual[0][..., order], expected[0])
    assert torch.equal(actual[1][..., order], expected[1])


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_slices_of_a_fused_projection_turn_in_place(interleaved, dtype):
    fused = torch.randn(5, 10 * 16).to(dtype)
    q, k, v = fused.split([96, 32, 32], dim=1)
    q, k, before = q.view(5, 6, 16), k.view(5, 2, 16), v.clone()
    positions, table = torch.arange(5), make_table(8, 12)
    expected = apply_rope(q.clone(), k.clone(), positions, table, interleaved=interleaved)
    actual = apply_rope(q, k, positions, table, q_out=q, k_out=k, interleaved=interleaved)
    assert actual == (q, k)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert torch.equal(v, before)


def test_out_is_filled_and_returned(dtype, make_poisoned):
    q, k = torch.randn(5, 6, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    positions, table = torch.arange(5), make_table(8, 12)
    q_out, k_out = make_poisoned(5, 6, 16, dtype=dtype), make_poisoned(5, 2, 16, dtype=dtype)
    apply_rope(q, k, positions, table, q_out=q_out, k_out=k_out)
    expected = apply_rope(q, k, positions, table)
    assert torch.equal(q_out, expected[0])
    assert torch.equal(k_out, expected[1])


@pytest.mark.parametrize("position", [-1, 8])
def test_a_position_outside_the_table_is_refused(position, dtype):
    q = torch.ones(2, 1, 4, dtype=dtype)
    with pytest.raises(IndexError, match=f"position {position} is outside the 8 of cos_sin"):
        apply_rope(q, q.clone(), torch.tensor([0, position]), make_table(8, 4))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.ones(3, 1, 4)}, r"k has shape \[3, 1, 4\] but must be \[2, any, 4\]"),
        ({"k": torch.ones(2, 1, 4).half()}, "k is torch.float16 on cpu but must be torch.float32"),
        ({"positions": torch.ones(2).int()}, "positions is torch.int32 but must be torch.int64"),
        ({"positions": torch.ones(2, device="meta").long()}, "positions is on meta but must be on"),
        ({"cos_sin": torch.ones(8, 4, device="meta")}, "cos_sin is on meta but must be on cpu"),
        ({"cos_sin": torch.ones(8, 3)}, "cos_sin has 3 columns but must have an even number"),
        ({"cos_sin": torch.ones(8, 6)}, "at most head_dim 4"),
        ({"q": torch.ones(2, 4, 4).transpose(1, 2)}, "q has strides"),
    ],
)
def test_wrong_arguments_are_refused(changed, message):
    arguments = {
        "q": torch.ones(2, 3, 4),
        "k": torch.ones(2, 1, 4),
        "positions": torch.zeros(2, dtype=torch.int64),
        "cos_sin": torch.ones(8, 4),
    }
    with pytest.raises(ValueError, match=message):
        apply_rope(**(arguments | changed))
