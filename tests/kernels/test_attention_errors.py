"""How far attention on the CPU may be from softmax in float64, for each dtype and backend."""

import pytest
import torch

pytestmark = pytest.mark.kernels

# The length of a row's error over the length of the row.
BOUNDS = {
    torch.float32: 4e-6,  # sums of up to 700 terms, and e^x by about one unit in the last place
    torch.float16: 2**-11,  # the one rounding of the result: half of 2^-10
    torch.bfloat16: 2**-8,  # the one rounding of the result: half of 2^-7
}
# Its instruction multiplies bfloat16 alone: each weight of the softmax is rounded as well.
BOUND_OF_ROUNDED_WEIGHTS = 2**-7

# A prefill chunk, decoding, two rows after a long prefix, a first token, one whole tile.
LENS, QUERY_LENS = [150, 65, 333, 1, 64, 700], [77, 1, 2, 1, 64, 1]


def bound_of(backend_name: str, dtype: torch.dtype) -> float:
    if (backend_name, dtype) == ("avx512-bf16", torch.bfloat16):
        return BOUND_OF_ROUNDED_WEIGHTS
    return BOUNDS[dtype]


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [
        (1, 128, 8),
        (2, 32, 256),
        (3, 64, 16),
        (4, 128, 32),
        (5, 96, 16),
        (6, 80, 128),
        (7, 64, 64),
        (8, 256, 32),
        (9, 192, 16),
    ],
)
def test_rows_are_as_near_to_softmax_in_float64_as_their_dtype_allows(
    make_batch, dense_attention, any_backend_name, dtype, group, head_dim, block_size
):
    batch = make_batch(LENS, kv_heads=2, group=group, head_dim=head_dim, dtype=dtype)
    sinks = 2 * torch.randn(batch.q_heads)
    for options in (
        {},
        {"window": 50},
        {"soft_cap": 3.0},
        {"window": 200, "soft_cap": 30.0, "sinks": sinks},
    ):
        outs = batch.attend(
            any_backend_name, query_lens=QUERY_LENS, block_size=block_size, **options
        )
        for out, rows, q, k, v in zip(outs, QUERY_LENS, batch.q, batch.k, batch.v, strict=True):
            exact = dense_attention(q[-rows:], k, v, **options)
            error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
            assert float(error.max()) < bound_of(any_backend_name, dtype)
