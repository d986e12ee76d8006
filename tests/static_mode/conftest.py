"""Tiny random checkpoints that cannot be paged, and what transformers generates with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

EOS = 7
VOCAB_SIZE = 257
"""A byte each, and the end of text."""
_IDS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
_STATE_SPACE = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
_ATTENTION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LATENT = {
    **_ATTENTION,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 96,
}
#: Config fields by model_type.
RECIPES: dict[str, dict[str, Any]] = {
    "mamba": _STATE_SPACE,
    "mamba2": {**_STATE_SPACE, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": _STATE_SPACE,
    "jamba": {
        **_ATTENTION,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "bamba": {
        **_ATTENTION,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "recurrent_gemma": {
        **_ATTENTION,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "lru_width": 32,
        "attention_window_size": 16,
    },
    "llama": _ATTENTION,
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "falcon": {
        **_ATTENTION,
        "alibi": True,
        "new_decoder_architecture": False,
        "multi_query": False,
    },
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "bart": {**_BART, "decoder_start_token_id": EOS},
    "marian": {**_BART, "decoder_start_token_id": 0},
}


@pytest.fixture(params=sorted(RECIPES))
def architecture(request: pytest.FixtureRequest) -> str:
    """Each recipe's name."""
    return str(request.param)


@pytest.fixture(scope="session")
def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose tokens are single bytes, but for the end of text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters[:EOS], "<end>", *letters[EOS:]]
    tokenizer = Tokenizer(BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.fixture(scope="session")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: transformers.PreTrainedTokenizerFast
) -> Callable[[str], Path]:
    """Return a function that makes the checkpoint of a recipe, once."""
    root = tmp_path_factory.mktemp("static")

    def make(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            _random_model(name).save_pretrained(folder)
            byte_tokenizer.save_pretrained(folder)
        return folder

    return make


def _random_model(name: str) -> Any:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(name, **{**_IDS, **RECIPES[name]})
    model = _factory(config).from_config(config, dtype=torch.float32)
    for key, parameter in model.named_parameters():
        # The default initialisation is so small that every logit is nearly the same.
        is_own = any(part in key for part in ("norm", "A_log", "dt", ".D", "time_", "rg_lru"))
        if parameter.requires_grad and not is_own:
            parameter.data.normal_(std=0.8 if config.is_encoder_decoder else 0.3)
    # transformers would make the last token that fits the end of text, whatever the model says.
    model.generation_config.forced_eos_token_id = None
    if name == "bart":
        model.generation_config.forced_bos_token_id = 3
    return model


def _factory(config: Any) -> Any:
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


@pytest.fixture(scope="session")
def generate_alone(checkpoint: Callable[[str], Path]) -> Callable[..., list[int]]:
    """Return a function that gives what transformers generates greedily after one prompt."""
    models: dict[str, Any] = {}

    def generate(name: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        if name not in models:
            config = transformers.AutoConfig.from_pretrained(checkpoint(name))
            models[name] = _factory(config).from_pretrained(checkpoint(name))
        token_ids = torch.tensor([prompt])
        answer = models[name].generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        begins = 1 if models[name].config.is_encoder_decoder else len(prompt)
        return list(answer[0, begins:].tolist())

    return generate
