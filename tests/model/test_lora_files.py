"""An adapter that does not fit the model, or is not plain LoRA, is refused by name."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model.lora_files import LoraFiles
from octavo.model.lora_list import adapter_directories, read_adapter_list
from octavo.model.lora_reader import check_fits

SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {"self_attn.q_proj": (12, 8), "mlp.down_proj": (8, 20)}.items()
}
Q0, DOWN0, Q1, DOWN1 = SHAPES
CONFIG = {
    "peft_type": "LORA",
    "r": 3,
    "lora_alpha": 6,
    "target_modules": ["q_proj"],
    "bias": "none",
    "lora_dropout": 0.1,
    "init_lora_weights": True,
    "modules_to_save": None,
    "use_dora": False,
    "task_type": "CAUSAL_LM",
}


def tensors(*modules: str, rank: int = 3) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors, random."""
    made = {}
    for module in modules:
        out_features, in_features = SHAPES[module]
        made[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, in_features)
        made[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out_features, rank)
    return made


@pytest.fixture
def save(tmp_path):
    """Return a function: write an adapter, the usual one but for what is given."""

    def write(weights: dict[str, torch.Tensor] | None = None, **config: object) -> Path:
        values = {**CONFIG, **config}
        (tmp_path / "adapter_config.json").write_text(json.dumps(values))
        save_file(weights or tensors(Q0, Q1), tmp_path / "adapter_model.safetensors")
        return tmp_path

    return write


def read(directory: Path) -> LoraFiles:
    return LoraFiles(directory, SHAPES, max_rank=8)


def test_pairs_are_read_as_float32_with_their_factor(save):
    weights = {name: tensor.bfloat16() for name, tensor in tensors(Q0, Q1).items()}
    files = read(save(weights))
    assert files.modules == (Q0, Q1)
    pair = files.pair(Q1)
    assert torch.equal(pair.down, weights[f"base_model.model.{Q1}.lora_A.weight"].float())
    assert torch.equal(pair.up, weights[f"base_model.model.{Q1}.lora_B.weight"].float() * 2.0)


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        ({}, [2.0, 1.2]),
        ({"use_rslora": True}, [6 / 3**0.5, 6 / 5**0.5]),
        ({"alpha_pattern": {"down_proj": 10}}, [2.0, 2.0]),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 30}}, [10.0, 1.2]),
        ({"alpha_pattern": {"self_attn\\.q_proj$": 30, "q_proj": 3}}, [10.0, 1.2]),
        ({"alpha_pattern": {"_proj": 30}}, [2.0, 1.2]),
    ],
)
def test_factors_are_those_of_peft(config, factors, save):
    weights = tensors(Q0) | tensors(DOWN0, rank=5)
    options = {"target_modules": [Q0, DOWN0], "rank_pattern": {"down_proj": 5}}
    files = read(save(weights, **options, **config))
    for module, factor in zip((Q0, DOWN0), factors, strict=True):
        up = weights[f"base_model.model.{module}.lora_B.weight"]
        torch.testing.assert_close(files.pair(module).up, up * factor)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ".*q_proj"},
        {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["down_proj"]},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 1]},
    ],
    ids=["pattern", "excluded", "some layers"],
)
def test_where_targets_are_not_listed_the_tensors_say_what_is_adapted(config, save):
    assert read(save(**config)).modules == (Q0, Q1)


def test_a_version_is_what_the_files_hold(save):
    weights = tensors(Q0, Q1)
    versions = [read(save(weights)).version, read(save(weights)).version]
    versions.append(read(save(weights, lora_alpha=7)).version)
    weights[f"base_model.model.{Q0}.lora_B.weight"][0, 0] += 1.0
    versions.append(read(save(weights)).version)
    assert versions[0] == versions[1]
    assert len(set(versions)) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "has use_dora, but DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save, but a module that is replaced"),
        ({"lora_bias": True}, "has lora_bias, but a bias of the adapter's own is not"),
        ({"trainable_token_indices": [1]}, "has trainable_token_indices, but an embedding"),
        ({"layer_replication": [[0, 1]]}, "has layer_replication, but a layer that is there"),
        ({"alora_invocation_tokens": [5]}, "has alora_invocation_tokens, but an adapter that"),
        ({"bias": "all"}, "has bias = 'all' but must have one of none"),
        ({"peft_type": "IA3"}, "has peft_type = 'IA3' but must have one of LORA"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights = 'pissa' but must have one of"),
        ({"r": 0}, "has r = 0 but must have a positive integer"),
        ({"lora_alpha": None}, "has no lora_alpha, which is needed"),
        ({"rank_pattern": {"(a+)+b": 4}}, "has rank_pattern = '(a+)+b' but must have names of"),
        ({"alpha_pattern": {"q_proj": -1}}, "has alpha_pattern of 'q_proj' = -1 but must have a"),
        ({"rank_pattern": [4]}, "has rank_pattern = [4] but must have an object"),
        ({"new_field": 1}, "has new_field = 1, which is not understood"),
    ],
)
def test_what_is_not_plain_lora_is_refused(config, message, save):
    directory = save(**config)
    with pytest.raises(ConfigError, match=re.escape(f"adapter_config.json {message}")):
        read(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {f"base_model.model.{Q0}.lora_B.weight": None},
            f"do not fit; missing: base_model.model.{Q0}.lora_B.weight",
        ),
        (
            {
                f"base_model.model.{Q1}.lora_A.weight": None,
                f"base_model.model.{Q1}.lora_B.weight": None,
            },
            f"missing: base_model.model.{Q1}.lora_A.weight, base_model.model.{Q1}.lora_B.weight",
        ),
        (
            tensors(DOWN1),
            f"not among target_modules: {DOWN1}",
        ),
        (
            {
                "base_model.model.lm_head.lora_A.weight": torch.ones(3, 8),
                "base_model.model.lm_head.lora_B.weight": torch.ones(9, 3),
            },
            "of no linear layer that can be adapted: lm_head",
        ),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(3, 9)},
            "not of plain LoRA: base_model.model.model.embed_tokens.lora_embedding_A",
        ),
        (
            {f"base_model.model.{Q0}.lora_A.weight": torch.ones(3, 9)},
            f"has {Q0}.lora_A.weight of shape [3, 9] but it must be [3, 8], for the adapter's",
        ),
        (
            {f"base_model.model.{Q0}.lora_B.weight": torch.ones(12, 2)},
            f"has {Q0}.lora_B.weight of shape [12, 2] but it must be [12, 3]",
        ),
        (
            {f"base_model.model.{Q0}.lora_A.weight": torch.ones(3, 8, dtype=torch.int8)},
            f"has {Q0}.lora_A.weight of I8 but must have one of BF16, F16, F32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, save):
    weights = {**tensors(Q0, Q1), **change}
    directory = save({name: each for name, each in weights.items() if each is not None})
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(directory)


@pytest.mark.parametrize(
    ("end", "dtype", "value", "alpha"),
    [
        ("lora_A", torch.bfloat16, float("nan"), 6),
        ("lora_B", torch.float16, float("-inf"), 6),
        ("lora_B", torch.float32, 1e38, 600),
    ],
)
def test_numbers_that_are_none_are_refused(end, dtype, value, alpha, save):
    """Those too that overflow with the adapter's factor."""
    weights = {name: each.to(dtype) for name, each in tensors(Q0, Q1).items()}
    weights[f"base_model.model.{Q1}.{end}.weight"][1, 2] = value
    files = read(save(weights, lora_alpha=alpha))
    files.pair(Q0)
    message = f"adapter_model.safetensors has NaN or infinity in {Q1}.{end}.weight"
    with pytest.raises(ConfigError, match=re.escape(message)):
        files.pair(Q1)


def test_a_rank_above_the_limit_is_refused(save):
    message = f"has rank 9 for {Q0} but option max_lora_rank is 8"
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(save(tensors(Q0, Q1, rank=9), r=9))


def test_a_truncated_file_is_refused(save):
    directory = save()
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="is damaged or no safetensors file"):
        read(directory)


def test_pickled_weights_are_refused(save):
    directory = save()
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    message = r"adapter_model\.bin is pickled; convert it to adapter_model\.safetensors$"
    with pytest.raises(ConfigError, match=message):
        read(directory)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_refused_and_never_waited_for(make, name, save):
    path = save() / name
    path.unlink()
    make(path)
    with pytest.raises(ConfigError, match=rf"{name} cannot be read( as JSON)?: it is no file$"):
        read(path.parent)


def test_a_folder_that_is_closed_to_us_is_named(save, monkeypatch):
    """As the system says it of all that is in it; who runs tests may be one who can read all."""
    directory = save()

    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for name in ("stat", "open"):
        monkeypatch.setattr(os, name, refuse)
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read: .*denied"):
        read(directory)


def test_a_list_of_adapters_names_directories_from_where_it_is(tmp_path):
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
    path = tmp_path / "multi_lora.json"
    path.write_text(json.dumps({"a": "near", "b": str(tmp_path / "far")}))
    assert read_adapter_list(path) == {"a": tmp_path / "near", "b": tmp_path / "far"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must hold a JSON object"),
        ("{", "cannot be read as JSON"),
        ('{"a": ".", "b": ".", "a": "c"}', "cannot be read as JSON: 'a' is there more than once"),
        ('{"": "."}', "names '', but names have 1 to 256 characters"),
        ('{"a": 1}', "has 1 for 'a' but must have a path"),
        ('{"a": "gone"}', "no directory"),
        ('{"a": "~nobody-of-this-name/a"}', "no directory"),
        (json.dumps({"a": "/" + "p" * 5000}), "no directory"),
        (r'{"\ud800": "."}', r"names '\ud800', but names have 1 to 256 characters of UTF-8"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused(content, message, tmp_path):
    path = tmp_path / "multi_lora.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_adapter_list(path)


def test_adapters_need_a_list():
    message = "^option enable_lora is true but multi_lora does not name a file$"
    with pytest.raises(ConfigError, match=message):
        adapter_directories(EngineConfig("x", enable_lora=True))


def test_a_list_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"multi_lora\.json cannot be read"):
        read_adapter_list(tmp_path / "multi_lora.json")


def test_adapters_that_do_not_fit_the_memory_are_refused():
    check_fits(3, 3000, free_bytes=3000)
    message = "^3 adapters take 3,000 bytes but only 2,999 are free; lower max_loras, or list"
    with pytest.raises(ConfigError, match=message):
        check_fits(3, 3000, free_bytes=2999)
