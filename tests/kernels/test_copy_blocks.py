"""Whole blocks move between caches, in order, to the bit."""

import math
import random

import pytest
import torch

from octavo_kernels import AttentionMetadata, KVCache, KVCacheShape
from octavo_kernels.native_attention import make_native_attention
from octavo_kernels.reference_attention import ReferenceAttention

pytestmark = pytest.mark.kernels


def numbered(backend, num_blocks: int, first: int = 0) -> KVCache:
    """Return a cache whose block i holds first + i in each slot of each layer."""
    cache = backend.allocate(num_blocks)
    for block in range(num_blocks):
        cache.storage[block] = first + block
    return cache


def contents(cache: KVCache) -> list[int]:
    """Return the number that fills each block, after checking that it does."""
    numbers = cache.storage.flatten(1)
    assert bool((numbers == numbers[:, :1]).all())
    return [int(number) for number in numbers[:, 0]]


def pairs(*given: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(given, dtype=torch.int64).reshape(-1, 2)


@pytest.fixture
def backend(make_backend, dtype):
    return make_backend(KVCacheShape(3, 1, 6, 8, dtype))


def test_blocks_go_to_another_cache_of_another_size(backend):
    source, target = numbered(backend, 4, first=10), numbered(backend, 7)
    backend.copy_blocks(source, target, pairs((3, 0), (0, 6), (3, 2)))
    assert contents(target) == [13, 1, 13, 3, 4, 5, 10]
    assert contents(source) == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], [0, 1, 2, 3]),
        ([(2, 2)], [0, 1, 2, 3]),
        ([(0, 1), (1, 2), (2, 3)], [0, 0, 0, 0]),
        ([(2, 3), (1, 2), (0, 1)], [0, 0, 1, 2]),
        ([(0, 3), (1, 0), (3, 1)], [1, 0, 2, 0]),
        ([(0, 2), (1, 2)], [0, 1, 1, 3]),
        ([(1, 2), (0, 2), (2, 1)], [0, 0, 0, 3]),
    ],
)
def test_pairs_within_one_cache_are_copied_one_after_the_other(backend, given, expected):
    cache = numbered(backend, 4)
    backend.copy_blocks(cache, cache, pairs(*given))
    assert contents(cache) == expected


def test_the_last_of_two_pairs_with_one_target_stays(backend):
    source, target = numbered(backend, 3, first=10), numbered(backend, 2)
    backend.copy_blocks(source, target, pairs((0, 1), (2, 1), (1, 0)))
    assert contents(target) == [11, 12]


@pytest.mark.parametrize("block_size", [8, 5, 256])
def test_many_blocks_are_copied_to_the_bit_on_any_number_of_threads(
    make_backend, dtype, threads, block_size
):
    backend = make_backend(KVCacheShape(5, 3, 10, block_size, dtype))
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    cache, other = backend.allocate(23), backend.allocate(31)
    for x in (cache, other):
        x.storage.view(bits).random_(-(2**15), 2**15)
    draw = random.Random(3)
    for source, target in ((cache, cache), (cache, other), (other, cache)):
        given = [
            (draw.randrange(source.num_blocks), draw.randrange(target.num_blocks))
            for _ in range(400)
        ]
        expected = target.storage.view(bits).clone()
        read = expected if source is target else source.storage.view(bits)
        for a, b in given:
            expected[b] = read[a]
        backend.copy_blocks(source, target, pairs(*given))
        assert torch.equal(target.storage.view(bits), expected)


def test_a_sequence_reads_the_same_from_copied_blocks(make_backend, dtype):
    backend = make_backend(KVCacheShape(2, 2, 16, 8, dtype))
    device, host = backend.allocate(6), backend.allocate(3, host=True)
    device.storage.fill_(math.nan)
    k, v, q = (torch.randn(20, 2, 16).to(dtype) for _ in range(3))

    def attend(table: list[int]) -> torch.Tensor:
        metadata = AttentionMetadata(
            torch.tensor([0, 20], dtype=torch.int32),
            torch.tensor([20], dtype=torch.int32),
            torch.tensor([table], dtype=torch.int32),
            torch.zeros(0, dtype=torch.int64),
            20,
            20,
        )
        return backend.paged_attention(q, device, 1, metadata, scale=0.25)

    slots = torch.tensor([*range(8, 16), *range(40, 48), *range(4)])
    backend.write_kv_cache(k, v, device, 1, slots)
    expected = attend([1, 5, 0])
    backend.copy_blocks(device, host, pairs((1, 2), (5, 0), (0, 1)))
    device.storage.fill_(math.nan)
    backend.copy_blocks(host, device, pairs((2, 4), (0, 2), (1, 1)))
    assert torch.equal(attend([4, 2, 1]), expected)


@pytest.mark.parametrize("pair", [(-1, 0), (4, 0), (0, -1), (0, 2), (2**40, 0)])
def test_a_pair_outside_the_caches_is_named_and_nothing_is_copied(backend, pair):
    source, target = numbered(backend, 4, first=10), numbered(backend, 2)
    message = rf"pair 1 is \({pair[0]}, {pair[1]}\) but the source has 4 blocks and the target 2"
    with pytest.raises(IndexError, match=message):
        backend.copy_blocks(source, target, pairs((1, 1), pair, (9, 9)))
    assert contents(target) == [0, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(2, 3).long(), r"pairs has shape \[2, 3\] but must be \[any, 2\]"),
        (torch.zeros(2, 2).int(), "pairs is torch.int32 but must be torch.int64"),
        (torch.zeros(2, 4).long()[:, ::2], "pairs has strides"),
        (torch.zeros(2, 2, device="meta").long(), "pairs are on meta but must be on the CPU"),
    ],
)
def test_wrong_pairs_are_refused(make_backend, given, message):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, torch.float32))
    cache = backend.allocate(4)
    with pytest.raises(ValueError, match=message):
        backend.copy_blocks(cache, cache, given)


@pytest.mark.parametrize(
    "shape",
    [
        KVCacheShape(2, 1, 16, 8, torch.float32),
        KVCacheShape(1, 2, 16, 8, torch.float32),
        KVCacheShape(1, 1, 16, 16, torch.float32),
        KVCacheShape(1, 1, 16, 8, torch.bfloat16),
    ],
    ids=str,
)
def test_caches_of_another_shape_or_type_are_refused(make_backend, shape):
    backend = make_backend(KVCacheShape(1, 1, 16, 8, torch.float32))
    target = make_backend(shape).allocate(2)
    with pytest.raises(ValueError, match=r"blocks of the target are .* but must be .* as in the"):
        backend.copy_blocks(backend.allocate(2), target, pairs((0, 0)))


def test_host_memory_is_on_the_cpu_whatever_the_device():
    backend = ReferenceAttention(KVCacheShape(1, 2, 16, 8, torch.float32), torch.device("meta"))
    device, host = backend.allocate(3), backend.allocate(2, host=True)
    assert device.storage.device.type == "meta"
    assert host.storage.device.type == "cpu"
    assert host.storage.shape[1:] == device.storage.shape[1:]
    assert not host.storage.any()


def test_offsets_past_32_bits_reach_the_right_block():
    """The cache is four gigabytes of mapped memory, of which three blocks are touched."""
    shape = KVCacheShape(2, 1, 64, 16, torch.bfloat16)
    backend = make_native_attention(shape)
    if backend is None:
        pytest.skip("this machine has no C++ compiler")
    last = 2**32 // shape.bytes_per_block + 1
    cache = backend.allocate(last + 1)
    k, v = torch.randn(2, 16, 1, 64).bfloat16()
    backend.write_kv_cache(k, v, cache, 1, last * 16 + torch.arange(16))
    backend.copy_blocks(cache, cache, pairs((last, 0), (0, last - 1)))
    outs = []
    for block in (last, last - 1, 0):
        metadata = AttentionMetadata(
            torch.tensor([0, 16], dtype=torch.int32),
            torch.tensor([16], dtype=torch.int32),
            torch.tensor([[block]], dtype=torch.int32),
            torch.zeros(0, dtype=torch.int64),
            16,
            16,
        )
        outs.append(backend.paged_attention(k, cache, 1, metadata, scale=1.0))
    assert bool(outs[0].any())
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])
    assert not cache.storage[1].any()
