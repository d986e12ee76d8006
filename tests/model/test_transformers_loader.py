"""What is refused, noticed and kept when a model of transformers is loaded over paged KV."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.config import EngineConfig
from octavo.errors import ConfigError, NotPaged
from octavo.model import layers, transformers_loader
from octavo.model.packed_modules import PackedEmbedding, PackedModule
from octavo.model.pretrained import load_pretrained
from octavo.model.tiers import load_served_model
from octavo_kernels.quantization import EIGHT_BITS

GPT2 = {"vocab_size": 211, "n_embd": 60, "n_head": 6, "n_layer": 2, "n_positions": 128}
#: A Llama whose embedding and activation a test replaces.
CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class Embedding(torch.nn.Embedding):
    def forward(self, ids):
        {embed}

class Activation(torch.nn.Module):
    def forward(self, x):
        {activate}

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        for layer in self.model.layers:
            layer.mlp.act_fn = Activation()
"""
PLAIN = {"embed": "return super().forward(ids)", "activate": "return torch.relu(x)"}


@pytest.fixture
def make_gpt2(tmp_path):
    """Save a tiny random GPT-2 in a dtype; return its directory."""

    def make(dtype=torch.float32):
        torch.manual_seed(2)
        config = AutoConfig.for_model("gpt2", **GPT2, bos_token_id=1, eos_token_id=7)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(tmp_path / "gpt2")
        return tmp_path / "gpt2"

    return make


@pytest.fixture
def make_own(tmp_path):
    """Save a checkpoint with code of its own, with some parts of it; return its directory."""

    def make(**parts: str):
        fields = {"vocab_size": 211, "hidden_size": 60, "num_attention_heads": 6}
        fields |= {"num_hidden_layers": 2, "intermediate_size": 107}
        config = AutoConfig.for_model("llama", **fields, max_position_embeddings=128)
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(tmp_path / "own")
        path = tmp_path / "own" / "config.json"
        classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
        own = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": classes}
        path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
        (tmp_path / "own" / "own.py").write_text(CODE.format(**{**PLAIN, **parts}))
        return tmp_path / "own"

    return make


def load(directory, **options):
    return load_served_model(EngineConfig(str(directory), device="cpu", cpu_threads=1, **options))


def edit_tensors(directory, edit):
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_all_linear_layers_are_packed_and_a_tied_embedding_reads_the_packed_weight(make_gpt2):
    decoder = load(make_gpt2()).decoder
    layers = list(decoder._layers.modules())
    assert isinstance(decoder._head.lm_head, PackedModule)
    assert sum(isinstance(module, PackedModule) for module in layers) == 2 * 4
    (embedding,) = [module for module in layers if isinstance(module, PackedEmbedding)]
    assert embedding.embedding._plain is None


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda t: t.pop("transformer.h.0.ln_1.bias"), "missing: transformer.h.0.ln_1.bias"),
        (lambda t: t.update(extra=torch.ones(3)), "unexpected: extra"),
        (
            lambda t: t.update({"transformer.h.1.ln_2.weight": torch.ones(7)}),
            "wrong shape: transformer.h.1.ln_2.weight [7] instead of [60]",
        ),
    ],
    ids=["missing", "unexpected", "wrong shape"],
)
def test_tensors_that_are_not_the_models_are_named(edit, fault, make_gpt2):
    directory = make_gpt2()
    edit_tensors(directory, edit)
    with pytest.raises(ConfigError) as error:
        load(directory)
    assert str(error.value) == f"the tensors in {directory} do not fit its config; {fault}"


def test_a_file_that_is_cut_off_is_noticed(make_gpt2):
    path = make_gpt2() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"is damaged or not a safetensors file"):
        load(path.parent)


def test_weights_do_not_depend_on_the_file_once_loaded(make_gpt2):
    directory = make_gpt2()
    decoder = load(directory).decoder
    assert str(directory) not in Path("/proc/self/maps").read_text()
    expected = decoder._head.lm_head(torch.ones(1, 60)).clone()
    path = directory / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(decoder._head.lm_head(torch.ones(1, 60)), expected)


def test_the_dtype_is_the_checkpoints_or_the_one_that_is_asked_for(make_gpt2):
    directory = make_gpt2(torch.bfloat16)
    assert load(directory).dtype == torch.bfloat16
    model = load(directory, dtype="float32")
    assert model.dtype == model.attention.shape.dtype == torch.float32
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": None}))
    assert load(directory).dtype == torch.bfloat16


def test_it_knows_its_end_tokens_and_its_context(make_gpt2):
    model = load(make_gpt2(), max_model_len=100)
    assert model.spec.eos_token_ids == (7,)
    assert (model.spec.vocab_size, model.max_model_len) == (211, 100)
    with pytest.raises(ConfigError, match=r"max_model_len is 129 but the model's context is 128 "):
        load(make_gpt2(), max_model_len=129)


def test_weights_of_8_bits_and_weights_drawn_at_random_are_served(make_gpt2, caplog):
    directory = make_gpt2()
    with caplog.at_level(logging.INFO, "octavo.model.loader"):
        assert load(directory, quantization="int8").spec.vocab_size == 211
    assert caplog.messages[0].endswith(" bytes, float32, int8 layers")
    (directory / "model.safetensors").unlink()
    assert load(directory, load_format="dummy").spec.vocab_size == 211


@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
def test_weights_of_8_bits_as_a_gpu_has_them_are_served(kind, make_gpt2, monkeypatch):
    monkeypatch.setattr(transformers_loader, "choose_quantization", lambda *_: kind)
    monkeypatch.setattr(layers, "pack_weight", lambda weight, bias, **options: None)
    decoder = load(make_gpt2()).decoder
    modules = [decoder._head.lm_head, *decoder._layers.modules()]
    linears = [module.linear for module in modules if isinstance(module, PackedModule)]
    assert len(linears) == 2 * 4 + 1
    assert {linear._quantized[0].dtype for linear in linears} == {kind}


def test_a_model_with_code_of_its_own_is_served_where_it_is_trusted(make_own):
    directory = make_own()
    with pytest.raises(ConfigError, match=r"set option trust_remote_code to true"):
        load(directory)
    model = load(directory, trust_remote_code=True)
    assert model.spec.architecture == "OwnForCausalLM"


def test_a_model_that_mixes_tokens_unseen_is_not_paged(make_own):
    shift = "e = super().forward(ids); return e + torch.nn.functional.pad(e, (0, 0, 1, 0))[:, :-1]"
    directory = make_own(embed=shift)
    with pytest.raises(NotPaged, match=r"OwnForCausalLM cannot be paged: over paged KV, \d+% of "):
        load(directory, trust_remote_code=True)
    with pytest.raises(ConfigError, match=r"^option model_impl is 'transformers' but OwnForCausal"):
        load(directory, trust_remote_code=True, model_impl="transformers")


def test_a_model_that_is_not_deterministic_is_served_and_said_so(make_own, caplog):
    code = "return x + 1e-4 * x.mean(dim=-2, keepdim=True).relu()"
    directory = make_own(activate=code)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        load(directory, trust_remote_code=True)
    assert "OwnForCausalLM is not deterministic here" in caplog.text


@pytest.mark.parametrize("num_layers", [0, -1])
def test_a_model_without_layers_is_not_paged(num_layers, make_gpt2):
    directory = make_gpt2()
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "n_layer": num_layers}))
    with pytest.raises(NotPaged, match=f"has {num_layers} layers, none of which calls the"):
        load(directory)


@pytest.mark.parametrize("model_impl", ["transformers", "static"])
def test_a_config_far_larger_than_its_files_takes_no_memory(model_impl, make_gpt2):
    directory = make_gpt2()
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 10**9}))
    config = EngineConfig(str(directory), device="cpu", cpu_threads=1, model_impl=model_impl)
    with pytest.raises(ConfigError) as error:
        load_pretrained(config) if model_impl == "static" else load_served_model(config)
    assert str(error.value) == (
        f"the config in {directory} makes a model of 60,000,095,760 parameters but its files hold "
        "108,420"
    )
