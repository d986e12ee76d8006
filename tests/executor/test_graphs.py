"""A replayed decode step computes what the same step computes when it is run, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.config import EngineConfig
from octavo.executor.batch import BatchBuilder
from octavo.executor.device_inputs import StepSizes
from octavo.executor.graphs import (
    DecodeGraphs,
    batch_sizes,
    estimate_graph_bytes,
    is_decode,
    pad_decode,
)
from octavo.model.loader import load_model
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo.sequence import Sequence

MAX_NUM_SEQS = 20
SIZES = StepSizes(MAX_NUM_SEQS, max_num_tokens=40, max_model_len=64, block_size=8)
#: Each sequence may have 3 blocks; the last one of the cache is the last of the last sequence.
NUM_BLOCKS = 3 * MAX_NUM_SEQS
#: A decode step of all sequences, of 3 to 22 tokens so far, as `make_step` takes it.
DECODES = [(3 + index, 1, 1) for index in range(MAX_NUM_SEQS)]


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
        (150, (1, 2, 4, *range(8, 129, 8), 144, 150)),
        (320, (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), 288, 320)),
    ],
)
def test_batch_sizes_are_few(max_num_seqs, sizes):
    assert batch_sizes(max_num_seqs) == sizes


def test_every_number_of_sequences_has_a_batch_size_that_pads_it_little():
    for max_num_seqs in range(1, 600):
        sizes = batch_sizes(max_num_seqs)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == max_num_seqs
        for num_seqs in range(1, max_num_seqs + 1):
            size = next(size for size in sizes if size >= num_seqs)
            assert size - num_seqs <= max(7, num_seqs // 8)


def make_step(shares: list[tuple[int, int, int]]) -> SchedulerOutput:
    """Make a step from (tokens computed, tokens to compute, draws) of each sequence."""
    scheduled = []
    for index, (num_computed, num_scheduled, num_draws) in enumerate(shares):
        token_ids = tuple((7 * index + 5 * i) % 97 for i in range(num_computed + num_scheduled))
        sequence = Sequence(Request(str(index), token_ids, SamplingParams()))
        sequence.num_computed_tokens = num_computed
        first = NUM_BLOCKS - 3 * (index + 1)
        sequence.block_table = [first + 2, first, first + 1][: -(-len(token_ids) // 8)]
        scheduled.append(ScheduledSequence(sequence, num_scheduled, (sequence,) * num_draws))
    return SchedulerOutput(tuple(scheduled))


@pytest.fixture
def build():
    """Build the inputs of the step that `make_step` makes, in arrays of their own."""

    def build(shares: list[tuple[int, int, int]]):
        builder = BatchBuilder(MAX_NUM_SEQS, 300, SIZES.max_model_len, SIZES.block_size)
        return builder.build(make_step(shares))

    return build


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([(5, 1, 1)], True),
        ([(5, 1, 1), (0, 1, 1), (23, 1, 1)], True),
        ([(5, 1, 1), (0, 2, 1)], False),  # a prompt
        ([(5, 1, 1), (4, 1, 0)], False),  # the chunk of a prompt
        ([(5, 1, 1), (4, 1, 2)], False),  # the first token of two answers
        ([(5, 1, 2), (4, 1, 0)], False),
        ([(5, 1, 0)], False),
    ],
)
def test_a_decode_step_computes_and_draws_one_token_of_each_sequence(build, shares, expected):
    assert is_decode(build(shares)) is expected


def test_padding_rows_belong_to_nobody_and_have_no_slot(build):
    step = build([(5, 1, 1), (20, 1, 1), (9, 1, 1)])
    padded = pad_decode(step, 5)
    attention = padded.attention
    assert padded.token_ids.tolist() == [*step.token_ids.tolist(), 0, 0]
    assert padded.positions.tolist() == [5, 20, 9, 0, 0]
    assert padded.logits_rows.tolist() == [0, 1, 2, 3, 4]
    assert attention.slot_mapping.tolist() == [*step.attention.slot_mapping.tolist(), -1, -1]
    assert attention.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3]
    assert attention.seq_lens.tolist() == [6, 21, 10, 0, 0]
    assert attention.block_tables.shape == (5, 3)
    assert attention.block_tables.dtype == torch.int32


def test_a_step_that_fills_its_size_stays_as_it_is(build):
    step = build([(5, 1, 1), (20, 1, 1)])
    padded = pad_decode(step, 2)
    assert torch.equal(padded.token_ids, step.token_ids)
    assert padded.attention.query_start_loc.tolist() == [0, 1, 2]


class Model:
    """A tiny model with one cache for graphs and one for steps that are run."""

    def __init__(self, decoder, staged, recorder) -> None:
        self.decoder = decoder
        self.graph_cache, self.plain_cache = (decoder.attention.allocate(NUM_BLOCKS) for _ in "ab")
        self.graphs = DecodeGraphs(decoder, self.graph_cache, staged, recorder)

    def run(self, inputs) -> torch.Tensor:
        """Run a step in the plain cache."""
        return self.decoder.forward(
            inputs.token_ids,
            inputs.positions,
            self.plain_cache,
            inputs.attention,
            inputs.logits_rows,
        )

    def prefill(self, build) -> None:
        """Fill both caches with what the sequences of `DECODES` have computed.

        Before anything is recorded, as when a model is loaded: larger steps may move its memory.
        """
        self.run(build([(0, num_computed, 1) for num_computed, _, _ in DECODES]))
        self.graph_cache.storage.copy_(self.plain_cache.storage)

    def assert_caches_equal(self) -> None:
        assert bits(self.graph_cache) == bits(self.plain_cache)


def bits(cache) -> bytes:
    return cache.storage.numpy().tobytes()


@pytest.fixture(params=["llama", "mistral"])
def model(request, checkpoints, staged_inputs, fake_recorder):
    config = EngineConfig(str(checkpoints[request.param]), block_size=8, max_model_len=64)
    torch.set_num_threads(1)
    decoder = load_model(config).decoder
    made = Model(decoder, staged_inputs(SIZES), fake_recorder)
    for cache in (made.graph_cache, made.plain_cache):
        cache.storage.fill_(torch.nan)
    return made


def test_recording_writes_to_no_block_and_begins_with_the_largest(model, fake_recorder):
    before = bits(model.graph_cache)
    model.graphs.record(batch_sizes(MAX_NUM_SEQS))
    assert bits(model.graph_cache) == before
    assert model.graphs.sizes == (1, 2, 4, 8, 16, 20)
    assert [capture.num_replays for capture in fake_recorder.captures] == [1] * 6
    assert [capture.num_rows for capture in fake_recorder.captures] == [20, 16, 8, 4, 2, 1]


def test_replayed_steps_have_the_bits_of_steps_that_are_run_and_write_as_they_do(model, build):
    model.prefill(build)
    model.graphs.record(batch_sizes(MAX_NUM_SEQS))
    for num_seqs in range(1, MAX_NUM_SEQS + 1):
        inputs = build(DECODES[:num_seqs])
        replayed = model.graphs.run(inputs, None)
        assert torch.equal(replayed, model.run(inputs)), num_seqs
        assert replayed.shape == (num_seqs, 97)
        assert not replayed.isnan().any()
        model.assert_caches_equal()


def test_a_step_is_replayed_in_the_smallest_size_that_holds_it(model, build, fake_recorder):
    model.prefill(build)
    model.graphs.record(batch_sizes(MAX_NUM_SEQS))
    used = []
    for num_seqs in range(1, MAX_NUM_SEQS + 1):
        before = [capture.num_replays for capture in fake_recorder.captures]
        model.graphs.run(build(DECODES[:num_seqs]), None)
        pairs = zip(fake_recorder.captures, before, strict=True)
        used += [capture.num_rows for capture, count in pairs if capture.num_replays > count]
    assert used == [1, 2, 4, 4, *[8] * 4, *[16] * 8, *[20] * 4]


class LaunchedDecoder:
    """A decoder that only keeps how it was called."""

    def __init__(self, decoder) -> None:
        self.spec = decoder.spec
        self.metadata = []

    def forward(self, token_ids, positions, kv_cache, metadata, logits_rows, out) -> torch.Tensor:
        self.metadata.append(metadata)
        return out


def test_attention_is_launched_for_the_longest_sequence_whatever_the_step(
    model, build, staged_inputs, fake_recorder
):
    decoder = LaunchedDecoder(model.decoder)
    graphs = DecodeGraphs(decoder, model.graph_cache, staged_inputs(SIZES), fake_recorder)
    graphs.record([4, 2])
    for num_seqs in (1, 2, 3, 4):
        graphs.run(build(DECODES[:num_seqs]), None)
    assert {metadata.max_seq_len for metadata in decoder.metadata} == {64}
    assert {metadata.max_query_len for metadata in decoder.metadata} == {1}
    shapes = {tuple(metadata.block_tables.shape) for metadata in decoder.metadata}
    assert shapes == {(4, 8), (2, 8)}
    assert len({metadata.block_tables.data_ptr() for metadata in decoder.metadata}) == 1


def test_a_replay_reads_what_this_step_put_there_and_not_what_one_before_did(model, build):
    model.prefill(build)
    model.graphs.record(batch_sizes(MAX_NUM_SEQS))
    many, few = build(DECODES), build(DECODES[:3])
    expected = [model.run(inputs) for inputs in (many, few)]
    for inputs, logits in zip((many, few, many), (*expected, expected[0]), strict=True):
        assert torch.equal(model.graphs.run(inputs, None), logits)


def test_ids_that_are_still_on_the_device_are_filled_in(model, build):
    model.prefill(build)
    model.graphs.record([4])
    inputs = build(DECODES[:3])
    expected = model.run(inputs)
    drawn = torch.stack([torch.tensor(96), *inputs.token_ids.flip(0)])
    hidden = replace(
        inputs,
        token_ids=torch.tensor([0, inputs.token_ids[1], 0]),
        pending=torch.tensor([[0, 3], [2, 1]]),
    )
    assert torch.equal(model.graphs.run(hidden, drawn), expected)


def test_the_recorder_of_these_tests_finds_a_number_that_would_be_frozen(fake_recorder):
    lengths, result = [3], torch.empty(2)
    capture = fake_recorder.record(lambda: result.copy_(torch.ones(2) * lengths[0]))
    capture.replay()
    lengths[0] = 4
    with pytest.raises(AssertionError, match="a graph would do what was recorded"):
        capture.replay()


def test_the_recorder_of_these_tests_finds_memory_that_does_not_last(fake_recorder):
    inputs, result = [torch.ones(2)], torch.empty(2)
    capture = fake_recorder.record(lambda: result.copy_(inputs[0] + 1))
    capture.replay()
    # The first one lives on in the capture, so that this one lies elsewhere.
    inputs[0] = torch.ones(2)
    with pytest.raises(AssertionError, match="a graph would do what was recorded"):
        capture.replay()


def test_the_recorder_of_these_tests_leaves_no_result_of_an_earlier_replay(fake_recorder):
    source, result = torch.ones(2), torch.empty(2)
    capture = fake_recorder.record(lambda: result.copy_(source))
    result.fill_(5)
    capture.replay()
    assert result.tolist() == [1, 1]


class CountedGraphs:
    """Graphs that take 100 bytes for all and 7 for each size."""

    def __init__(self) -> None:
        self.free_bytes = 1000
        self.recorded: list[int] = []

    def make(self) -> CountedGraphs:
        self.free_bytes -= 100
        return self

    def record(self, sizes) -> None:
        self.recorded += sizes
        self.free_bytes -= 7 * len(sizes)


@pytest.mark.parametrize(
    ("sizes", "expected", "recorded"),
    [((1, 2, 4, 8), 100 + 4 * 7, [8, 4]), ((1, 2), 100 + 2 * 7, [2, 1]), ((1,), 107, [1])],
)
def test_the_memory_of_graphs_is_told_from_the_two_largest(sizes, expected, recorded):
    graphs = CountedGraphs()
    assert estimate_graph_bytes(graphs.make, sizes, lambda: graphs.free_bytes) == expected
    assert graphs.recorded == recorded
