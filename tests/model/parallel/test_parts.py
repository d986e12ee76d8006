"""A rank reads its part of a checkpoint, and no more."""

import pytest
import torch
from safetensors.torch import load_file

from octavo.config import EngineConfig
from octavo.model.checkpoint import Checkpoint
from octavo.model.collectives import Alone
from octavo.model.loader import load_model
from octavo.model.shard import Shard


class Place(Alone):
    """A place in a group of which nobody else is there."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.fixture
def read_by(monkeypatch):
    """Return a function: load one rank's part, return how many elements of each tensor it read."""

    def read(directory, rank, tp_size, pp_size, **options):
        elements = {}
        tensor_of = Checkpoint.tensor

        def spy(checkpoint, name, *part):
            tensor = tensor_of(checkpoint, name, *part)
            elements[name] = elements.get(name, 0) + tensor.numel()
            return tensor

        config = EngineConfig(model=str(directory), device="cpu", **options)
        shard = Shard.of(rank, tp_size, pp_size)
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "tensor", spy)
            return elements, load_model(config, shard, Place(shard.tp_rank, tp_size))

    return read


def test_a_rank_reads_only_what_it_holds(make_checkpoint, read_by):
    directory, _ = make_checkpoint("llama", attention_bias=True)
    elements, model = read_by(directory, 2, 2, 2)
    layers = {f"model.layers.{index}." for index in (0, 1)}
    names = [name for name in elements if not name.startswith(tuple(layers))]
    assert names == ["model.embed_tokens.weight"]
    assert elements["model.embed_tokens.weight"] == 105 * 60
    for layer in layers:
        sizes = {n.removeprefix(layer): s for n, s in elements.items() if n.startswith(layer)}
        assert sizes == {
            "input_layernorm.weight": 60,
            "self_attn.q_proj.weight": 30 * 60,
            "self_attn.q_proj.bias": 30,
            "self_attn.k_proj.weight": 10 * 60,
            "self_attn.k_proj.bias": 10,
            "self_attn.v_proj.weight": 10 * 60,
            "self_attn.v_proj.bias": 10,
            "self_attn.o_proj.weight": 60 * 30,
            "self_attn.o_proj.bias": 60,
            "post_attention_layernorm.weight": 60,
            "mlp.gate_proj.weight": 53 * 60,
            "mlp.up_proj.weight": 53 * 60,
            "mlp.down_proj.weight": 60 * 53,
        }
    shape = model.attention.shape
    assert (shape.num_layers, shape.num_kv_heads) == (2, 1)


def test_the_bias_of_a_sum_is_added_by_one_rank(make_checkpoint, read_by):
    directory, _ = make_checkpoint("llama", attention_bias=True, mlp_bias=True)
    elements, _ = read_by(directory, 1, 2, 1)
    biases = {name.split(".")[-2] for name in elements if name.endswith("bias")}
    assert biases == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_together_read_every_element_once(tied, make_checkpoint, read_by):
    directory, _ = make_checkpoint("qwen3", head_dim=16, tie_word_embeddings=tied)
    total = dict.fromkeys(load_file(directory / "model.safetensors"), 0)
    for rank in range(4):
        for name, count in read_by(directory, rank, 2, 2)[0].items():
            total[name] += count
    for name, tensor in load_file(directory / "model.safetensors").items():
        # Each rank of a group has the norms, and both ends of a pipeline a tied table.
        is_held_twice = "norm" in name or (tied and "embed_tokens" in name)
        assert total[name] == tensor.numel() * (1 + is_held_twice), name


def test_ranks_together_read_every_element_of_every_expert_once(make_checkpoint, read_by):
    directory, _ = make_checkpoint("mixtral", num_local_experts=5)
    total = dict.fromkeys(load_file(directory / "model.safetensors"), 0)
    for rank in range(4):
        for name, count in read_by(directory, rank, 2, 2)[0].items():
            total[name] += count
    for name, tensor in load_file(directory / "model.safetensors").items():
        # Each rank of a group chooses for itself.
        is_held_twice = "norm" in name or name.endswith("gate.weight")
        assert total[name] == tensor.numel() * (1 + is_held_twice), name


def test_pickled_weights_are_read_in_parts_too(make_checkpoint, read_by):
    directory, _ = make_checkpoint("llama")
    expected = read_by(directory, 3, 2, 2)[1].decoder.weights
    path = directory / "model.safetensors"
    torch.save(load_file(path), directory / "pytorch_model.bin")
    path.unlink()
    weights = read_by(directory, 3, 2, 2, allow_pickle=True)[1].decoder.weights
    every_row = torch.arange(106)
    assert torch.equal(weights.embedding(every_row), expected.embedding(every_row))
    x = torch.randn(3, 60, generator=torch.Generator().manual_seed(0))
    assert torch.equal(weights.layers[1].attention.qkv(x), expected.layers[1].attention.qkv(x))
