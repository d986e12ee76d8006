"""What adapters add to a linear layer, by native code and where that does not serve."""

import pytest
import torch

from octavo.model.adapted_rows import AdaptedRows
from octavo.model.layers import PackedLinear
from octavo.model.lora import LowRank

INPUTS, OUTPUTS, RANKS = 13, 22, [3, 0, 5]
# Of slot 0 row 4, of slot 1 row 3, of slot 2 rows 0 and 2; row 1 has no adapter.
ADAPTED = AdaptedRows(torch.tensor([4, 3, 0, 2]), torch.tensor([0, 1, 2, 4]))


@pytest.mark.parametrize("is_native", [True, False])
def test_each_row_gets_what_its_own_adapter_adds_of_whatever_rank(is_native):
    torch.manual_seed(3)
    linear = PackedLinear(torch.randn(OUTPUTS, INPUTS))
    if not is_native:
        linear.native = None
    low_rank = LowRank(linear, len(RANKS), max(RANKS), torch.device("cpu"))
    pairs = [(torch.randn(rank, INPUTS), torch.randn(OUTPUTS, rank)) for rank in RANKS]
    for _ in range(2):  # a slot may be filled again
        for slot, pair in enumerate(reversed(pairs)):
            low_rank.fill(slot, *pair)
        for slot, pair in enumerate(pairs):
            low_rank.fill(slot, *pair)
    x, product = torch.randn(5, INPUTS), torch.randn(5, OUTPUTS)
    expected = product.clone()
    for row, (down, up) in {4: pairs[0], 0: pairs[2], 2: pairs[2]}.items():
        expected[row] += x[row] @ down.T @ up.T
    before = product.clone()
    low_rank.add_(product, x, ADAPTED)
    torch.testing.assert_close(product, expected)
    assert torch.equal(product[[1, 3]], before[[1, 3]])
