"""Every family that GGUF holds is after its conversion what it was in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from octavo.llm import LLM
from octavo.model.gguf_checkpoint import convert_gguf
from octavo.sampling_params import SamplingParams

MakeModel = Callable[..., Any]
MakeGguf = Callable[..., Path]
CASES = """llama llama_3 linear yarn mistral mixtral smollm3 granite qwen2 qwen3 qwen3moe olmoe phi3
    phi4 gemma gemma2 gemma3 olmo2 olmo3 stablelm stablelm_12b""".split()
OPTIONS = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 16, "cpu_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [(7 * index + 3) % 258 + 2 for index in range(70)]


@pytest.mark.parametrize("case", CASES)
def test_weights_logits_and_greedy_tokens_are_those_of_the_original(
    case: str, make_model: MakeModel, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    model = make_model(case)
    convert_gguf(make_gguf(model=model), tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    _assert_same_weights(again, model)
    answer = LLM(str(tmp_path), **OPTIONS).generate([PROMPT], GREEDY)[0]
    tokens = list(answer.token_ids)
    ids = torch.tensor([PROMPT + tokens])
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(again(ids).logits, logits)
    assert logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
@pytest.mark.parametrize("case", ["llama", "mixtral", "gemma2", "phi3"])
def test_quantised_weights_are_dequantised_each_in_its_place(
    case: str, kind: str, make_model: MakeModel, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    model = make_model(case, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    own = GGMLQuantizationType[kind]
    convert_gguf(make_gguf(model=model, kind=own), tmp_path)
    for name, parameter in model.named_parameters():
        # Rows that make no whole blocks, and routers, stay as they are.
        if parameter.ndim > 1 and parameter.shape[-1] % 32 == 0 and "mlp.gate.weight" not in name:
            values = quants.dequantize(quants.quantize(parameter.detach().numpy(), own), own)
            parameter.data = torch.from_numpy(values).bfloat16().float()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    _assert_same_weights(again, model)


@pytest.mark.parametrize(
    "case", ["llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3", "stablelm"]
)
def test_transformers_reads_the_same_weights_from_the_file(
    case: str, make_model: MakeModel, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    model = make_model(case)
    path = make_gguf(model=model)
    convert_gguf(path, tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    # Its configs of these files are not the original's; its weights are.
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    for name, tensor in theirs.items():
        assert torch.equal(torch.as_tensor(tensor).bfloat16().float(), ours[name]), name


def _assert_same_weights(found: Any, expected: Any) -> None:
    weights = found.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(weights[name].bfloat16().float(), tensor), name
