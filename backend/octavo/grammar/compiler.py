"""Compiles grammars on threads of its own, and remembers what became of the last forms.

A request gets a matcher of its own, in about a millisecond once its form is known: what a grammar's
lexer learns is shared by all copies of a matcher and bounded for them together, so that requests
which shared one would end each other. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLTokenizer

from octavo.errors import EngineError, InvalidRequest, OctavoError
from octavo.grammar.matcher import GrammarMatcher
from octavo.grammar.probe import probe
from octavo.grammar.translation import make_matcher
from octavo.structured_outputs import StructuredOutputs

NUM_THREADS = 2
MAX_FORMS = 256
#: Of the texts that were given; a translation is about as long.
MAX_FORM_BYTES = 4 << 20

logger = logging.getLogger(__name__)


class FormCache:
    """What the last forms were translated to, failures too, for these take the longest.

    May be used from several threads. A form that several ask for at once is translated once.

    Args:
        translate: from a form to llguidance's grammar; raises InvalidRequest.
        max_count: forms.
        max_bytes: of their texts together.
    """

    def __init__(
        self,
        translate: Callable[[StructuredOutputs], str],
        max_count: int = MAX_FORMS,
        max_bytes: int = MAX_FORM_BYTES,
    ) -> None:
        self._translate = translate
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._grammars: OrderedDict[StructuredOutputs, Future[str]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._grammars)

    def grammar_of(self, wanted: StructuredOutputs) -> str:
        """Return the translation of a form, waiting for it if need be.

        Raises:
            InvalidRequest: there is none.
        """
        with self._lock:
            grammar = self._grammars.get(wanted)
            is_new = grammar is None
            if grammar is None:
                grammar = self._put(wanted)
            self._grammars.move_to_end(wanted)
            self._forget_oldest()
        if is_new:
            self._settle(wanted, grammar)
        return grammar.result()

    def _put(self, wanted: StructuredOutputs) -> Future[str]:
        grammar: Future[str] = Future()
        self._grammars[wanted] = grammar
        self._num_bytes += _num_bytes(wanted)
        return grammar

    def _settle(self, wanted: StructuredOutputs, grammar: Future[str]) -> None:
        try:
            grammar.set_result(self._translate(wanted))
        except InvalidRequest as error:
            grammar.set_exception(error)
        except BaseException as error:
            with self._lock:  # not the form's fault, so another try may end otherwise
                if self._grammars.pop(wanted, None) is not None:
                    self._num_bytes -= _num_bytes(wanted)
            grammar.set_exception(error)

    def _forget_oldest(self) -> None:
        while len(self._grammars) > self._max_count or self._num_bytes > self._max_bytes:
            oldest, _ = self._grammars.popitem(last=False)
            self._num_bytes -= _num_bytes(oldest)


def _num_bytes(wanted: StructuredOutputs) -> int:
    return len(wanted.text.encode())


class GrammarCompiler:
    """Compiles on threads that start when they are needed, and end with it.

    Args:
        load_vocabulary: called by the first compilation, and again if it failed.
        translate: from a form to llguidance's grammar; raises InvalidRequest.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], LLTokenizer],
        translate: Callable[[StructuredOutputs], str] = probe,
    ) -> None:
        self._load_vocabulary = load_vocabulary
        self._forms = FormCache(translate)
        self._vocabulary: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar-compiler")

    def start(self, wanted: StructuredOutputs) -> Future[GrammarMatcher]:
        """Begin to compile a form, and return what will hold the matcher or an OctavoError."""
        return self._threads.submit(self._compile, wanted)

    def _compile(self, wanted: StructuredOutputs) -> GrammarMatcher:
        try:
            grammar = self._forms.grammar_of(wanted)
            vocabulary = self._load()
            matcher = make_matcher(wanted, grammar, vocabulary)
        except OctavoError:
            raise
        except Exception:
            logger.exception("a grammar could not be compiled")
            raise EngineError("structured_outputs could not be compiled") from None
        return GrammarMatcher(matcher, vocabulary.vocab_size, f"structured_outputs.{wanted.kind}")

    def _load(self) -> LLTokenizer:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            return self._vocabulary
