"""How a row of logits is read by one program; parts of the kernels that choose tokens."""

import triton
import triton.language as tl


@triton.jit
def find_best(row, vocab, SIZE: tl.constexpr):
    """Return the largest logits of SIZE lanes, that of all, where it is first, and if it is finite.

    Lane i has the logits i, i + SIZE and so on. A row that holds NaN has no finite best.
    """
    lane = tl.arange(0, SIZE)
    best = tl.full([SIZE], float("-inf"), tl.float32)
    place = tl.zeros([SIZE], tl.int32)
    unordered = tl.zeros([SIZE], tl.int32)
    for start in range(0, vocab, SIZE):
        id = start + lane
        x = tl.load(row + id, mask=id < vocab, other=float("-inf"))
        unordered |= (x != x).to(tl.int32)
        place = tl.where(x > best, id, place)
        best = tl.where(x > best, x, best)
    most = tl.max(best, 0)
    first = tl.min(tl.where(best == most, place, vocab), 0)
    finite = (tl.max(unordered, 0) == 0) & (tl.abs(most) < float("inf"))
    return best, most, first, finite
