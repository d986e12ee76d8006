"""Tries a stranger's grammar in a process of its own, which is ended if that takes too much.

Runs as `python -m octavo.grammar.probe`. Some of what llguidance does no limit of its own bounds,
neither in time nor in memory (an integer that is to be a multiple of a large prime), and a thread
cannot be ended. The vocabulary here is all single bytes: it takes no time to make, and the way of a
grammar's bytes is what makes its work. Knows nothing of the model.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from octavo.errors import InvalidRequest
from octavo.grammar.matcher import reason_of
from octavo.grammar.translation import make_matcher, not_compiled, translate
from octavo.interpreter import find_interpreter, package_path
from octavo.parent_process import die_with_parent
from octavo.structured_outputs import StructuredOutputs

TIME_LIMIT_S = 5.0
#: Address space, of which the interpreter itself takes about 100 MB.
MEMORY_LIMIT_BYTES = 1 << 30
_NUM_BYTES_TRIED = 64


def probe(wanted: StructuredOutputs, time_limit_s: float = TIME_LIMIT_S) -> str:
    """Return a form as llguidance's grammar, once another process has compiled and followed it.

    Blocks up to the limit.

    Raises:
        InvalidRequest: it is no grammar, no answer follows it, or it is too much work.
    """
    try:
        answer = subprocess.run(
            [str(find_interpreter()), "-P", "-m", "octavo.grammar.probe"],
            input=json.dumps([wanted.kind, wanted.text]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=package_path(),
            timeout=time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise not_compiled(wanted, f"it takes more than {time_limit_s:g} s") from None
    if answer.returncode != 0:
        limits = f"{TIME_LIMIT_S:g} s or {MEMORY_LIMIT_BYTES >> 20:,} MB"
        raise not_compiled(wanted, f"it takes more than {limits}")
    grammar, error = json.loads(answer.stdout)
    if error is not None:
        raise InvalidRequest(error)
    return str(grammar)


class _Bytes:
    """A tokenizer whose tokens are the bytes, and an end."""

    tokens: Sequence[bytes] = [bytes([value]) for value in range(256)] + [b""]
    special_token_ids: Sequence[int] = [256]
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def follow(matcher: LLMatcher, num_tokens: int) -> str:
    """Follow a grammar of bytes for a while; return what ended it, empty if nothing bad did."""
    for place in range(num_tokens):
        mask = int.from_bytes(matcher.compute_bitmask()[:32], "little")
        if matcher.is_error() or not mask:
            break
        # Some byte that is allowed, another one each time.
        shift = 37 * place % 256
        later = mask >> shift
        byte = (
            shift + (later & -later).bit_length() - 1 if later else (mask & -mask).bit_length() - 1
        )
        matcher.consume_token(byte)
    return reason_of(matcher) if matcher.is_error() else ""


def main() -> int:
    """Read kind and text as JSON, and write the grammar and the error, of which one is null."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    # Ends this process too when its parent was gone before it could be tied to it.
    seconds = int(TIME_LIMIT_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    wanted = StructuredOutputs(*json.load(sys.stdin))
    try:
        grammar = translate(wanted)
        vocabulary = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
        reason = follow(make_matcher(wanted, grammar, vocabulary), _NUM_BYTES_TRIED)
        if reason:
            raise not_compiled(wanted, reason)
        print(json.dumps([grammar, None]))
    except InvalidRequest as error:
        print(json.dumps([None, str(error)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
