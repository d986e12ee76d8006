"""A model that runs by transformers' code, through the real server: paged, with the same tokens."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import transformers

from octavo.local.bundle import write_repository
from octavo.local.demo_model import demo_checkpoint
from octavo.local.triton_server import TritonServer
from octavo_client import Client

pytestmark = pytest.mark.e2e

PREFIX = [random.Random(0).randrange(3, 49152) for _ in range(64)]
PROMPTS = [[*PREFIX[: 8 * length], length] for length in range(1, 9)]
NUM_TOKENS = 12

GenerateAlone = Callable[[list[int]], list[int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random GPT-2 of two layers with the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        vocab_size=49152, n_embd=60, n_head=6, n_layer=2, n_positions=256, eos_token_id=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    for file in demo_checkpoint().glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: Path,
    serving: Callable[..., AbstractContextManager[TritonServer]],
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    options = {"model": str(checkpoint), "model_impl": "transformers", "num_kv_blocks": 64}
    write_repository(
        repository, {**options, "device": "cpu", "max_num_batched_tokens": 40, "max_num_seqs": 8}
    )
    with serving(repository=repository, environment={"OCTAVO_CPU_THREADS": "1"}) as server:
        yield server


@pytest.fixture(scope="module")
def generate_alone(checkpoint: Path) -> GenerateAlone:
    """Return a function: what transformers generates for a prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)

    def generate(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    return generate


def test_many_requests_at_once_have_the_tokens_that_transformers_generates(
    server: TritonServer, generate_alone: GenerateAlone
) -> None:
    with Client(server.grpc_url, timeout_s=60) as client, ThreadPoolExecutor(8) as pool:

        def ask(prompt: list[int]) -> list[int]:
            answer = client.generate(input_ids=prompt, temperature=0, max_tokens=NUM_TOKENS)
            return list(answer.token_ids)

        answers = list(pool.map(ask, [*PROMPTS, *PROMPTS]))
    expected = [generate_alone(prompt) for prompt in PROMPTS]
    assert answers == [*expected, *expected]


def test_a_prefix_that_was_computed_is_not_computed_again(
    server: TritonServer, generate_alone: GenerateAlone
) -> None:
    options = {"input_ids": PROMPTS[-1], "temperature": 0, "max_tokens": NUM_TOKENS}
    with Client(server.grpc_url, timeout_s=60) as client:
        first = client.generate(**options)
        deltas = list(client.stream(**options))
    assert deltas[-1].timing.cached_tokens == 64
    streamed = [token_id for delta in deltas for token_id in delta.token_ids]
    assert streamed == list(first.token_ids) == generate_alone(PROMPTS[-1])
