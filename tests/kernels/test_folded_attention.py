"""Folding the decoding rows of all sequences into one product changes no bit of the reference."""

import pytest
import torch

from octavo_kernels import KVCacheShape
from octavo_kernels.folded_attention import FoldedAttention, agree, make_folded_attention
from octavo_kernels.reference_attention import ReferenceAttention

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        make_folded_attention(KVCacheShape(1, 1, 16, 16, torch.float32)) is None,
        reason="products on this machine depend on how many there are, so nothing is folded",
    ),
]


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [(3, 64, 16), (4, 33, 8), (9, 80, 256), (1, 128, 5), (8, 256, 64), (16, 32, 32), (17, 16, 16)],
)
def test_decoding_has_the_bits_of_the_reference(make_batch, dtype, group, head_dim, block_size):
    lens = [1, 700, 129, 128, 64, 300, 5]
    batch = make_batch(lens, kv_heads=2, group=group, head_dim=head_dim, dtype=dtype)
    options = {"query_lens": [1, 1, 1, 1, 2, 1, 5], "block_size": block_size}
    sinks = torch.randn(batch.q_heads)
    for extra in ({}, {"window": 131}, {"soft_cap": 3.0, "sinks": sinks, "window": 40}):
        folded = batch.attend("folded", **options, **extra)
        reference = batch.attend("plain", **options, **extra)
        assert all(torch.equal(a, b) for a, b in zip(folded, reference, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 21])
def test_any_number_of_sequences_on_any_threads_has_the_bits_of_the_reference(
    make_batch, dtype, threads, count
):
    batch = make_batch([9 * i + 120 for i in range(count)], dtype=dtype)
    rows = [1] * count
    folded, reference = (batch.attend(name, query_lens=rows) for name in ("folded", "plain"))
    assert all(torch.equal(a, b) for a, b in zip(folded, reference, strict=True))


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_what_was_tried_out_at_load_holds_for_this_shape(dtype, kv_heads):
    assert isinstance(
        make_folded_attention(KVCacheShape(2, kv_heads, 64, 16, dtype)), FoldedAttention
    )


def test_products_whose_bits_depend_on_their_number_are_noticed():
    class Careless(FoldedAttention):
        def paged_attention(self, q, *arguments, **options):
            out = super().paged_attention(q, *arguments, **options)
            return out * (1 + 2**-20 * (len(q) > 1))

    shape, cpu = KVCacheShape(1, 1, 16, 16, torch.float32), torch.device("cpu")
    reference = ReferenceAttention(shape, cpu)
    assert not agree(Careless(shape, cpu), reference, 4)
    assert agree(reference, reference, 4)
