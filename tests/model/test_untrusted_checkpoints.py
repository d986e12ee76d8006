"""Checkpoints that anyone may have made: pickles, code, and files that lie about what they hold."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from octavo.errors import ConfigError
from octavo.model.loader import read_spec
from octavo.model.location import checkpoint_directory
from octavo.text.tokenizer import Tokenizer

EDGES = (0, 1, 7, 8, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def to_pickles(directory, *shards, **options):
    """Turn the safetensors of a checkpoint into pickled shards, or into one pickled file."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    if not shards:
        torch.save(tensors, directory / "pytorch_model.bin", **options)
        return
    weight_map = {name: shards[index % len(shards)] for index, name in enumerate(tensors)}
    for shard in shards:
        torch.save({n: t for n, t in tensors.items() if weight_map[n] == shard}, directory / shard)
    index = directory / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def message_of(load, directory, **options):
    with pytest.raises(ConfigError) as error:
        load(directory, **options)
    return str(error.value)


def refusal(load, directory):
    """Return the message of a ConfigError, or nothing; other exceptions are not caught."""
    try:
        load(directory)
    except ConfigError as error:
        return str(error)
    return ""


class Harmful:
    """Unpickled as Python's own pickle does it, this makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("ending", ["bin", "pt", "pth", "ckpt"])
def test_pickled_weights_are_refused_with_the_option_that_allows_them(
    ending, make_checkpoint, load
):
    directory, _ = make_checkpoint("llama")
    (directory / "model.safetensors").rename(directory / f"pytorch_model.{ending}")
    assert message_of(load, directory) == (
        f"{directory} holds only pickled weights, which are refused because such files can carry "
        "code; convert them to safetensors, or set option allow_pickle to true if you trust where "
        "they come from"
    )


@pytest.mark.parametrize("shards", [(), ("a.bin", "b.bin")], ids=["whole", "sharded"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_allowed_pickles_load_to_the_bits_of_safetensors(
    shards, zipped, make_checkpoint, load, make_driver, make_prompt
):
    directory, _ = make_checkpoint("llama")
    expected = make_driver(load(directory)).step({"a": make_prompt(30)})
    options = {} if shards else {"_use_new_zipfile_serialization": zipped}
    to_pickles(directory, *shards, **options)
    model = load(directory, allow_pickle=True)
    assert torch.equal(make_driver(model).step({"a": make_prompt(30)}), expected)


def test_safetensors_are_read_even_where_pickles_are_allowed(make_checkpoint, load, tmp_path):
    directory, _ = make_checkpoint("llama")
    trap = tmp_path / "ran"
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(trap), 2))
    load(directory, allow_pickle=True)
    assert not trap.exists()


def test_an_allowed_pickle_still_runs_no_code(make_checkpoint, load, tmp_path):
    directory, _ = make_checkpoint("llama")
    (directory / "model.safetensors").unlink()
    path, trap = directory / "pytorch_model.bin", tmp_path / "ran"
    path.write_bytes(pickle.dumps(Harmful(trap), 2))
    message = message_of(load, directory, allow_pickle=True)
    assert message.startswith(f"{path} is damaged or holds more than tensors, and nothing else of ")
    torch.save({"model.norm.weight": Harmful(trap)}, path)
    assert "holds more than tensors" in message_of(load, directory, allow_pickle=True)
    assert not trap.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02", b"x" * 1000])
def test_a_damaged_pickle_is_named(content, make_checkpoint, load):
    directory, _ = make_checkpoint("llama")
    (directory / "model.safetensors").unlink()
    path = directory / "pytorch_model.bin"
    path.write_bytes(content)
    assert message_of(load, directory, allow_pickle=True).startswith(f"{path} is damaged or ")


def test_a_pickle_of_something_else_than_tensors_by_name_is_refused(make_checkpoint, load):
    directory, _ = make_checkpoint("llama")
    (directory / "model.safetensors").unlink()
    path = directory / "pytorch_model.bin"
    for values in ([torch.ones(2)], {"a": 1}, {1: torch.ones(2)}):
        torch.save(values, path)
        assert message_of(load, directory, allow_pickle=True) == (
            f"{path} must hold tensors by name and nothing else"
        )


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "..", "", "a\0b", 5, None]
)
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_leads_to_no_file_outside_the_checkpoint(name, kind, make_checkpoint, load):
    directory, _ = make_checkpoint("llama")
    (directory / "model.safetensors").rename(directory / "x.bin")
    index = directory / f"{kind}.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    message = message_of(load, directory, allow_pickle=True)
    assert message == f"{index} names {name!r}, which is not a file name"


def test_a_config_that_names_code_needs_trust(make_checkpoint, load):
    directory, _ = make_checkpoint("llama")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Evil"}}))
    assert message_of(load, directory).startswith(
        f"{path} says that code of its own (auto_map) belongs to the model; set option "
        "trust_remote_code to true"
    )
    assert load(directory, trust_remote_code=True).spec.num_layers == 3


def test_a_tokenizers_code_is_run_only_where_it_is_trusted(tmp_path):
    trap = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(trap)!r})\nclass Evil: pass\n")
    config = {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        Tokenizer.load(str(tmp_path))
    assert str(error.value) == (
        f"the tokenizer of {str(tmp_path)!r} needs code that it brings along; set option "
        "trust_remote_code to true if you have read that code and trust it"
    )
    assert not trap.exists()


@pytest.mark.parametrize(
    ("options", "safe", "wanted"),
    [
        ({}, True, [set()]),
        ({}, False, [set()]),
        ({"trust_remote_code": True}, True, [{"*.py"}]),
        ({"allow_pickle": True}, True, [set()]),
        ({"allow_pickle": True}, False, [set(), {"*.bin", "*.pt", "*.pth", "*.ckpt"}]),
    ],
)
def test_pickles_and_code_are_downloaded_only_if_they_may_be_used(
    options, safe, wanted, monkeypatch, tmp_path
):
    asked = []

    def download(hub_id, allow_patterns):
        asked.append(set(allow_patterns))
        if safe:
            (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert checkpoint_directory("some/model", **options) == tmp_path
    harmless = {"*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"}
    assert [patterns - harmless for patterns in asked] == wanted


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """Return a folder to spoil, and the bytes of its weights."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    folder = tmp_path_factory.mktemp("honest")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder, (folder / "model.safetensors").read_bytes()


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_safetensors_that_lie_load_or_are_refused_and_nothing_else(data, honest, load):
    folder, whole = honest
    (header_length,) = struct.unpack("<Q", whole[:8])
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(header_length + 7, len(content) - 1)))
        match data.draw(st.sampled_from(["byte", "number", "digits", "cut"])):
            case "byte":
                content[at] = data.draw(st.integers(0, 255))
            case "number":
                content[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from(EDGES)))
            case "digits":
                content[at : at + 4] = b"9" * data.draw(st.sampled_from([4, 30]))
            case "cut":
                content = content[: at + 8]
    path = Path(folder) / "model.safetensors"
    path.unlink()  # the file before may still be mapped
    path.write_bytes(content)
    assert len(refusal(load, folder)) < 4000


LIES = [None, 0, -1, 1.5, float("nan"), float("inf"), 10**30, "x", [], [1], ["x"], {}, {"a": 1}]
LIES += [True, {"rope_type": ["x"]}, {"rope_type": "llama3", "factor": "x"}, [[1]], 2**31]


def test_any_field_of_a_config_may_lie(honest, tmp_path):
    config = json.loads((honest[0] / "config.json").read_text())
    more = ("rope_scaling", "sliding_window", "layer_types", "quantization_config", "auto_map")
    for name in (*config, *more):
        for lie in LIES:
            (tmp_path / "config.json").write_text(json.dumps({**config, name: lie}))
            assert len(refusal(read_spec, tmp_path)) < 500


@pytest.mark.parametrize("name", ["num_hidden_layers", "max_position_embeddings"])
def test_a_config_cannot_make_the_loader_reserve_without_end(name, honest, tmp_path):
    config = json.loads((honest[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: 2**31 - 1}))
    with pytest.raises(ConfigError, match=rf"has {name} = 2147483647 but must have at most "):
        read_spec(tmp_path)
