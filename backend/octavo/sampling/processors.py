"""What requests say of single tokens, done to the logits.

This is the order of all that comes between the model's logits and a token, which is transformers'
as far as it has the same:

    log-probabilities are of the logits as the model gave them
    1  logit_bias                              SequenceBiasLogitsProcessor
    2  repetition_penalty                      RepetitionPenaltyLogitsProcessor
    3  frequency_penalty, presence_penalty     OpenAI's
    4  bad_words                               NoBadWordsLogitsProcessor
    5  min_tokens                              MinNewTokensLengthLogitsProcessor
    6  allowed_token_ids, structured_outputs   PrefixConstrainedLogitsProcessor
    7  temperature, top_k, top_p, min_p        octavo_kernels.sample

What is ruled out stays at -infinity, so that 4 to 6 may be done in any order. Where nothing is left
nothing is drawn, while transformers draws what 6 allows all the same. Knows nothing of sequences.
"""

from __future__ import annotations

import torch

from octavo.sampling.device import to_device
from octavo.sampling.processor_rows import BannedPairs, BiasedTokens, MaskedRows, ProcessorRows
from octavo_kernels import Penalties, apply_penalties, apply_token_bitmask


def apply_processors(logits: torch.Tensor, asked: ProcessorRows) -> None:
    """Do to logits [rows, vocab] float32, in place, what is asked for some of their rows."""
    if asked.biases is not None:
        _add_biases(logits, asked.biases)
    if asked.penalties is not None:
        penalties = Penalties(*to_device(asked.penalties, logits.device))
        apply_penalties(logits, penalties, out=logits)
    if asked.banned is not None:
        _ban(logits, asked.banned)
    if asked.masks is not None:
        _mask(logits, asked.masks)
    if asked.grammar is not None:
        _mask(logits, asked.grammar)


def _add_biases(logits: torch.Tensor, biased: BiasedTokens) -> None:
    rows, ids, values = to_device(biased, logits.device)
    logits[rows, ids] += values


def _ban(logits: torch.Tensor, banned: BannedPairs) -> None:
    # A tokenizer may have tokens, and a request name stop ids, that this model does not have.
    known = banned.token_ids < logits.shape[1]
    rows, ids = to_device([banned.rows[known], banned.token_ids[known]], logits.device)
    logits[rows, ids] = -torch.inf


def _mask(logits: torch.Tensor, masked: MaskedRows) -> None:
    rows, bits = to_device([masked.rows, masked.bitmask.reshape(-1)], logits.device)
    bitmask = bits.view(masked.bitmask.shape)
    apply_token_bitmask(logits, bitmask, rows, out=logits)
