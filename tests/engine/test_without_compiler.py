"""Where there is no C++ compiler the models answer as they do where there is one."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.executor.model_runner import ModelRunner
from octavo.request import Request
from octavo.sampling_params import SamplingParams

pytestmark = pytest.mark.kernels

# Of any tokenizer: lengths before and past a tile, a split and some blocks.
PROMPTS = [[(31 * i + 7 * n) % 300 + 8 for i in range(40 * n + 5)] for n in (0, 1, 4)]
OPTIONS = {"max_model_len": 256, "num_kv_blocks": 64, "cpu_threads": 1, "dtype": "float32"}

ANSWER = """
import importlib.util, json, logging, sys
logging.basicConfig()
path, backend, *models = sys.argv[1:]
if backend != "numba":
    sys.modules["numba"] = None
spec = importlib.util.spec_from_file_location("test_without_compiler", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for model in models:
    print(json.dumps(module.answer(model)))
"""


@functools.cache
def answer(model: str) -> list[list[int]]:
    """Return the greedy tokens of each prompt, all answered together."""
    config = EngineConfig.from_mapping({"model": model, **OPTIONS})
    engine = Engine(config, ModelRunner(config))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        resolved = params.resolve(engine.info.room_behind(len(prompt)), 6)
        engine.add(Request(str(index), tuple(prompt), resolved))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while engine.has_unfinished:
        for output in engine.step().outputs:
            tokens[int(output.request_id)] += output.token_ids
    return tokens


@pytest.mark.parametrize("backend", ["numba", "folded torch"])
def test_greedy_answers_are_those_of_native_code(checkpoints, tmp_path, backend):
    models = [str(checkpoints[name]) for name in ("llama", "demo")]
    without = subprocess.run(
        [sys.executable, "-c", ANSWER, __file__, backend, *models],
        env={**os.environ, "PATH": "", "CXX": "", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "no C++ compiler is on the path" in without.stderr
    assert [json.loads(line) for line in without.stdout.splitlines()] == list(map(answer, models))
