"""What weights take is known before any is read, and is what a load then counts."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from octavo.config import EngineConfig
from octavo.model import loader
from octavo.model.collectives import Alone
from octavo.model.load_progress import logged
from octavo.model.loader import load_model, read_spec
from octavo.model.shard import ModelPart, Shard
from octavo.model.weight_sizes import part_bytes
from octavo_kernels._native.library import native_library

BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS = {
    "untied": ("llama", BIASES),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "fused": ("phi3", {}),
    "layer norms": ("stablelm", {"use_qkv_bias": True}),
    "norms of heads": ("qwen3", {"head_dim": 22}),
    "norms of each head": ("stablelm", {"qk_layernorm": True}),
    "norms of heads as one": ("olmo2", {}),
    "experts": ("mixtral", {"num_local_experts": 5}),
}


class OtherRanks(Alone):
    """The group of a part that is loaded and never runs."""

    def __init__(self, shard: Shard) -> None:
        self.rank, self.size = shard.tp_rank, shard.tp_size


def logged_bytes(caplog: pytest.LogCaptureFixture, stored_as: str) -> int:
    (text,) = re.findall(rf"weights: ([\d,]+) bytes, {stored_as}$", caplog.text, re.MULTILINE)
    caplog.clear()
    return int(text.replace(",", ""))


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "fp8")],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_load_counts_what_the_spec_says(
    name, dtype, quantization, make_checkpoint, caplog, monkeypatch
):
    if quantization == "int8" and native_library() is None:
        pytest.skip("no native code is built here")
    if quantization == "fp8":  # as a GPU would have it
        monkeypatch.setattr(loader, "choose_quantization", lambda *_: torch.float8_e4m3fn)
    model_type, fields = MODELS[name]
    directory, model = make_checkpoint(model_type, **fields)
    spec = read_spec(directory)
    config = EngineConfig(str(directory), dtype=dtype, device="cpu", quantization=quantization)
    stored_as = dtype if quantization == "none" else f"{dtype}, {quantization} layers"
    sizes = {}
    with caplog.at_level(logging.INFO, "octavo.model.loader"):
        for shard in (Shard(), Shard.of(0, 2, 1), Shard.of(1, 2, 1), *_stages()):
            load_model(config, shard, OtherRanks(shard))
            part = ModelPart.of(spec, shard)
            own = part_bytes(part, getattr(torch, dtype), of_8_bits=quantization != "none")
            assert logged_bytes(caplog, stored_as) == own, shard
            sizes[shard] = own
    if (dtype, quantization) == ("float32", "none"):
        assert sizes[Shard()] == sum(parameter.nbytes for parameter in model.parameters())


def _stages() -> list[Shard]:
    return [Shard.of(rank, 1, 3) for rank in range(3)]


def test_a_long_load_says_every_five_seconds_how_far_it_is(caplog):
    now_s = iter([100.0, 100.0, 104.0, 105.5, 110.0, 111.0])
    with caplog.at_level(logging.INFO, "octavo.model.load_progress"):
        assert list(logged("abcde", 5, "layers", lambda: next(now_s))) == list("abcde")
    assert [record.getMessage() for record in caplog.records] == [
        "weights: 2 of 5 layers in 6 s",
        "weights: 4 of 5 layers in 11 s",
    ]
