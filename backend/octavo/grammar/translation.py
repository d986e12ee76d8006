"""From the form that a request asks for to a grammar that llguidance compiles, and to its matcher.

Knows nothing of processes, threads or time: what may take long is told by `octavo.grammar.probe`.
"""

from __future__ import annotations

import json
import re

from llguidance import GrammarFormat, LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from octavo.errors import InvalidRequest
from octavo.grammar.matcher import reason_of
from octavo.structured_outputs import StructuredOutputs

#: Of one grammar: they bound its compilation, and a mask where it is so ambiguous that nothing else
#: does, to about 100 ms, and its states to 100 MB. Usual schemas take less than a tenth.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    max_lexer_states=50_000,
    step_max_items=10_000,
    verbose_errors=False,
)


def translate(wanted: StructuredOutputs) -> str:
    """Return the grammar in llguidance's own terms, which are Lark's.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        return _rules(wanted) + _OPTIONS
    except (ValueError, RecursionError) as error:
        raise not_compiled(wanted, str(error)) from None


def make_matcher(wanted: StructuredOutputs, grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Compile what `translate` returned, and find the first mask; lets other Python threads run.

    Raises:
        InvalidRequest: it is no grammar, too much work, or no answer follows it.
    """
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise not_compiled(wanted, reason_of(matcher))
    return matcher


def not_compiled(wanted: StructuredOutputs, reason: str) -> InvalidRequest:
    """Return the error of a request whose grammar cannot be followed."""
    reason = " ".join(reason.split())
    if wanted.kind != "grammar":  # the place is one in a grammar that the client has not seen
        reason = _PLACE.sub("", reason).partition(" 1 | start: ")[0]
    reason = reason[:500]
    return InvalidRequest(f"structured_outputs.{wanted.kind} does not compile: {reason}")


def _rules(wanted: StructuredOutputs) -> str:
    if wanted.kind == "json_object":
        return 'start: %json {"type":"object"}'
    if wanted.kind == "json":
        return f"start: %json {wanted.text}"
    grammar = str(grammar_from(_FORMATS[wanted.kind], wanted.text))
    if wanted.kind == "regex":
        return str(json.loads(grammar)["grammars"][0]["lark_grammar"])
    return grammar


_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")

_FORMATS: dict[str, GrammarFormat] = {
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}

#: Else, where the text that follows is certain, the tokenizer spells it, and does so with special
#: tokens where it looks like one: they have no text.
_OPTIONS = '\n%llguidance { "no_forcing": true }\n'
