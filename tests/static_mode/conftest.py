"""Tiny random checkpoints that cannot be paged, and what transformers generates with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.tiny_models import EOS, STATIC, save_static, static_factory
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE


@pytest.fixture(params=sorted(STATIC))
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
            save_static(name, folder)
            byte_tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def generate_alone(checkpoint: Callable[[str], Path]) -> Callable[..., list[int]]:
    """Return a function that gives what transformers generates greedily after one prompt."""
    models: dict[str, Any] = {}

    def generate(name: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        if name not in models:
            config = transformers.AutoConfig.from_pretrained(checkpoint(name))
            models[name] = static_factory(config).from_pretrained(checkpoint(name))
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
