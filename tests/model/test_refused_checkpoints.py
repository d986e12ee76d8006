"""A checkpoint that is not whole or not what its config says is refused by what is wrong in it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model.loader import load_model
from octavo.model.location import checkpoint_directory


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
