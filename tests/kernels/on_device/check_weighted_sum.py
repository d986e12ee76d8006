import pytest
import torch

from octavo_kernels import weighted_sum_reference
from octavo_kernels._launch import PiecesConfig
from octavo_kernels._triton.weighted_sum import launch_weighted_sum

SMALL = PiecesConfig(block_size=16, num_warps=1)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize(("tokens", "count", "size"), [(0, 2, 8), (1, 1, 1), (5, 3, 33)])
def test_it_agrees_with_the_reference_and_touches_nothing_around(
    tokens, count, size, dtype, device, surround, assert_surrounded, assert_near
):
    rows = torch.randn(tokens * count, size).to(dtype)
    places, weights = torch.randperm(tokens * count).view(tokens, count), torch.rand(tokens, count)
    out = surround(torch.zeros(tokens, size, dtype=dtype))
    launch_weighted_sum(surround(rows), places.to(device), weights.to(device), out, SMALL)
    assert_near(out.cpu(), weighted_sum_reference(rows, places, weights))
    assert_surrounded(out)


def test_a_place_outside_counts_as_a_row_of_zeros(device, surround, assert_near):
    rows, places = surround(torch.ones(3, 4)), torch.tensor([[0, -1], [2, 3]], device=device)
    out = torch.empty(2, 4, device=device)
    launch_weighted_sum(rows, places, torch.full((2, 2), 0.5, device=device), out, SMALL)
    assert_near(out.cpu(), torch.full((2, 4), 0.5))
