from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.errors import ConfigError
from octavo.model import gguf_weights
from octavo.model.gguf_checkpoint import convert_gguf, read_gguf
from octavo.model.gguf_weights import round_to_bfloat16, write_safetensors

MakeModel = Callable[..., Any]
MakeGguf = Callable[..., Path]


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16])
@pytest.mark.parametrize("case", ["mistral", "mixtral", "gemma"])
def test_numbers_that_are_not_quantised_are_kept_to_the_bit_and_computed_in_bfloat16(
    case: str, kind: GGMLQuantizationType, make_model: MakeModel, make_gguf: MakeGguf, tmp_path
) -> None:
    model = make_model(case, hidden_size=96)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        if case == "gemma" or (kind == GGMLQuantizationType.F16 and parameter.ndim > 1):
            # The file has norms of Gemma plus one, in which the last bits of small ones are lost.
            parameter.data = parameter.data.half().float()
    model.model.embed_tokens.weight.data[5, 5] = -0.0
    convert_gguf(make_gguf(model=model, kind=kind), tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name].view(torch.int32), tensor.view(torch.int32)), name
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_numbers_that_are_quantised_are_rounded_to_bfloat16(
    make_model: MakeModel, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    model = make_model("mistral", hidden_size=96, intermediate_size=96)
    convert_gguf(make_gguf(model=model, kind=GGMLQuantizationType.Q8_0), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        dtypes = {name: tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if "norm" in name else torch.bfloat16), name


def test_numbers_of_any_size_are_rounded_as_torch_rounds_them() -> None:
    patterns = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    extremes = np.array([np.inf, -np.inf, 3.4028235e38, -3.4028235e38, 1e-45, np.nan], np.float32)
    values = np.concatenate([patterns.view(np.float32), extremes])
    rounded = torch.from_numpy(round_to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)


def test_weights_are_written_some_rows_at_a_time(
    make_model: MakeModel, make_gguf: MakeGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_gguf(make_gguf(model=make_model("mistral", vocab_size=20_000)))
    at_once, in_pieces = tmp_path / "at_once", tmp_path / "in_pieces"
    write_safetensors(model.file, at_once, model.tensors)
    monkeypatch.setattr(gguf_weights, "_CHUNK_VALUES", 1000)
    tracemalloc.start()
    write_safetensors(model.file, in_pieces, model.tensors)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert in_pieces.read_bytes() == at_once.read_bytes()
    # Its largest tensor alone has 3.8 MB.
    assert most < 2**19


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["12", "3", "4", "5", "Ġ", "hi"]),
        ("smollm", ["1", "2", "3", "4", "5", "Ġ", "hi"]),
        ("qwen2", ["1", "2", "3", "4", "5", "Ġ", "hi"]),
        ("llama-bpe", ["<bos>", "12", "3", "4", "5", "Ġ", "hi"]),
    ],
)
def test_each_pre_tokeniser_cuts_digits_its_own_way(
    pre: str, pieces: list[str], make_gguf: MakeGguf, tmp_path: Path
) -> None:
    convert_gguf(make_gguf({"tokenizer.ggml.pre": pre}), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("12345 hi", add_special_tokens=True) == pieces


def test_control_and_user_tokens_are_matched_in_text_and_only_control_ones_are_special(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    convert_gguf(tiny_gguf, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("<eos>hi<tool>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<eos>", "hi", "<tool>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi<tool>"


def test_a_first_token_is_added_when_the_file_asks_for_it(
    make_gguf: MakeGguf, tmp_path: Path
) -> None:
    asked = {"tokenizer.ggml.add_bos_token": True}
    convert_gguf(make_gguf(asked), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hi")) == ["<bos>", "hi"]


def test_end_of_turn_and_end_of_text_both_end_a_text(make_gguf: MakeGguf, tmp_path: Path) -> None:
    both = {"tokenizer.ggml.eot_token_id": 5}
    convert_gguf(make_gguf(both), tmp_path)
    config = json.loads((tmp_path / "generation_config.json").read_text())
    assert config["eos_token_id"] == [1, 5]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.architecture": "bloom"}, "architecture 'bloom' is not supported; allowed are"),
        ({"tokenizer.ggml.pre": "odd"}, "pre-tokeniser 'odd' is not supported; allowed are gpt-2"),
        ({"tokenizer.ggml.pre": None}, "pre-tokeniser 'absent' is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"llama.block_count": None}, "has no 'llama.block_count' in its metadata"),
        ({"llama.block_count": 5000}, "has block_count 5,000, more than 4,096"),
        ({"llama.block_count": "4"}, "llama.block_count is '4' but must be an integer"),
        ({"llama.attention.head_count": [6, 6]}, r"is \[6, 6\] but must be an integer"),
        ({"llama.attention.value_length": 4}, "must have value_length 8, the size of a head"),
        ({"llama.vocab_size": 262}, "must have vocab_size 261, as token_embd.weight"),
        ({"llama.odd": 1, "llama.attention.more": 2}, "llama.attention.more, llama.odd is not"),
        ({"llama.rope.dimension_count": 2}, "rotates 2 of a head's 8 entries but must rotate all"),
        ({"llama.rope.scaling.type": "ntk"}, "rope scaling 'ntk' with tensors .* is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "has no 'llama.rope.scaling.factor'"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_attn_factor": 1.5,
            },
            "yarn factors 1.0 and 1.5 are not supported",
        ),
        ({"llama.expert_count": 4}, "has no 'llama.expert_used_count' in its metadata"),
        ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token, which ends all prompts"),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(300)]}, "300 tokens, .* and 261 types"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos token is 999 but the vocabulary has 261"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "vocabulary has 2 tokens, 1 of them distinct"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    metadata: dict[str, Any], reason: str, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        convert_gguf(make_gguf(metadata), tmp_path)


def test_an_unknown_tensor_is_refused_by_name(
    make_model: MakeModel, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    model = make_model("linear", rope_parameters=None)
    model.model.layers[0].router = torch.nn.Linear(2, 2)
    with pytest.raises(
        ConfigError, match=r"tiny.gguf do not fit its config; unexpected: blk.0.router.w"
    ):
        convert_gguf(make_gguf(model=model), tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(100)])
def test_a_file_that_is_not_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a whole GGUF file"):
        convert_gguf(path, tmp_path)


def test_a_truncated_file_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    for size in (len(content) // 100, len(content) // 2, len(content) - 1):
        tiny_gguf.write_bytes(content[:size])
        with pytest.raises(ConfigError, match="is not a whole GGUF file"):
            convert_gguf(tiny_gguf, tmp_path)
