"""All layers in one call: the bits of the operations one by one."""

from dataclasses import replace

import pytest
import torch

from octavo_kernels import (
    AttentionMetadata,
    KVCacheShape,
    LayerLowRanks,
    LayerParts,
    LowRankTable,
    NativeLayers,
    SharedParts,
    add_rms_norm,
    gelu_and_mul,
    low_rank_add_,
    make_native_layers,
    pack_weight,
    packed_linear,
    rms_norm,
    silu_and_mul,
)
from octavo_kernels._native.library import native_library
from octavo_kernels._native.processor import INSTRUCTION_SETS
from octavo_kernels.native_attention import NativeAttention
from octavo_kernels.reference_attention import ReferenceAttention

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(native_library() is None, reason="this machine builds no native code"),
]

HIDDEN, INNER, Q_HEADS, KV_HEADS, HEAD_DIM = 50, 70, 6, 2, 16
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 8, 40, 64
# Rows and length of each sequence: a prefill, a chunk, decodes; more than one tile of a product.
ROWS, LENGTHS = [29, 3, 1, 1], [29, 20, 1, 33]


@pytest.fixture
def instructions(native_name, each_instruction_set):
    return next(x for x in INSTRUCTION_SETS if x.name == native_name)


@pytest.fixture
def make_parts(dtype, instructions):
    def make(qk_norm=True, with_bias=True, to_int8=False, **options) -> LayerParts:
        def linear(inputs, outputs, is_gated=False):
            weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
            bias = torch.randn(outputs).to(dtype) if with_bias else None
            form = {"is_gated": is_gated, "to_int8": to_int8}
            return pack_weight(weight, bias, **form, instructions=instructions)

        parts = {
            "input_norm": make_norm(),
            "qkv": linear(HIDDEN, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM),
            "q_norm": make_norm(HEAD_DIM) if qk_norm else None,
            "k_norm": make_norm(HEAD_DIM) if qk_norm else None,
            "o": linear(Q_HEADS * HEAD_DIM, HIDDEN),
            "mlp_norm": make_norm(),
            "gate_up": linear(HIDDEN, 2 * INNER, is_gated=True),
            "down": linear(INNER, HIDDEN),
            "cos_sin": make_table(),
        }
        return LayerParts(**{**parts, **options})

    return make


def make_table(rotary_dim=HEAD_DIM) -> torch.Tensor:
    angles = torch.rand(MAX_LEN, rotary_dim // 2) * 6
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def make_norm(size=HIDDEN) -> torch.Tensor:
    return torch.randn(size) * 0.3 + 1


@pytest.fixture
def make_shared():
    def make(**options) -> SharedParts:
        return SharedParts(eps=1e-5, scale=0.3, **options)

    return make


@pytest.fixture
def backend(dtype, instructions):
    return NativeAttention(KVCacheShape(2, KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype), instructions)


@pytest.fixture
def step(dtype, backend):
    """Return (residual, positions, cache, metadata) of a mixed step over a half-filled cache."""
    cache = backend.allocate(NUM_BLOCKS)
    cache.storage.copy_(torch.randn(cache.storage.shape))
    tables = torch.randperm(NUM_BLOCKS)[: 4 * 5].view(4, 5).int()
    positions = [torch.arange(n - r, n) for r, n in zip(ROWS, LENGTHS, strict=True)]
    slots = [
        table[own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE
        for table, own in zip(tables.long(), positions, strict=True)
    ]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *ROWS]).cumsum(0).int(),
        seq_lens=torch.tensor(LENGTHS).int(),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        max_query_len=max(ROWS),
        max_seq_len=max(LENGTHS),
    )
    return torch.randn(sum(ROWS), HIDDEN).to(dtype), torch.cat(positions), cache, metadata


def run_one_by_one(backend, shared, parts, residual, positions, cache, metadata, adapted=None):
    """Return the output and the residual stream that the operations leave."""
    hidden, eps = None, shared.eps
    activate = gelu_and_mul if shared.gelu else silu_and_mul

    def advance(norm):
        """Return what the next block reads, and the stream."""
        if hidden is None:
            return residual if norm is None else rms_norm(residual, norm, eps), residual
        total = hidden + residual
        return (total, total) if norm is None else add_rms_norm(hidden, residual, norm, eps)

    def finish(made, norm):
        if shared.sum_hidden_ is not None:
            shared.sum_hidden_(made)
        made = made if norm is None else rms_norm(made, norm, eps)
        return made if shared.residual_scale == 1 else made * shared.residual_scale

    def normalize(heads, norm):
        if shared.norms_all_heads:
            return rms_norm(heads.flatten(1), norm, eps).view(heads.shape)
        return rms_norm(heads, norm, eps)

    def multiply(x, layer, name):
        product, table = packed_linear(x, getattr(layer, name)), getattr(layer.low_ranks, name)
        if adapted is not None and table is not None:
            low_rank_add_(product, x, table, *adapted)
        return product

    for index, layer in enumerate(parts):
        read, residual = advance(layer.input_norm)
        heads = multiply(read, layer, "qkv").view(len(read), -1, HEAD_DIM)
        q, k, v = heads.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
        if layer.q_norm is not None:
            q, k = normalize(q, layer.q_norm), normalize(k, layer.k_norm)
        if layer.cos_sin is None:
            backend.write_kv_cache(k, v, cache, index, metadata.slot_mapping)
        else:
            q = backend.rope_and_write_kv_cache(
                *(q, k, v, positions, layer.cos_sin, cache, index, metadata.slot_mapping),
                interleaved=shared.interleaved,
            )
        attended = backend.paged_attention(
            *(q, cache, index, metadata),
            scale=shared.scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
        )
        hidden = finish(multiply(attended.flatten(1), layer, "o"), layer.attention_norm)
        read, residual = advance(layer.mlp_norm)
        made = multiply(activate(multiply(read, layer, "gate_up")), layer, "down")
        hidden = finish(made, layer.output_norm)
    return hidden, residual


def copy_of(cache, backend):
    copied = backend.allocate(NUM_BLOCKS)
    copied.storage.copy_(cache.storage)
    return copied


PLAIN = {"qk_norm": False, "with_bias": False}
OPTIONS = {"window": 7, "soft_cap": 4.0, "sinks": torch.linspace(-1, 2, Q_HEADS)}


@pytest.mark.parametrize(
    ("rotary_dim", "interleaved"), [(HEAD_DIM, False), (HEAD_DIM, True), (6, False)]
)
@pytest.mark.parametrize(
    "options",
    [PLAIN, {}, OPTIONS, {"to_int8": True}],
    ids=["plain", "norms", "options", "int8"],
)
def test_the_bits_are_those_of_the_operations_one_by_one(
    rotary_dim, interleaved, options, backend, make_parts, make_shared, step, threads
):
    shared, table = make_shared(interleaved=interleaved), make_table(rotary_dim)
    parts = [make_parts(**options, cos_sin=table), make_parts(**options, cos_sin=table)]
    residual, positions, cache, metadata = step
    expected_cache = copy_of(cache, backend)
    expected = run_one_by_one(backend, shared, parts, residual, positions, expected_cache, metadata)
    run = make_native_layers(backend, shared, parts)
    actual = run(residual, positions, cache, metadata)
    assert torch.equal(actual, expected[0])
    assert torch.equal(residual, expected[1])
    assert torch.equal(cache.storage, expected_cache.storage)


# What a family may have that others have not: of a layer, and of all layers.
FORMS = {
    "norms-on-both-sides-and-gelu": (
        lambda: {"attention_norm": make_norm(), "output_norm": make_norm()},
        {"gelu": True},
    ),
    "norms-behind-the-blocks-and-over-all-heads": (
        lambda: {
            "input_norm": None,
            "attention_norm": make_norm(),
            "mlp_norm": None,
            "output_norm": make_norm(),
            "q_norm": make_norm(Q_HEADS * HEAD_DIM),
            "k_norm": make_norm(KV_HEADS * HEAD_DIM),
        },
        {"norms_all_heads": True},
    ),
    "a-scaled-residual": (dict, {"residual_scale": 0.22}),
    "no-rotation": (lambda: {"cos_sin": None}, {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_layer_has_the_bits_of_the_operations_one_by_one(
    form, backend, make_parts, make_shared, step, threads
):
    make_options, shared_options = FORMS[form]
    shared = make_shared(**shared_options)
    parts = [make_parts(**make_options()), make_parts()]
    if shared.norms_all_heads or form.startswith("norms"):
        parts[1] = make_parts(**make_options())
    residual, positions, cache, metadata = step
    expected_cache = copy_of(cache, backend)
    expected = run_one_by_one(backend, shared, parts, residual, positions, expected_cache, metadata)
    run = make_native_layers(backend, shared, parts)
    assert torch.equal(run(residual, positions, cache, metadata), expected[0])
    assert torch.equal(residual, expected[1])
    assert torch.equal(cache.storage, expected_cache.storage)


# Slot 1 has the prefill's first rows, slot 3 the chunk and a decode; the last decode has none.
ADAPTED = torch.tensor([*range(20), 29, 30, 31, 32]), torch.tensor([0, 0, 20, 20, 24])
RANKS = [4, 3, 1, 19]


def adapt(layer, names):
    """Return a layer of which adapters of `RANKS` change the linear layers of these names."""
    tables = {}
    for name in names:
        weight = getattr(layer, name)
        table = tables[name] = LowRankTable(weight, len(RANKS))
        for slot, rank in enumerate(RANKS):
            down = torch.randn(rank, weight.in_features) / 10
            table.put(slot, table.pack(down, torch.randn(weight.out_features, rank) / 2))
    return replace(layer, low_ranks=LayerLowRanks(**tables))


@pytest.mark.parametrize(
    ("options", "shared_options"),
    [(PLAIN, {}), ({}, {"gelu": True}), ({"to_int8": True}, {"residual_scale": 0.22})],
    ids=["plain", "biases-and-gelu", "int8"],
)
def test_adapters_have_the_bits_of_the_operations_one_by_one(
    options, shared_options, backend, make_parts, make_shared, step, threads
):
    shared = make_shared(**shared_options)
    parts = [
        adapt(make_parts(**options), ["qkv", "o", "gate_up", "down"]),
        adapt(make_parts(**options), ["gate_up", "o"]),
    ]
    residual, *others, cache, metadata = step
    outputs = []
    for adapted in (ADAPTED, None):
        own, stream = copy_of(cache, backend), residual.clone()
        expected_cache = copy_of(cache, backend)
        expected = run_one_by_one(
            *(backend, shared, parts, residual, *others, expected_cache, metadata, adapted)
        )
        run = make_native_layers(backend, shared, parts)
        outputs.append(run(stream, *others, own, metadata, adapted).clone())
        assert torch.equal(outputs[-1], expected[0])
        assert torch.equal(stream, expected[1])
        assert torch.equal(own.storage, expected_cache.storage)
    with_adapters, without = outputs
    assert torch.equal(with_adapters[-1], without[-1])
    assert not torch.equal(with_adapters[29:33], without[29:33])


def test_rows_of_adapters_that_point_outside_are_refused_before_anything_is_written(
    backend, make_parts, make_shared, step
):
    run = NativeLayers(backend.shape, make_shared(), [adapt(make_parts(), ["o"]), make_parts()])
    before = step[2].storage.clone()
    starts = torch.tensor([0, 0, 1, 1, 1])
    with pytest.raises(IndexError, match="native_layers: row 34 is outside the 34 of the step"):
        run(*step, (torch.tensor([34]), starts))
    with pytest.raises(IndexError, match="native_layers: group 1 has rows from 0 to 2"):
        run(*step, (torch.tensor([3]), 2 * starts))
    with pytest.raises(ValueError, match=r"starts has shape \[3\] but must be \[5\]"):
        run(*step, (torch.tensor([3]), starts[:3]))
    assert torch.equal(step[2].storage, before)


def test_what_others_have_is_added_after_both_products(backend, make_parts, make_shared, step):
    # As if another had the same.
    shared = replace(make_shared(), sum_hidden_=lambda hidden: hidden.mul_(2))
    parts = [make_parts(), make_parts()]
    residual, positions, cache, metadata = step
    expected_cache = copy_of(cache, backend)
    expected = run_one_by_one(backend, shared, parts, residual, positions, expected_cache, metadata)
    run = NativeLayers(backend.shape, shared, parts)
    assert torch.equal(run(residual, positions, cache, metadata), expected[0])
    assert torch.equal(residual, expected[1])
    assert torch.equal(cache.storage, expected_cache.storage)


def test_what_a_sum_raises_ends_the_call_at_once(backend, make_parts, make_shared, step):
    calls = []

    def fail_(hidden):
        calls.append(hidden.shape)
        raise ConnectionError("another is gone")

    shared = replace(make_shared(), sum_hidden_=fail_)
    run = NativeLayers(backend.shape, shared, [make_parts(), make_parts()])
    with pytest.raises(ConnectionError, match="another is gone"):
        run(*step)
    assert calls == [(34, HIDDEN)]


def test_a_small_step_after_a_large_one_has_the_bits_of_a_first(
    backend, make_parts, make_shared, step
):
    shared, parts = make_shared(), [make_parts(), make_parts()]
    residual, positions, cache, metadata = step
    # The last sequence alone.
    alone = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1]).int(),
        seq_lens=metadata.seq_lens[3:],
        block_tables=metadata.block_tables[3:].contiguous(),
        slot_mapping=metadata.slot_mapping[-1:],
        max_query_len=1,
        max_seq_len=LENGTHS[3],
    )
    last = residual[-1:].clone()
    run, other = (NativeLayers(backend.shape, shared, parts) for _ in range(2))
    together = run(residual, positions, copy_of(cache, backend), metadata)[-1].clone()
    assert torch.equal(
        run(last.clone(), positions[-1:], copy_of(cache, backend), alone)[0], together
    )
    assert torch.equal(other(last, positions[-1:], cache, alone)[0], together)


def test_numbers_that_point_outside_are_refused(backend, make_parts, make_shared, step):
    run = NativeLayers(backend.shape, make_shared(), [make_parts(), make_parts()])
    residual, positions, cache, metadata = step
    before = cache.storage.clone()
    positions[4] = MAX_LEN
    with pytest.raises(IndexError, match=f"position {MAX_LEN} is outside the {MAX_LEN} of cos_sin"):
        run(residual, positions, cache, metadata)
    positions[4] = 4
    slot = metadata.slot_mapping[5].item()
    metadata.slot_mapping[5] = NUM_BLOCKS * BLOCK_SIZE
    with pytest.raises(IndexError, match=f"slot 320 is past the cache of {NUM_BLOCKS} blocks of 8"):
        run(residual, positions, cache, metadata)
    assert torch.equal(cache.storage, before)
    metadata.slot_mapping[5] = slot
    metadata.block_tables[1, 2] = NUM_BLOCKS
    with pytest.raises(IndexError, match="sequence 1 has rows or blocks outside the 34 rows"):
        run(residual, positions, cache, metadata)


def test_another_backend_runs_operation_by_operation(backend, make_parts, make_shared):
    plain = ReferenceAttention(backend.shape, torch.device("cpu"))
    assert make_native_layers(plain, make_shared(), [make_parts()]) is None


def test_parts_and_steps_of_other_sizes_are_refused(backend, make_parts, make_shared, step):
    good, shared = make_parts(), make_shared()
    odd = LayerParts(**{**vars(good), "o": good.down})
    with pytest.raises(ValueError, match="native_layers: o is"):
        NativeLayers(backend.shape, shared, [good, odd])
    ungated = LayerParts(**{**vars(good), "gate_up": replace(good.gate_up, is_gated=False)})
    with pytest.raises(ValueError, match="gate_up must be packed as gated"):
        NativeLayers(backend.shape, shared, [good, ungated])
    unnormed = LayerParts(**{**vars(good), "mlp_norm": good.k_norm})
    with pytest.raises(ValueError, match=r"mlp_norm has shape \[16\] but must be \[50\]"):
        NativeLayers(backend.shape, shared, [good, unnormed])
    adapted = adapt(good, ["o"])
    other = replace(good, low_ranks=LayerLowRanks(down=adapted.low_ranks.o))
    with pytest.raises(ValueError, match=r"adapters of down have \(96, 50, .* \(70, 50, "):
        NativeLayers(backend.shape, shared, [good, other])
    run = NativeLayers(backend.shape, shared, [good, good])
    residual, positions, cache, metadata = step
    with pytest.raises(ValueError, match=r"positions has shape \[33\] but must be \[34\]"):
        run(residual, positions[1:], cache, metadata)
    with pytest.raises(ValueError, match=r"slot_mapping has shape \[34\] but must be \[33\]"):
        run(residual[1:], positions[1:], cache, metadata)
    with pytest.raises(ValueError, match="positions is on meta but must be on cpu"):
        run(residual, positions.to("meta"), cache, metadata)
    with pytest.raises(ValueError, match="residual is on meta but must be on cpu"):
        run(residual.to("meta"), positions, cache, metadata)
    with pytest.raises(ValueError, match="residual has strides"):
        run(residual.T.contiguous().T, positions, cache, metadata)
