"""From the form that a request asks for to a grammar that llguidance compiles, and to its matcher.

Knows nothing of processes, threads or time: what may take long is told by `octavo.grammar.probe`.
"""

from __future__ import annotations

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
    """Return the grammar in llguidance's own terms.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        if wanted.kind == "json_object":
            return LLMatcher.grammar_from_json_schema('{"type":"object"}')
        return str(grammar_from(_FORMATS[wanted.kind], wanted.text))
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
    reason = " ".join(reason.split())[:500]
    return InvalidRequest(f"structured_outputs.{wanted.kind} does not compile: {reason}")


_FORMATS: dict[str, GrammarFormat] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
