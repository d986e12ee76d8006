import math
import os
from dataclasses import dataclass, replace

import pytest
import torch

from octavo_kernels import AttentionMetadata, KVCacheShape
from octavo_kernels._attention_launch import AttentionConfig, choose_attention
from octavo_kernels.triton_attention import TritonAttention

SMALL = AttentionConfig(rows=16, tile=16, split=32, num_warps=4, num_stages=2)
# With one multiprocessor a program takes all splits of its rows; with many, one split.
IN_REGISTERS, THROUGH_MEMORY = 1, 100_000

# a prefill chunk that crosses splits, a decode past one, a first token
LENS, ROWS = [40, 65, 1], [12, 1, 1]

# (absolute, relative) allowed against float64. Weights and results are rounded once each.
_TOLERANCES = {
    torch.float32: (2e-6, 2e-5),
    torch.float16: (1e-3, 2**-9),
    torch.bfloat16: (8e-3, 2**-6),
}


# Products of bfloat16 are wrong in the interpreter.
_IN_INTERPRETER = [torch.float32, torch.float16]
_ON_GPU = [*_IN_INTERPRETER, torch.bfloat16]
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=_IN_INTERPRETER if _IS_INTERPRETED else _ON_GPU, ids=str)
def dtype(request):
    return request.param


@dataclass(frozen=True)
class Step:
    """Sequences, of each of which the last rows attend, over a cache of poisoned memory."""

    q: tuple[torch.Tensor, ...]
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    rows: tuple[int, ...]
    device: torch.device
    config: AttentionConfig = SMALL
    num_processors: int = IN_REGISTERS
    block_size: int = 8
    poison: float = math.nan
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None

    def alone(self, index: int, length: int, rows: int) -> "Step":
        """Return the step of one sequence, cut to `length` tokens, whose last rows attend."""
        cut = {name: (getattr(self, name)[index][:length],) for name in "qkv"}
        return replace(self, rows=(rows,), **cut)

    def attend(self) -> list[torch.Tensor]:
        """Return each sequence's rows; blocks that none of them sees are gone from the table."""
        _, kv_heads, head_dim = self.k[0].shape
        shape = KVCacheShape(2, kv_heads, head_dim, self.block_size, self.q[0].dtype)
        backend = TritonAttention(shape, self.device, self.config, self.num_processors)
        lens = [len(k) for k in self.k]
        counts = [-(-n // self.block_size) for n in lens]
        cache = backend.allocate(sum(counts) + 2)
        cache.storage.fill_(self.poison)
        blocks = torch.randperm(sum(counts) + 2).split([*counts, 2])
        tables = torch.full((len(lens), max(counts) + 1), -123)
        slots = []
        for table, own, length, rows in zip(tables, blocks[:-1], lens, self.rows, strict=True):
            table[: len(own)] = own
            at = torch.arange(length)
            slots.append(table[at // self.block_size] * self.block_size + at % self.block_size)
            if self.window is not None:
                table[: max(0, length - rows - self.window + 1) // self.block_size] = -1
        metadata = AttentionMetadata(
            torch.tensor([0, *self.rows]).cumsum(0).int().to(self.device),
            torch.tensor(lens).int().to(self.device),
            tables.int().to(self.device),
            torch.cat(slots).to(self.device),
            max(self.rows),
            max(lens),
        )
        k, v = (torch.cat(x).to(self.device) for x in (self.k, self.v))
        backend.write_kv_cache(k, v, cache, 1, metadata.slot_mapping)
        q = torch.cat([q[len(q) - rows :] for q, rows in zip(self.q, self.rows, strict=True)])
        sinks = None if self.sinks is None else self.sinks.to(self.device)
        out = backend.paged_attention(
            *(q.to(self.device), cache, 1, metadata),
            scale=head_dim**-0.5,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=sinks,
        )
        return list(out.cpu().split(self.rows))

    def expected(self) -> list[torch.Tensor]:
        """Return the same by a dense softmax in float64."""
        results = []
        for q, k, v, rows in zip(self.q, self.k, self.v, self.rows, strict=True):
            k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[len(q) - rows :].double(), k)
            scores *= q.shape[-1] ** -0.5
            if self.soft_cap is not None:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            own, at = torch.arange(len(k) - rows, len(k))[:, None], torch.arange(len(k))
            seen = (at <= own) & (at > own - (self.window or len(k)))
            scores = scores.masked_fill(~seen, -math.inf)
            if self.sinks is not None:
                sinks = self.sinks.double()[:, None, None].expand(-1, rows, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(-1)[..., : len(k)]
            results.append(torch.einsum("hqk,khd->qhd", weights, v))
        return results


@pytest.fixture
def make_step(device):
    def make(
        lens=LENS, rows=ROWS, *, kv_heads=1, group=3, head_dim=16, dtype=torch.float32, **options
    ) -> Step:
        def draw(heads: int) -> tuple[torch.Tensor, ...]:
            return tuple(torch.randn(n, heads, head_dim).to(dtype) for n in lens)

        q, k, v = draw(kv_heads * group), draw(kv_heads), draw(kv_heads)
        return Step(q, k, v, tuple(rows), device, **options)

    return make


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 20},
        {"soft_cap": 2.0},
        {"sinks": torch.tensor([-1.0, 0.0, 3.0])},
        {"window": 1, "soft_cap": 3.0, "sinks": torch.ones(3), "num_processors": 20},
        {"group": 1, "kv_heads": 2, "block_size": 16},
        {"group": 4, "block_size": 256, "window": 33},
        {"group": 8, "block_size": 32, "num_processors": THROUGH_MEMORY},
        {"group": 17, "head_dim": 10, "block_size": 5},
    ],
    ids=str,
)
def test_it_agrees_with_dense_softmax_in_float64(make_step, dtype, options):
    step = make_step(dtype=dtype, **options)
    absolute, relative = _TOLERANCES[dtype]
    for actual, expected in zip(step.attend(), step.expected(), strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=absolute, rtol=relative)


@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_chosen_configurations_agree_past_their_first_split(make_step, dtype, capability, head_dim):
    config = choose_attention(head_dim, dtype.itemsize, capability)
    if _IS_INTERPRETED:  # slow: a minute for the split that is chosen
        config = replace(config, split=config.tile)
    length = config.split + 9
    step = make_step([length], [1], group=2, head_dim=head_dim, dtype=dtype, block_size=16)
    absolute, relative = _TOLERANCES[dtype]
    (expected,), outs = step.expected(), []
    for num_processors in (IN_REGISTERS, THROUGH_MEMORY):
        (out,) = replace(step, config=config, num_processors=num_processors).attend()
        torch.testing.assert_close(out.double(), expected, atol=absolute, rtol=relative)
        outs.append(out)
    assert torch.equal(*outs)


FEATURES = [{}, {"window": 20, "soft_cap": 2.0, "sinks": torch.arange(3.0)}]


@pytest.fixture(params=FEATURES, ids=["plain", "window, cap and sinks"])
def features(request):
    return request.param


def test_how_splits_are_shared_out_changes_no_bit(make_step, dtype, features):
    step = make_step(dtype=dtype, **features)
    expected = step.attend()
    for num_processors in (20, THROUGH_MEMORY):
        assert_same(replace(step, num_processors=num_processors).attend(), expected)


def test_block_size_changes_no_bit(make_step, dtype, features):
    step = make_step(dtype=dtype, **features)
    expected = step.attend()
    for block_size in (5, 16, 256):
        assert_same(replace(step, block_size=block_size).attend(), expected)


def test_batch_mates_change_no_bit(make_step, dtype, features):
    step = make_step(dtype=dtype, **features)
    for i, together in enumerate(step.attend()):
        assert_same(step.alone(i, LENS[i], ROWS[i]).attend(), [together])


def test_chunks_and_decoding_give_the_bits_of_one_whole_prefill(make_step, dtype, features):
    step = make_step([70], [70], dtype=dtype, **features)
    (whole,) = step.attend()
    step = replace(step, num_processors=THROUGH_MEMORY)
    # Five tokens share a program. In the interpreter a row's bits depend on its place among them,
    # for numpy's products do not treat all rows alike.
    anywhere = [] if _IS_INTERPRETED else [(7, 32), (41, 42), (69, 70)]
    for begin, end in [(0, 7), (5, 32), (40, 41), (65, 70), *anywhere]:
        assert_same(step.alone(0, end, end - begin).attend(), [whole[begin:end]])


@pytest.mark.parametrize("poison", [0.0, math.inf])
def test_what_unused_slots_hold_changes_no_bit(make_step, dtype, features, poison):
    step = make_step(dtype=dtype, **features)
    assert_same(replace(step, poison=poison).attend(), step.attend())


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("spoiled", ["k", "v"])
@pytest.mark.parametrize("spoiler", [math.nan, math.inf])
def test_a_later_token_that_is_not_finite_spoils_no_earlier_row(make_step, spoiled, spoiler):
    step = make_step([40], [40])
    (expected,) = step.attend()
    getattr(step, spoiled)[0][20] = spoiler
    (out,) = step.attend()
    assert torch.equal(out[:20], expected[:20])
    assert bool(out[20:].isnan().all())


def test_rows_of_no_sequence_are_left_alone_and_slices_are_read_in_place(device):
    shape = KVCacheShape(1, 2, 16, 8, torch.float32)
    backend = TritonAttention(shape, device, SMALL, IN_REGISTERS)
    cache = backend.allocate(1)
    fused = torch.randn(6, 8 * 16, device=device)
    q, k, v = (x.view(6, -1, 16) for x in fused.split([64, 32, 32], dim=1))
    wide = torch.full((6, 5, 16), 9.0, device=device)
    metadata = AttentionMetadata(  # as a padded decode step: two sequences of no rows
        torch.tensor([0, 3, 4, 4, 4], dtype=torch.int32, device=device),
        torch.tensor([3, 5, 0, 0], dtype=torch.int32, device=device),
        torch.tensor([[0], [0], [-1], [-1]], dtype=torch.int32, device=device),
        torch.tensor([0, 1, 2, 4, -1, -1], device=device),
        3,
        5,
    )
    backend.write_kv_cache(k, v, cache, 0, metadata.slot_mapping)
    backend.paged_attention(q, cache, 0, metadata, scale=0.25, out=wide[:, 1:])
    assert torch.equal(wide[0, 1:3], v[0, :1].expand(2, 16))
    assert bool((wide[4:] == 9).all())
    assert bool((wide[:, 0] == 9).all())


def test_a_block_outside_the_cache_is_not_read(device):
    shape = KVCacheShape(1, 1, 16, 8, torch.float32)
    backend = TritonAttention(shape, device, SMALL, IN_REGISTERS)
    cache = backend.allocate(2)
    cache.storage.fill_(1.0)
    q = torch.zeros(1, 1, 16, device=device)
    metadata = AttentionMetadata(
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        torch.tensor([40], dtype=torch.int32, device=device),
        torch.tensor([[0, -1, 2, 2**30, 1]], dtype=torch.int32, device=device),
        torch.tensor([-1], device=device),
        1,
        40,
    )
    out = backend.paged_attention(q, cache, 0, metadata, scale=1.0)
    torch.testing.assert_close(out, torch.full_like(out, 0.4))


def test_offsets_past_32_bits_reach_the_right_block(device, monkeypatch):
    shape = KVCacheShape(2, 1, 64, 16, torch.float16)
    backend = TritonAttention(shape, device, SMALL, IN_REGISTERS)
    last = 2**33 // shape.bytes_per_block + 1
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", torch.empty)  # of 8 GB, three blocks are touched
        cache = backend.allocate(last + 1)
    cache.storage[1] = 0.0
    k, v = torch.randn(2, 16, 1, 64, device=device).half()
    outs = []
    for block in (last, 0):
        backend.write_kv_cache(k, v, cache, 1, block * 16 + torch.arange(16, device=device))
        metadata = AttentionMetadata(
            torch.tensor([0, 16], dtype=torch.int32, device=device),
            torch.tensor([16], dtype=torch.int32, device=device),
            torch.tensor([[block]], dtype=torch.int32, device=device),
            torch.zeros(0, dtype=torch.int64, device=device),
            16,
            16,
        )
        outs.append(backend.paged_attention(k, cache, 1, metadata, scale=1.0))
    assert bool(outs[0].any())
    assert torch.equal(*outs)
    assert not cache.storage[1].any()
