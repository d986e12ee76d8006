"""The comparison of answers can fail: each small wrong is found, down to the order of a sum."""

from __future__ import annotations

import math
from types import MappingProxyType

import pytest
import torch

from octavo.config import EngineConfig
from octavo.executor.batch import BatchBuilder
from octavo.model.decoder import Decoder
from octavo.model.loader import load_model as load_weights
from octavo.scheduler.preemption import PreemptionCosts
from octavo_kernels.reference_attention import ReferenceAttention


class SplitByChunk(ReferenceAttention):
    """Reduces keys before the step's first row apart from those of the step; else right."""

    def paged_attention(
        self,
        q,
        cache,
        layer,
        metadata,
        *,
        scale,
        window=None,
        soft_cap=None,
        sinks=None,
        out=None,
    ):
        assert window is soft_cap is sinks is None
        result = torch.empty_like(q)
        starts, size = metadata.query_start_loc.tolist(), self.shape.block_size
        group = q.shape[1] // self.shape.num_kv_heads
        for i, length in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            first = length - (rows.stop - rows.start)
            table = metadata.block_tables[i, : -(-length // size)].long()
            keys, values = (
                layers[layer][table].flatten(0, 1)[:length].repeat_interleave(group, 1)
                for layers in (cache.keys, cache.values)
            )
            scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
            unseen = torch.ones(length - first, length).triu(first + 1).bool()
            weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
            before = torch.einsum("hqk,khd->qhd", weights[..., :first], values[:first])
            own = torch.einsum("hqk,khd->qhd", weights[..., first:], values[first:])
            result[rows] = before + own
        return result


class PlainRunner:
    """A runner over any attention, without host blocks."""

    num_blocks = 64
    num_host_blocks = 0
    window = None
    adapters, num_adapter_slots = MappingProxyType({}), 0
    costs = PreemptionCosts(1, 1.0, math.inf, 1.0)
    num_stages = 1
    steps_ahead = 0
    computes_on_host = True

    def __init__(self, config, make_attention):
        loaded = load_weights(config)
        attention = make_attention(loaded.attention.shape, loaded.device)
        self.vocab_size = loaded.spec.vocab_size
        self.eos_token_ids = loaded.spec.eos_token_ids
        self.max_model_len = loaded.max_model_len
        self._decoder = Decoder(loaded.spec, loaded.decoder.weights, attention)
        self._kv_cache = attention.allocate(self.num_blocks)
        self._batch = BatchBuilder(4, 512, self.max_model_len, config.block_size)

    def execute(self, output, drawn):
        inputs = self._batch.build(output)
        return self._decoder.forward(
            inputs.token_ids, inputs.positions, self._kv_cache, inputs.attention, inputs.logits_rows
        )

    def finish(self):
        """Do nothing more."""

    def wait(self):
        """Wait for no other process."""

    def arrived_adapters(self, timeout_s):
        return ()

    def arrived(self):
        return ()


@pytest.fixture
def answer(checkpoints, drive, load_model):
    """Answer the longest prompt of tiny llama over some attention, in chunks of a size."""

    def run(make_attention, chunk):
        config = EngineConfig(
            str(checkpoints["llama"]),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=chunk,
        )
        runner = PlainRunner(config, make_attention)
        driver = drive(config, runner, runner.num_blocks, 0)
        driver.add("a", *load_model("llama", "float32").asks[9])
        driver.run()
        return driver.trace("a")

    return run


def test_an_attention_that_splits_by_chunk_is_found(answer):
    whole, chunked = answer(SplitByChunk, 512), answer(SplitByChunk, 24)
    assert whole != chunked
    # It computes the same thing: what differs are the last bits.
    assert [token for token, _ in whole] == [token for token, _ in chunked]
    for (_, (ours, *_)), (_, (theirs, *_)) in zip(whole, chunked, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_an_attention_that_splits_by_position_is_not(answer):
    assert answer(ReferenceAttention, 512) == answer(ReferenceAttention, 24)


@pytest.mark.parametrize("what", ["token", "log-probability", "length"])
def test_one_wrong_bit_is_found(load_model, what):
    tiny = load_model("llama", "float32")
    driver = tiny.driver()
    driver.add_all(tiny.asks[:1])
    driver.run()
    tiny.check(driver)
    outputs = driver.outputs["0", 0]
    if what == "token":
        outputs[3] = type(outputs[3])("0", (outputs[3].token_ids[0] + 1,), outputs[3].logprobs)
    elif what == "log-probability":
        ((own, *others),) = outputs[3].logprobs
        wrong = own._replace(logprob=math.nextafter(own.logprob, 0.0))
        outputs[3] = type(outputs[3])("0", outputs[3].token_ids, ((wrong, *others),))
    else:
        del outputs[3]
    with pytest.raises(AssertionError):
        tiny.check(driver)


def test_a_changed_prompt_is_found(load_model):
    tiny = load_model("llama", "float32")
    prompt, params = tiny.asks[0]
    changed = (*prompt[:10], prompt[10] + 1, *prompt[11:])
    assert tiny.alone(changed, params, 0) != tiny.alone(tuple(prompt), params, 0)
    assert tiny.alone(tuple(prompt), tiny.asks[1][1], 1) != tiny.alone(tuple(prompt), params, 0)


def test_kv_that_is_read_before_it_arrives_is_found(load_model):
    tiny = load_model("llama", "float32")
    driver = tiny.driver(preemption_mode="swap", num_host_blocks=20, delay=1000)
    driver.add_all(tiny.asks[:2])
    driver.step()
    early = driver.scheduler.running[0]
    driver.preempt(early)
    driver.step()
    driver.scheduler.resume(tuple(driver.scheduler.restoring), now_s=0.0)
    assert early in driver.scheduler.running
    while driver.scheduler.running:
        driver.step()
    with pytest.raises(AssertionError, match=early.request_id):
        tiny.check(driver)
