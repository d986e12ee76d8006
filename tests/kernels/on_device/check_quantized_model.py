"""A whole model through the kernels, with weights that 8 bits hold: what the plain one answers."""

from functools import partial

import pytest
import torch

from octavo.model import grouped_linear, layers
from octavo.model.decoder import Decoder
from octavo.model.families import spec_from_config
from octavo.model.grouped_linear import GroupedLinear
from octavo.model.layers import PackedLinear
from octavo.model.shard import WHOLE, ModelPart
from octavo.model.tensor_names import expected_tensors
from octavo.model.weight_reader import WeightReader
from octavo_kernels import AttentionMetadata, KVCacheShape, make_attention_backend, quantize_weight

NUM_TOKENS = 19
DTYPE = torch.float16
SPEC = spec_from_config(
    {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    }
)


class Weights(dict[str, torch.Tensor]):
    """Random tensors of the model; quantising to a type leaves each as it is."""

    def __init__(self, kind: torch.dtype) -> None:
        for name, shape in expected_tensors(SPEC).items():
            self[name] = torch.randn(shape) / shape[-1] ** 0.5 + ("norm" in name)
            if len(shape) == 2:
                elements, scales = quantize_weight(self[name], kind)
                self[name] = elements.float() * 2 ** scales.log2().round()[:, None]

    def tensor(self, name: str, *part: slice) -> torch.Tensor:
        return self[name][part]


@pytest.fixture
def logits_of(device, as_on_a_gpu, monkeypatch):
    """Return a function: the logits of all rows of one text, of weights that are stored so."""
    as_on_a_gpu("linear")
    as_on_a_gpu("grouped_linear")
    monkeypatch.setattr(layers, "pack_weight", lambda *arguments, **options: None)
    monkeypatch.setattr(layers, "_pack", lambda weight: None)
    monkeypatch.setattr(grouped_linear, "make_packed_groups", lambda *arguments, **options: None)

    def compute(weights: Weights, stored_as: torch.dtype | None) -> torch.Tensor:
        linear, grouped = (partial(x, stored_as=stored_as) for x in (PackedLinear, GroupedLinear))
        part = ModelPart.of(SPEC, WHOLE)
        reader = WeightReader(weights, part, DTYPE, device, linear, grouped)
        shape = KVCacheShape(SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, 16, DTYPE)
        attention = make_attention_backend(shape, device)
        decoder = Decoder(SPEC, reader.read(max_len=64), attention)
        rows = torch.arange(NUM_TOKENS, device=device)
        starts, lengths = torch.tensor([0, NUM_TOKENS]).int(), torch.tensor([NUM_TOKENS]).int()
        metadata = AttentionMetadata(
            query_start_loc=starts.to(device),
            seq_lens=lengths.to(device),
            block_tables=torch.tensor([[1, 0]], device=device).int(),
            slot_mapping=(rows + 16) % 32,
            max_query_len=NUM_TOKENS,
            max_seq_len=NUM_TOKENS,
        )
        tokens = 3 * rows % SPEC.vocab_size
        return decoder.forward(tokens, rows, attention.allocate(2), metadata, rows)

    return compute


def test_a_model_of_8_bits_answers_what_the_plain_one_does(kind, device, logits_of):
    torch.manual_seed(5)
    weights = Weights(kind)
    expected, actual = logits_of(weights, None), logits_of(weights, kind)
    assert expected.isfinite().all()
    if device.type == "cpu":
        assert torch.equal(actual, expected)
    # On some architectures instructions take the inputs of an 8-bit weight in another order.
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
