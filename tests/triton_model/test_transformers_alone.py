"""The stub's transformers goes without torch, and reads and renders the same without it."""

from __future__ import annotations

import json
import subprocess
import sys

from octavo.local.demo_model import demo_checkpoint
from octavo.text.chat import render_chat
from octavo.text.tokenizer import Tokenizer

TEXT = "Zwölf Boxkämpfer: 12 <|im_end|> \N{SNOWMAN}\n"
MESSAGES = [{"role": "user", "content": "hi"}]
PROGRAM = f"""
import json, sys
from octavo.triton_model.transformers_alone import import_transformers_alone
import_transformers_alone()
import octavo.triton_model.loading
from octavo.text.chat import render_chat
from octavo.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load(sys.argv[1])
ids, chat = tokenizer.encode({TEXT!r}), render_chat(tokenizer, {MESSAGES!r})
had_torch = "torch" in sys.modules
import torch
import_transformers_alone()
print(json.dumps([ids, chat, sorted(tokenizer.eos_token_ids), had_torch, torch.tensor(7).item()]))
"""


def test_tokens_and_chats_are_the_same_without_torch_which_can_still_be_imported():
    folder = str(demo_checkpoint())
    command = [sys.executable, "-c", PROGRAM, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    tokenizer = Tokenizer.load(folder)
    ids, chat = tokenizer.encode(TEXT), render_chat(tokenizer, MESSAGES)
    assert json.loads(done.stdout) == [ids, chat, sorted(tokenizer.eos_token_ids), False, 7]
    assert done.stderr == ""
