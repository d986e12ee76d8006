"""Heads that are normalised as one are so over ranks too, and a row's bits stay its own."""

import pytest
import torch

from octavo.model.head_norms import DividedHeadNorms, JointHeadNorms, OwnHeadNorms
from octavo.model.norms import LayerNorm, RmsNorm

HEAD_DIM, EPS = 21, 1e-6
#: (query heads, KV heads) of each of three ranks; the last two have the same KV head.
PARTS = [
    (range(4), range(1), True),
    (range(4, 7), range(1, 2), True),
    (range(7, 8), range(1, 2), False),
]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def ranks():
    """Return the norms of three ranks, and of one that has all heads."""
    q_weight, k_weight = random(8, HEAD_DIM, seed=1), random(2, HEAD_DIM, seed=2)
    sizes = torch.tensor([8.0, 2.0]) * HEAD_DIM
    divided = [
        DividedHeadNorms(q_weight[own], k_weight[own_kv], EPS, sizes, counts_keys=counts)
        for own, own_kv, counts in (
            (slice(q.start, q.stop), slice(k.start, k.stop), c) for q, k, c in PARTS
        )
    ]
    return divided, JointHeadNorms(
        RmsNorm(q_weight.flatten(), EPS), RmsNorm(k_weight.flatten(), EPS)
    )


def normalize(divided, q, k):
    """Return what each rank makes of its heads; sums are those of all three."""
    parts = [(q[:, own.start : own.stop], k[:, kv.start : kv.stop]) for own, kv, _ in PARTS]
    sums = []
    for norms, part in zip(divided, parts, strict=True):
        norms(*part, lambda squares: sums.append(squares.clone()))
    total = sum(sums)
    return [
        norms(*part, lambda squares: squares.copy_(total))
        for norms, part in zip(divided, parts, strict=True)
    ]


def test_ranks_normalise_their_heads_as_one_rank_does(ranks):
    divided, joint = ranks
    q, k = random(5, 8, HEAD_DIM), random(5, 2, HEAD_DIM, seed=3)
    expected = joint(q, k, lambda squares: None)
    for (own, own_kv, _), found in zip(PARTS, normalize(divided, q, k), strict=True):
        torch.testing.assert_close(found[0], expected[0][:, own.start : own.stop])
        torch.testing.assert_close(found[1], expected[1][:, own_kv.start : own_kv.stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_many(ranks, dtype):
    q, k = random(300, 8, HEAD_DIM).to(dtype), random(300, 2, HEAD_DIM, seed=3).to(dtype)
    together = normalize(ranks[0], q, k)
    for row in (0, 7, 299):
        alone = normalize(ranks[0], q[row : row + 1], k[row : row + 1])
        for found, expected in zip(alone, together, strict=True):
            assert torch.equal(found[0][0], expected[0][row])
            assert torch.equal(found[1][0], expected[1][row])


def test_heads_with_weights_of_their_own_are_rounded_once():
    q_weight, k_weight = random(3, HEAD_DIM, seed=1), random(1, HEAD_DIM, seed=2)
    plain = LayerNorm(torch.ones(HEAD_DIM), torch.zeros(HEAD_DIM), EPS)
    q, k = random(5, 3, HEAD_DIM).bfloat16(), random(5, 1, HEAD_DIM, seed=3).bfloat16()
    found = OwnHeadNorms(plain, q_weight, k_weight)(q, k, lambda squares: None)
    for heads, weight, result in ((q, q_weight, found[0]), (k, k_weight, found[1])):
        exact = torch.stack(
            [
                torch.nn.functional.layer_norm(
                    heads[:, index].double(), (HEAD_DIM,), weight[index].double(), eps=EPS
                )
                for index in range(len(weight))
            ],
            1,
        )
        assert torch.equal(result, exact.bfloat16())
