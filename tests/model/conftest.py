"""Tiny random checkpoints as transformers writes them, and a minimal paged driver of a decoder."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers

from octavo.config import EngineConfig
from octavo.model.loader import LoadedModel, load_model
from octavo_kernels import AttentionMetadata

# Odd sizes on purpose: nothing is a multiple of a vector or of another size by accident.
TINY = {
    "vocab_size": 211,
    "hidden_size": 60,
    "intermediate_size": 106,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS = {
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "smollm3": transformers.SmolLM3ForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
    "phi3": transformers.Phi3ForCausalLM,
    "gemma": transformers.GemmaForCausalLM,
    "gemma2": transformers.Gemma2ForCausalLM,
    "gemma3_text": transformers.Gemma3ForCausalLM,
    "granite": transformers.GraniteForCausalLM,
    "olmo2": transformers.Olmo2ForCausalLM,
    "olmo3": transformers.Olmo3ForCausalLM,
    "mixtral": transformers.MixtralForCausalLM,
    "qwen3_moe": transformers.Qwen3MoeForCausalLM,
    "olmoe": transformers.OlmoeForCausalLM,
    "stablelm": transformers.StableLmForCausalLM,
}


@pytest.fixture
def make_checkpoint(tmp_path):
    """Return a function: save a tiny random model, return (directory, transformers model)."""

    def make(model_type, max_shard_size="1GB", dtype=torch.float32, **overrides):
        torch.manual_seed(11)
        model_class = MODELS[model_type]
        config = model_class.config_class(**{**TINY, **overrides})
        # transformers' other ways to compute experts do not take odd sizes.
        config._experts_implementation = "eager"
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            # Fresh biases are zero and fresh norms one: a decoder that forgot them would pass.
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
        model = model.to(dtype)
        directory = tmp_path / model_type
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        return directory, model

    return make


@pytest.fixture
def load():
    """Return a function: load a checkpoint directory on the CPU."""

    def load_directory(directory: Path, dtype="auto", **options) -> LoadedModel:
        return load_model(EngineConfig(model=str(directory), dtype=dtype, device="cpu", **options))

    return load_directory


class PagedDriver:
    """Runs steps of several sequences over one paged cache whose blocks lie in no order."""

    def __init__(self, model: LoadedModel, num_blocks: int = 96, seed: int = 5):
        self.model = model
        self.cache = model.attention.allocate(num_blocks)
        generator = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(num_blocks, generator=generator).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, work: dict[str, list[int]], all_rows: bool = False) -> torch.Tensor:
        """Run new tokens of each sequence; return logits of the last token of each, or of all."""
        size = self.model.attention.shape.block_size
        starts, positions, slots = [0], [], []
        for name, tokens in work.items():
            first = self.lengths.get(name, 0)
            blocks = self.blocks.setdefault(name, [])
            while len(blocks) * size < first + len(tokens):
                blocks.append(self.free.pop())
            own = range(first, first + len(tokens))
            positions += own
            slots += [blocks[p // size] * size + p % size for p in own]
            self.lengths[name] = first + len(tokens)
            starts.append(starts[-1] + len(tokens))
        tables = [torch.tensor(self.blocks[name], dtype=torch.int32) for name in work]
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([self.lengths[n] for n in work], dtype=torch.int32),
            block_tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            max_query_len=max(len(tokens) for tokens in work.values()),
            max_seq_len=max(self.lengths[n] for n in work),
        )
        rows = range(starts[-1]) if all_rows else [end - 1 for end in starts[1:]]
        return self.model.decoder.forward(
            torch.tensor([t for tokens in work.values() for t in tokens]),
            torch.tensor(positions),
            self.cache,
            metadata,
            torch.tensor(list(rows), dtype=torch.int64),
        )

    def generate(self, prompts: dict[str, list[int]], num_tokens: int, chunk: int):
        """Continue prompts greedily; return (tokens, logits they were taken from) of each."""
        tokens = {name: [] for name in prompts}
        logits = {name: [] for name in prompts}
        waiting = {name: list(prompt) for name, prompt in prompts.items()}
        while waiting:
            work = {name: rest[:chunk] for name, rest in waiting.items()}
            waiting = {name: waiting[name][chunk:] for name in work}
            for name, row in zip(work, self.step(work), strict=True):
                if not waiting[name]:
                    logits[name].append(row)
                    tokens[name].append(int(row.argmax()))
                    waiting[name] = [tokens[name][-1]]
            waiting = {n: rest for n, rest in waiting.items() if len(tokens[n]) < num_tokens}
        return tokens, {name: torch.stack(rows) for name, rows in logits.items()}


@pytest.fixture
def make_driver():
    """Return the driver's class."""
    return PagedDriver


@pytest.fixture
def make_prompt():
    """Return a function: random token ids of a length."""

    def make(length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(1000 * seed + length)
        return torch.randint(TINY["vocab_size"], (length,), generator=generator).tolist()

    return make
