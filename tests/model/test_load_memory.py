"""A load takes little more memory than the checkpoint: each tensor is read, packed and let go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

LIMIT = 1.3
#: Loads a small model, so that libraries are there, then the one whose memory is looked at. Pages
#: of the file, which the system takes back when it needs them, are not counted.
CHILD = """
import sys, threading
from pathlib import Path
from octavo.config import EngineConfig
from octavo.model.tiers import load_served_model

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def load(model):
    return load_served_model(EngineConfig(model, device="cpu", cpu_threads=1))

load(sys.argv[2])
before, seen, ended = own_bytes(), [], threading.Event()

def watch():
    while not ended.wait(0.001):
        seen.append(own_bytes())

thread = threading.Thread(target=watch)
thread.start()
model = load(sys.argv[1])
ended.set()
thread.join()
print(max([*seen, own_bytes()]) - before)
"""


def save(family: str, folder: Path, **sizes: int) -> Path:
    config = AutoConfig.for_model(family, vocab_size=2000, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "small", "large"),
    [
        (
            "llama",
            {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
            {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6},
        ),
        ("gpt2", {"n_embd": 48, "n_layer": 1}, {"n_embd": 1008, "n_layer": 8}),
    ],
)
def test_a_load_takes_at_most_so_much_more_than_the_checkpoint(family, small, large, tmp_path):
    first = save(family, tmp_path / "small", **small)
    second = save(family, tmp_path / "large", **large)
    size = sum(path.stat().st_size for path in second.glob("*.safetensors"))
    child = [sys.executable, "-c", CHILD, str(second), str(first)]
    taken = int(
        subprocess.run(child, check=True, capture_output=True, text=True).stdout.split()[-1]
    )
    assert size > 150e6
    assert taken <= LIMIT * size
