"""A compiler sees a whole step as one graph, and what it makes of it has the bits of the step."""

from dataclasses import replace

import pytest
import torch

from octavo.model.decoder import Decoder
from octavo_kernels import make_attention_backend
from octavo_kernels.reference_attention import ReferenceAttention

# Sequences of other lengths, and another number of them.
STEPS = [{"a": 20, "b": 7}, {"a": 1, "b": 5, "c": 3}]


def logits_of(driver, make_prompt) -> list[torch.Tensor]:
    return [
        driver.step({name: make_prompt(length, seed) for name, length in step.items()})
        for seed, step in enumerate(STEPS)
    ]


@pytest.mark.parametrize(
    ("family", "make_attention", "dtype", "num_layers", "dynamic"),
    [
        ("qwen3", make_attention_backend, "bfloat16", 1, True),
        ("qwen3", make_attention_backend, "float32", 2, False),
        ("qwen3", ReferenceAttention, "float32", 1, False),
        ("gemma2", make_attention_backend, "bfloat16", 2, False),
        ("stablelm", make_attention_backend, "bfloat16", 1, False),
    ],
)
def test_a_compiled_step_is_one_graph_with_the_same_bits(
    family,
    make_attention,
    dtype,
    num_layers,
    dynamic,
    make_checkpoint,
    load,
    make_driver,
    make_prompt,
    monkeypatch,
):
    options = {} if family == "stablelm" else {"head_dim": 22}
    directory, _ = make_checkpoint(family, **options, num_hidden_layers=num_layers)
    model = load(directory, dtype)
    attention = make_attention(model.attention.shape, model.device)
    decoder = Decoder(model.spec, model.decoder.weights, attention)
    model = replace(model, decoder=decoder, attention=attention)
    expected, actual = make_driver(model), make_driver(model)
    logits = logits_of(expected, make_prompt)
    torch.compiler.reset()
    compiled = torch.compile(decoder.forward, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    monkeypatch.setattr(decoder, "forward", compiled)
    for ours, theirs in zip(logits_of(actual, make_prompt), logits, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(actual.cache.storage, expected.cache.storage)
