"""Objects shared by the kernel tests: tolerances, paged caches with poisoned memory, batches."""

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from octavo_kernels import (
    AttentionBackend,
    AttentionMetadata,
    KVCache,
    KVCacheShape,
    make_attention_backend,
)
from octavo_kernels._native import library
from octavo_kernels._native.library import load_library, native_library
from octavo_kernels._native.processor import usable_instruction_sets
from octavo_kernels.folded_attention import FoldedAttention, make_folded_attention
from octavo_kernels.native_attention import NativeAttention
from octavo_kernels.numba_attention import NumbaAttention
from octavo_kernels.reference_attention import ReferenceAttention

CPU = torch.device("cpu")

# (absolute, relative) allowed between a kernel and its reference, both float32 inside.
_TOLERANCES = {
    # The order of sums differs, and e^x by about one unit in the last place.
    torch.float32: (2e-6, 2e-5),
    # One rounding of the result, which may fall either way: half of 2^-8 relative. Attention also
    # rounds its weights to bfloat16; near zero, where terms cancel, that error is absolute.
    torch.bfloat16: (4e-3, 2**-7),
    # One rounding of the result, which may fall either way: half of 2^-10 relative.
    torch.float16: (1e-5, 2**-10),
}


@pytest.fixture
def assert_near():
    """Compare a result with its reference by the table above."""

    def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
        absolute, relative = _TOLERANCES[actual.dtype]
        torch.testing.assert_close(actual, expected, atol=absolute, rtol=relative)

    return compare


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def one_thread_and_one_seed() -> Iterator[None]:
    """Start each test alike, on one thread: a team is slow where other processes are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2])
def threads(request, one_thread_and_one_seed) -> int:
    torch.set_num_threads(request.param)
    return request.param


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


@pytest.fixture
def make_poisoned():
    return poisoned


def _make_backend(name: str, shape: KVCacheShape) -> AttentionBackend:
    if name == "plain":
        return ReferenceAttention(shape, CPU)
    if name == "folded":
        return FoldedAttention(shape, CPU)
    if name == "numba":
        return NumbaAttention(shape, CPU)
    if name == "fast":
        return make_attention_backend(shape, CPU)
    return NativeAttention(shape, _INSTRUCTION_SETS[name])


# Empty where this machine's products are such that the reference serves instead.
_FOLDED = ["folded"] if make_folded_attention(KVCacheShape(1, 1, 16, 16, torch.float32)) else []
_WITHOUT_COMPILER = [*_FOLDED, *(["numba"] if importlib.util.find_spec("numba") else [])]
# None where native code cannot be had: then "fast" is another.
_INSTRUCTION_SETS = {x.name: x for x in usable_instruction_sets() if native_library() is not None}


@pytest.fixture(params=_INSTRUCTION_SETS or [pytest.param("fast", id="none")])
def native_name(request) -> str:
    """Name each version of the native code that this machine can run."""
    return request.param


@pytest.fixture
def each_instruction_set(native_name, monkeypatch) -> None:
    """Let operations run each version of the native code that this machine can run."""
    if native_name in _INSTRUCTION_SETS:
        chosen = load_library(_INSTRUCTION_SETS[native_name])
        monkeypatch.setattr(library, "native_library", lambda: chosen)


@pytest.fixture
def surround():
    """Place rows in the middle of NaN: whoever reads outside them is found."""

    def place(rows: torch.Tensor) -> torch.Tensor:
        """Return a view equal to rows [n, width], in a larger tensor of NaN."""
        count, width = rows.shape
        whole = poisoned(count + 2, width + 8, dtype=rows.dtype)
        whole[1:-1, 3:-5] = rows
        return whole[1:-1, 3:-5]

    return place


@pytest.fixture(params=["plain", *_WITHOUT_COMPILER, *(_INSTRUCTION_SETS or ["fast"])])
def any_backend_name(request) -> str:
    """Name the reference, and each other backend of the CPU that this machine can run."""
    return request.param


@pytest.fixture(params=["fast", "plain", *_WITHOUT_COMPILER])
def backend_name(request) -> str:
    return request.param


@pytest.fixture
def make_backend(backend_name):
    def make(shape: KVCacheShape) -> AttentionBackend:
        return _make_backend(backend_name, shape)

    return make


@pytest.fixture
def make_any_backend(any_backend_name):
    def make(shape: KVCacheShape) -> AttentionBackend:
        return _make_backend(any_backend_name, shape)

    return make


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax over gathered keys in float64; q holds the last rows of the sequence."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    own = torch.arange(len(k) - len(q), len(k))[:, None]
    at = torch.arange(len(k))[None]
    seen = at <= own if window is None else (at <= own) & (at > own - window)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


@pytest.fixture(name="dense_attention")
def _dense_attention():
    return dense_attention


@dataclass
class PagedBatch:
    """Some sequences with keys and values of their own, laid out in a cache by any backend."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    q: list[torch.Tensor]
    """The queries of all positions; a step asks for the last few."""
    q_heads: int

    def attend(
        self,
        backend_name: str = "fast",
        *,
        query_lens: list[int] | None = None,
        seq_lens: list[int] | None = None,
        block_size: int = 16,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        poison: float = math.nan,
        only: int | None = None,
        unseen: str = "kept",
    ) -> list[torch.Tensor]:
        """Return each sequence's rows, computed in one step over a cache filled with `poison`.

        Blocks that no row sees through its window are `kept`, `poisoned`, or `gone` from the table.
        """
        chosen = range(len(self.k)) if only is None else [only]
        lens = seq_lens or [len(k) for k in self.k]
        rows = query_lens or lens
        lens, rows = [lens[i] for i in chosen], [rows[i] for i in chosen]
        k = [self.k[i][:n] for i, n in zip(chosen, lens, strict=True)]
        v = [self.v[i][:n] for i, n in zip(chosen, lens, strict=True)]
        q = [self.q[i][n - r : n] for i, n, r in zip(chosen, lens, rows, strict=True)]
        _, kv_heads, head_dim = k[0].shape
        shape = KVCacheShape(2, kv_heads, head_dim, block_size, k[0].dtype)
        backend = _make_backend(backend_name, shape)
        tables, cache = _allocate(backend, lens, poison)
        slots = _slots(tables, lens, block_size)
        backend.write_kv_cache(torch.cat(k), torch.cat(v), cache, 1, slots)
        if unseen != "kept":
            for table, n, r in zip(tables, lens, rows, strict=True):
                count = max(0, n - r - window + 1) // block_size
                for block in table[:count].tolist():
                    cache.storage[block] = poison
                if unseen == "gone":
                    table[:count] = -1
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *rows]).cumsum(0).int(),
            seq_lens=torch.tensor(lens).int(),
            block_tables=tables,
            slot_mapping=slots,
            max_query_len=max(rows),
            max_seq_len=max(lens),
        )
        softmax = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap, "sinks": sinks}
        out = backend.paged_attention(torch.cat(q), cache, 1, metadata, **softmax)
        return list(out.split(rows))


def _allocate(
    backend: AttentionBackend, lens: list[int], poison: float
) -> tuple[torch.Tensor, KVCache]:
    """Deal out blocks in random order; table entries past a sequence are nonsense."""
    counts = [math.ceil(n / backend.shape.block_size) for n in lens]
    blocks = iter(torch.randperm(sum(counts) + 3).tolist())
    tables = torch.full((len(lens), max(counts) + 1), -123, dtype=torch.int32)
    for table, count in zip(tables, counts, strict=True):
        for i in range(count):
            table[i] = next(blocks)
    cache = backend.allocate(sum(counts) + 3)
    cache.storage.fill_(poison)
    return tables, cache


def _slots(tables: torch.Tensor, lens: list[int], block_size: int) -> torch.Tensor:
    slots = []
    for table, length in zip(tables.long(), lens, strict=True):
        positions = torch.arange(length)
        slots.append(table[positions // block_size] * block_size + positions % block_size)
    return torch.cat(slots)


@pytest.fixture
def make_batch():
    def make(
        lens: list[int],
        *,
        kv_heads: int = 3,
        group: int = 3,
        head_dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
    ) -> PagedBatch:
        def draw(length: int, heads: int) -> torch.Tensor:
            return torch.randn(length, heads, head_dim).to(dtype)

        return PagedBatch(
            k=[draw(n, kv_heads) for n in lens],
            v=[draw(n, kv_heads) for n in lens],
            q=[draw(n, kv_heads * group) for n in lens],
            q_heads=kv_heads * group,
        )

    return make
