"""Run a tiny random model of every architecture, and make the table of what each can do.

    scripts/model-table

Nothing in the table is said that was not tried: a cell is what a run of the model gave. Knows no
architecture; they are those of `benchmarks.tiny_models`.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.doc_tables import markdown_table
from benchmarks.tiny_image_models import IMAGES, save_image_model
from benchmarks.tiny_models import (
    NATIVE,
    PAGED,
    STATIC,
    save_native,
    save_paged,
    save_static,
    static_factory,
)
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.engine_choice import load_chosen
from octavo.errors import ConfigError
from octavo.model.loader import read_spec
from octavo.model.spec import ModelSpec
from octavo.model.tensor_names import OUT, layer_prefix
from octavo.request import Request, TokenOutput
from octavo.sampling_params import SamplingParams

_LENGTHS = (3, 23, 60, 40)
_NUM_TOKENS = 8
_OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "cpu_threads": 1,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "num_kv_blocks": 64,
    "max_model_len": 96,
    "enable_prefix_caching": False,
}
_PREEMPTED_STEPS = (4, 7)
_TITLES = {
    "architecture": "architecture",
    "tier": "way",
    "tokens": "transformers' tokens",
    "paged": "chunks, preemption",
    "bits": "bits alone as in a batch",
    "int8": "int8",
    "ranks": "two ranks",
    "lora": "LoRA",
}
_INTRODUCTION = f"""# Table of models

Made by `scripts/model-table`, which runs a tiny random model of every architecture below in
float32 on a CPU, with transformers {transformers.__version__}: a list of what was tried, not of all
that is served. [Models](models.md) says what the ways are.

- **transformers' tokens**: greedy tokens of prompts in one batch are those of transformers alone.
- **chunks, preemption**: so they are with prompts in chunks, and sequences preempted on the way.
- **bits alone as in a batch**: log-probabilities are the same to the bit.
- **int8**: it answers with layers of 8-bit integers.
- **two ranks**: they give the tokens of one, by `tensor` parallelism, or else by `pipeline`.
- **LoRA**: an adapter changes the answer that names it, and not the one beside it.

"""

Trace = list[tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """What was found out of one architecture, in words."""

    architecture: str
    tier: str
    tokens: str
    paged: str
    bits: str
    int8: str
    ranks: str
    lora: str


def find_rows(folder: Path) -> Iterator[Row]:
    """Run all architectures; their checkpoints are written below `folder`."""
    for name in NATIVE:
        save_native(name, folder / "native" / name)
        yield _row(folder / "native" / name, "native", name.partition(" ")[2])
    for model_type in IMAGES:
        save_image_model(model_type, folder / "images" / model_type)
        yield _row(folder / "images" / model_type, "native")
    for model_type, values in PAGED.items():
        save_paged(model_type, folder / "paged" / model_type, **values)
        yield _row(folder / "paged" / model_type, "transformers")
    for model_type in STATIC:
        save_static(model_type, folder / "static" / model_type)
        yield _row(folder / "static" / model_type, "static")


def table(rows: Iterable[Row]) -> str:
    """Return the page of the table."""
    names = [field.name for field in fields(Row)]
    heads = [_TITLES[name] for name in names]
    return _INTRODUCTION + markdown_table(heads, [astuple(row) for row in rows])


def _row(directory: Path, tier: str, variant: str = "") -> Row:
    """Run one checkpoint; `variant` is what tells it from another of its architecture, in words."""
    engine = _load(directory, tier)
    prompts = _prompts(engine.info.vocab_size)
    is_paged = tier != "static"
    together = _answers(engine, prompts, preempts=is_paged)
    num_preemptions = engine.stats().num_preemptions_total
    alone = [_answers(engine, [prompt])[0] for prompt in prompts]
    expected = _transformers_tokens(directory, prompts)
    agrees = [[token for token, _ in trace] for trace in together] == expected
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    return Row(
        architecture=f"{architecture} {variant}".rstrip(),
        tier=tier,
        tokens=_word(agrees),
        paged=_word(agrees and num_preemptions == len(_PREEMPTED_STEPS)) if is_paged else "no",
        bits=_word(together == alone),
        int8=_int8(directory, tier, prompts),
        ranks=_ranks(directory, tier, prompts, together),
        lora=_lora(directory, tier, prompts[1]),
    )


def _load(directory: Path, tier: str, **options: Any) -> Engine:
    values = {"model": str(directory), "model_impl": tier, **_OPTIONS, **options}
    return load_chosen(EngineConfig.from_mapping(values))


def _prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(8, vocab_size, (n,), generator=generator).tolist() for n in _LENGTHS]


def _answers(
    engine: Engine,
    prompts: list[list[int]],
    lora_names: list[str | None] | None = None,
    *,
    preempts: bool = False,
) -> list[Trace]:
    """Return each prompt's tokens and log-probabilities; all run at once."""
    outputs: dict[str, list[TokenOutput]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        name = lora_names[index] if lora_names else None
        params = SamplingParams(
            temperature=0, max_tokens=_NUM_TOKENS, logprobs=0, ignore_eos=True, lora_name=name
        )
        room = engine.info.room_behind(len(prompt))
        resolved = params.resolve(room, engine.info.default_max_tokens)
        encodes = engine.info.encodes_prompt
        engine.add(Request(str(index), tuple(prompt), resolved, encodes_prompt=encodes))
    num_steps = 0
    while engine.has_unfinished:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
        num_steps += 1
        if preempts and num_steps in _PREEMPTED_STEPS:
            engine.scheduler.preempt(engine.scheduler.running[-1], time.monotonic())
    return [
        [pair for each in own for pair in zip(each.token_ids, each.logprobs, strict=True)]
        for own in outputs.values()
    ]


def _transformers_tokens(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    config = transformers.AutoConfig.from_pretrained(directory)
    reads_images = config.model_type in IMAGES
    factory = AutoModelForImageTextToText if reads_images else static_factory(config)
    model = factory.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    answers = []
    for prompt in prompts:
        token_ids = torch.tensor([prompt])
        answer = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=_NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        begins = 1 if config.is_encoder_decoder else len(prompt)
        answers.append(answer[0, begins:].tolist())
    return answers


def _word(holds: bool) -> str:
    return "yes" if holds else "no"


def _int8(directory: Path, tier: str, prompts: list[list[int]]) -> str:
    """Return whether a model answers with 8-bit layers."""
    try:
        engine = _load(directory, tier, quantization="int8")
    except ConfigError:
        return "no"
    return _word(all(len(trace) == _NUM_TOKENS for trace in _answers(engine, prompts)))


def _ranks(directory: Path, tier: str, prompts: list[list[int]], expected: list[Trace]) -> str:
    """Return the first kind of parallelism by which two ranks give the tokens of one."""
    tokens = [[token for token, _ in trace] for trace in expected]
    for kind in ("tensor", "pipeline"):
        try:
            engine = _load(directory, tier, **{f"{kind}_parallel_size": 2})
        except ConfigError:
            continue
        answers = _answers(engine, prompts)
        if [[token for token, _ in trace] for trace in answers] == tokens:
            return kind
    return "no"


def _lora(directory: Path, tier: str, prompt: list[int]) -> str:
    """Return whether an adapter changes the answer that names it and not the one beside it."""
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "multi_lora.json"
        listing.write_text(json.dumps({"random": folder}))
        if tier == "native":
            _save_adapter(read_spec(directory), Path(folder))
        try:
            engine = _load(directory, tier, enable_lora=True, multi_lora=str(listing))
        except ConfigError:
            if tier == "native":
                raise
            return "no"
        adapted, plain = _answers(engine, [prompt, prompt], ["random", None])
    return _word(adapted != plain and plain == _answers(engine, [prompt])[0])


def _save_adapter(spec: ModelSpec, folder: Path) -> None:
    """Write an adapter of what attention gives to the stream."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"A": (2, spec.num_heads * spec.head_dim), "B": (spec.hidden_size, 2)}
    tensors = {
        f"base_model.model.{layer_prefix(index)}{OUT}.lora_{name}.weight": torch.randn(
            size, generator=generator
        )
        for index in range(spec.num_layers)
        for name, size in sizes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    target = OUT.rpartition(".")[2]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [target]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
