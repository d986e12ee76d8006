"""A row's bits do not depend on the rows beside it, whichever function a module calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.model.row_independence import (
    CallRecorder,
    RowIndependence,
    make_rows_independent,
)

ROWS = ((0, 1), (5, 6), (1, 3), (3, 150), (10, 131))
FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "sharp softplus": lambda x: F.softplus(x, beta=2.0, threshold=3.0),
    "mish": F.mish,
}
WEIGHT = torch.randn(50, 53, generator=torch.Generator().manual_seed(1))
PRODUCTS = {
    "linear": lambda x: F.linear(x, WEIGHT),
    "linear with bias": lambda x: F.linear(x, WEIGHT, WEIGHT[:, 0].contiguous()),
    "matmul": lambda x: x @ WEIGHT.t().contiguous(),
    "method": lambda x: x.matmul(WEIGHT.t()),
    "addmm": lambda x: torch.addmm(WEIGHT[:, 0], x[0], WEIGHT.t())[None],
    "of each": lambda x: torch.bmm(x, WEIGHT.t()[None]),
}


@pytest.fixture
def rows():
    """[1, 200, 106] float32, of numbers small and large."""
    return 4 * torch.randn(1, 200, 106, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("is_view", [False, True], ids=["rows", "half rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_activation_gives_a_row_the_same_bits_beside_any_others(name, is_view, dtype, rows):
    rows, function = rows.to(dtype), FUNCTIONS[name]

    def call(first: int, last: int) -> torch.Tensor:
        part = rows[:, first:last].contiguous()
        with RowIndependence():
            return function(part.chunk(2, dim=-1)[0] if is_view else part)

    whole = call(0, 200)
    assert all(torch.equal(call(*part), whole[:, slice(*part)]) for part in ROWS)
    expected = function(rows[..., : whole.shape[-1]].float())
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(whole.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_gives_a_row_the_same_bits_beside_any_others(name, rows):
    rows, function = rows[..., :53].contiguous(), PRODUCTS[name]
    with RowIndependence():
        whole = function(rows)
        for first, last in ROWS:
            assert torch.equal(function(rows[:, first:last]), whole[:, first:last])
    torch.testing.assert_close(whole, function(rows), rtol=1e-4, atol=1e-4)


def test_an_outer_product_is_left_as_it_is():
    column, row = torch.randn(2, 7, 1), torch.randn(2, 1, 9)
    with RowIndependence():
        assert torch.equal(column @ row, column * row)


class Gate(torch.nn.Module):
    """Calls a function that depends on rows, beside a layer that does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(53, 7)
        self.norm = torch.nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.norm(self.up(x)))


def test_a_trace_finds_who_calls_such_functions_and_who_is_called_first(rows):
    model = torch.nn.Sequential(Gate(), torch.nn.Tanh())
    recorder = CallRecorder(model)
    with recorder:
        model(rows[..., :53])
    assert recorder.row_dependent == {"0", "0.up"}
    assert recorder.called_first == ["0", "1"]


def test_modules_that_were_found_are_independent_from_then_on(rows):
    model, rows = torch.nn.Sequential(Gate(), torch.nn.Tanh()), rows[..., :53].contiguous()
    expected = model(rows)
    make_rows_independent(model, ["0"])
    whole = model(rows)
    for first, last in ROWS:
        assert torch.equal(model(rows[:, first:last]), whole[:, first:last])
    torch.testing.assert_close(whole, expected)
