import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from octavo.errors import ConfigError
from octavo.model import layers, quantization
from octavo.model.checkpoint import Checkpoint
from octavo.model.loader import read_spec
from octavo_kernels._native.library import native_library


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_sharded_checkpoint_loads_to_the_bits_of_a_single_file(
    model_type, make_checkpoint, load, make_driver, make_prompt
):
    directory, _ = make_checkpoint(model_type, head_dim=16)
    single = make_driver(load(directory)).step({"a": make_prompt(30)})
    shutil.rmtree(directory)
    directory, _ = make_checkpoint(model_type, head_dim=16, max_shard_size="60KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    assert torch.equal(make_driver(load(directory)).step({"a": make_prompt(30)}), single)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_are_not_packed_do_not_share_memory(
    tied, make_checkpoint, load, make_driver, make_prompt, monkeypatch
):
    directory, _ = make_checkpoint("llama", tie_word_embeddings=tied)
    packed = make_driver(load(directory)).step({"a": make_prompt(30)})
    monkeypatch.setattr(layers, "pack_weight", lambda weight, bias, **options: None)
    monkeypatch.setattr(layers, "_pack", lambda weight: None)
    plain = make_driver(load(directory)).step({"a": make_prompt(30)})
    torch.testing.assert_close(plain, packed, rtol=1e-4, atol=1e-5)


def test_auto_dtype_is_the_configs_and_an_option_converts(make_checkpoint, load):
    directory, _ = make_checkpoint("llama", dtype=torch.bfloat16)
    assert load(directory).dtype == torch.bfloat16
    converted = load(directory, dtype="float32")
    assert converted.dtype == torch.float32
    assert converted.attention.shape.dtype == torch.float32
    assert converted.decoder.weights.embedding.dtype == torch.float32


def test_auto_dtype_is_that_of_the_tensors_where_the_config_names_none(make_checkpoint, load):
    directory, _ = make_checkpoint("llama", dtype=torch.bfloat16)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": None}))
    assert load(directory).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_every_linear_is_told_whether_rows_may_depend_on_each_other(tied, make_checkpoint, load):
    directory, _ = make_checkpoint("llama", tie_word_embeddings=tied)
    for deterministic in (True, False):
        weights = load(directory, deterministic=deterministic).decoder.weights
        linears = [weights.lm_head]
        for layer in weights.layers:
            linears += [layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down]
        assert {linear.deterministic for linear in linears} == {deterministic}


def test_loaded_model_tells_its_kv_shape_and_context(make_checkpoint, load):
    directory, _ = make_checkpoint("qwen3", head_dim=22)
    model = load(directory, block_size=32, max_model_len=100)
    shape = model.attention.shape
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, 2, 22)
    assert shape.block_size == 32
    assert model.max_model_len == model.decoder.max_len == 100
    assert load(directory).max_model_len == 256
    assert model.directory == directory


def test_a_context_beyond_the_models_is_refused(make_checkpoint, load):
    directory, _ = make_checkpoint("llama")
    with pytest.raises(
        ConfigError,
        match=r"^option max_model_len is 257 but the model's context is 256 tokens$",
    ):
        load(directory, max_model_len=257)


def test_weights_do_not_depend_on_the_files_once_loaded(
    make_checkpoint, load, make_driver, make_prompt
):
    directory, _ = make_checkpoint("llama", tie_word_embeddings=True)
    model = load(directory)
    before = make_driver(model).step({"a": make_prompt(30)})
    path = directory / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(make_driver(model).step({"a": make_prompt(30)}), before)


def test_generation_config_names_the_end_tokens(make_checkpoint):
    directory, _ = make_checkpoint("llama", eos_token_id=7)
    (directory / "generation_config.json").unlink()
    assert read_spec(directory).eos_token_ids == (7,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_spec(directory).eos_token_ids == (7, 9)
    (directory / "generation_config.json").write_text('{"temperature": 0.6}')
    assert read_spec(directory).eos_token_ids == (7,)


@pytest.mark.skipif(native_library() is None, reason="no native code is built here")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_int8_quantizes_every_linear_layer_and_nothing_else(make_checkpoint, load, dtype, tied):
    directory, model = make_checkpoint("llama", tie_word_embeddings=tied)
    weights = load(directory, dtype, quantization="int8").decoder.weights
    linears = [weights.lm_head]
    for layer in weights.layers:
        linears += [layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down]
    assert {linear.native.panels.dtype for linear in linears} == {torch.uint8}
    assert weights.embedding.dtype == getattr(torch, dtype)
    embedding = model.get_input_embeddings().weight
    assert torch.equal(
        weights.embedding(torch.arange(9)), embedding[:9].to(weights.embedding.dtype)
    )


def test_int8_without_native_code_is_refused(make_checkpoint, load, monkeypatch):
    monkeypatch.setattr(quantization, "packs_weights", lambda dtype, device: False)
    directory, _ = make_checkpoint("llama")
    with pytest.raises(
        ConfigError,
        match="quantization is 'int8', which takes native code, and none serves "
        "bfloat16 on cpu here; it must be 'none'",
    ):
        load(directory, "bfloat16", quantization="int8")


def test_dummy_weights_need_no_weight_file_and_are_the_same_in_every_load(
    make_checkpoint, load, make_driver, make_prompt, caplog
):
    directory, _ = make_checkpoint("qwen2")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="do not exist"):
        load(directory)
    first, second = (
        make_driver(load(directory, load_format="dummy")).step({"a": make_prompt(30)})
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert first.std() > 0.1
    warning = f"weights of {directory} are drawn at random: its answers mean nothing"
    assert caplog.messages == [warning] * 2


@pytest.mark.parametrize("tied", [True, False])
def test_each_tensor_is_read_once(tied, make_checkpoint, load, monkeypatch):
    directory, _ = make_checkpoint("llama", tie_word_embeddings=tied)
    read = []
    tensor = Checkpoint.tensor

    def count(checkpoint, name, *part):
        read.append(name)
        return tensor(checkpoint, name, *part)

    monkeypatch.setattr(Checkpoint, "tensor", count)
    load(directory)
    assert sorted(read) == sorted(load_file(directory / "model.safetensors"))
