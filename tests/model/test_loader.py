import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model import layers, quantization
from octavo.model.checkpoint import Checkpoint
from octavo.model.loader import load_model, read_spec
from octavo.model.location import checkpoint_directory
from octavo_kernels._native.library import native_library


def edit_tensors(directory, edit):
    """Apply `edit` to the dict of tensors in a single-file checkpoint."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    path.unlink()
    save_file(tensors, path)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def message_of(load, directory, **options):
    with pytest.raises(ConfigError) as error:
        load(directory, **options)
    return str(error.value)


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
    edit_json(directory / "config.json", dtype=None)
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
    assert message_of(load, directory, max_model_len=257) == (
        "option max_model_len is 257 but the model's context is 256 tokens"
    )


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


def test_leftover_tensors_that_change_nothing_are_ignored(make_checkpoint, load):
    directory, _ = make_checkpoint("llama", tie_word_embeddings=True)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(directory, add)
    load(directory)


def test_a_projection_that_differs_from_tied_embeddings_is_used(
    make_checkpoint, load, make_driver, make_prompt, caplog
):
    directory, _ = make_checkpoint("llama", tie_word_embeddings=False)
    expected = make_driver(load(directory)).step({"a": make_prompt(9)})
    edit_json(directory / "config.json", tie_word_embeddings=True)
    assert torch.equal(make_driver(load(directory)).step({"a": make_prompt(9)}), expected)
    assert "lm_head.weight is not model.embed_tokens.weight, whatever tie_word" in caplog.text
    edit_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": torch.ones(211, 59)}))
    assert "lm_head.weight has not the shape" in message_of(load, directory)


def test_missing_unexpected_and_misshaped_tensors_are_all_named(make_checkpoint, load):
    directory, _ = make_checkpoint("llama")

    def spoil(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.ones(2)
        tensors["model.norm.weight"] = torch.ones(61)

    edit_tensors(directory, spoil)
    assert message_of(load, directory) == (
        f"the tensors in {directory} do not fit its config; "
        "missing: model.layers.1.mlp.up_proj.weight; "
        "unexpected: model.layers.3.mlp.up_proj.weight; "
        "wrong shape: model.norm.weight [61] instead of [60]"
    )


def test_a_long_list_of_tensors_is_cut(make_checkpoint, load):
    directory, _ = make_checkpoint("llama")
    edit_json(directory / "config.json", num_hidden_layers=2)
    message = message_of(load, directory)
    assert "unexpected: model.layers.2." in message
    assert message.endswith(" and 5 more")


def test_tensors_of_integers_are_refused(make_checkpoint, load):
    directory, _ = make_checkpoint("llama")
    edit_tensors(directory, lambda t: t.update({"model.norm.weight": torch.ones(60).char()}))
    assert "dtype not supported: model.norm.weight I8" in message_of(load, directory)


@pytest.mark.parametrize("num_bytes", [0, 5, 1000, -1])
def test_a_truncated_file_is_named(num_bytes, make_checkpoint, load):
    directory, _ = make_checkpoint("llama")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert message_of(load, directory).startswith(f"{path} is damaged or not a safetensors file: ")


def test_a_missing_shard_is_named(make_checkpoint, load):
    directory, _ = make_checkpoint("llama", max_shard_size="60KB")
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert message_of(load, directory) == f"weights {shard} do not exist"


def test_an_index_that_disagrees_with_its_shards_is_refused(make_checkpoint, load):
    directory, _ = make_checkpoint("llama", max_shard_size="60KB")
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    last = weight_map["model.norm.weight"]
    edit_json(index, weight_map={**weight_map, "model.ghost": last})
    assert message_of(load, directory) == (
        f"{index} says tensor model.ghost is in {last}, but it is not"
    )
    edit_json(index, weight_map={"model.norm.weight": "../elsewhere.safetensors"})
    assert "'../elsewhere.safetensors', which is not a file name" in message_of(load, directory)
    edit_json(index, weight_map=[])
    assert "must have a weight_map" in message_of(load, directory)


def test_a_tensor_stored_twice_is_refused(make_checkpoint, load):
    directory, _ = make_checkpoint("llama", max_shard_size="60KB")
    first, second = sorted(directory.glob("model-*.safetensors"))[:2]
    save_file({**load_file(second), **dict(list(load_file(first).items())[:1])}, second)
    assert f"is in both {first} and {second}" in message_of(load, directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[]", "must hold a JSON object"),
    ],
)
def test_a_damaged_config_is_named(content, message, make_checkpoint, load):
    directory, _ = make_checkpoint("llama")
    path = directory / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    text = message_of(load, directory)
    assert text.startswith(str(path))
    assert message in text


def test_what_is_no_model_is_refused(tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("hello")
    for model, message in {
        str(note): "is a file but must be a directory or a .gguf file",
        str(tmp_path / "absent"): "does not exist; name a checkpoint directory",
        "~nobody-of-this-name/model": "does not exist; name a checkpoint directory",
        "/" + "p" * 5000: "does not exist; name a checkpoint directory",
        "no-slash": "does not exist; name a checkpoint directory",
        str(tmp_path / "absent.gguf"): "does not exist",
    }.items():
        with pytest.raises(ConfigError, match=message):
            checkpoint_directory(model)


def test_a_hub_that_cannot_be_reached_is_said_so(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="'nobody/nothing' is no local path and cannot be down"):
        checkpoint_directory("nobody/nothing")


def test_a_cuda_device_the_machine_lacks_is_refused(make_checkpoint):
    directory, _ = make_checkpoint("llama")
    with pytest.raises(ConfigError, match=r"device is 'cuda:99' but this machine has \d+ CUDA"):
        load_model(EngineConfig(model=str(directory), device="cuda:99"))


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
    make_checkpoint, load, make_driver, make_prompt
):
    directory, _ = make_checkpoint("qwen2")
    (directory / "model.safetensors").unlink()
    assert "do not exist" in message_of(load, directory)
    first, second = (
        make_driver(load(directory, load_format="dummy")).step({"a": make_prompt(30)})
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert first.std() > 0.1


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
