"""One accepted request until its final response: what was produced and what was sent.

Belongs to the thread that answers. Knows nothing of tensors, threads or the engine.
"""

from __future__ import annotations

from octavo.request import FinishReason, Request, TokenOutput
from octavo.text.output_text import OutputText
from octavo.text.tokenizer import Tokenizer, replace_nul
from octavo.triton_model.codec import ResponseData, ResponseOptions
from octavo.triton_model.pb_utils import ResponseSender


class LiveRequest:
    """Text and tokens that wait to be sent to one client.

    Args:
        request: what the engine gets.
        prompt: the prompt as text, sent before the answer if `options` ask for it.
        sender: where the responses go.
    """

    def __init__(
        self,
        request: Request,
        options: ResponseOptions,
        sender: ResponseSender,
        tokenizer: Tokenizer,
        prompt: str,
    ) -> None:
        self.request = request
        self.options = options
        self.sender = sender
        self.finish_reason: FinishReason | None = None
        """Set once nothing more will be produced."""
        self._output = OutputText(tokenizer, request.prompt_token_ids, request.params)
        self._prompt = replace_nul(prompt) if options.include_prompt else ""
        self._text: list[str] = []
        self._token_ids: list[int] = []

    @property
    def request_id(self) -> str:
        """The engine's name for the request."""
        return self.request.request_id

    def take(self, output: TokenOutput) -> bool:
        """Add a step's tokens.

        Returns whether the answer ended here although the engine goes on: a stop string was found.
        """
        delta = self._output.push(output.token_ids, output.finish_reason)
        self._text.append(delta.text)
        self._token_ids += output.token_ids[: delta.num_tokens]
        self.finish_reason = delta.finish_reason
        return delta.finish_reason is not None and output.finish_reason is None

    @property
    def has_response(self) -> bool:
        """Whether a response is due: the last, or in a stream one with text.

        Tokens without text yet (part of a character, or of what may be a stop string) wait for
        the text, so that no response is empty but a last one that only says why it is the last.
        """
        return self.finish_reason is not None or (self.options.stream and any(self._text))

    def pop_response(self) -> ResponseData:
        """Return all that waits as one response; the prompt stands before the first."""
        data = ResponseData(
            text=self._prompt + "".join(self._text),
            token_ids=tuple(self._token_ids),
            num_input_tokens=len(self.request.prompt_token_ids),
            finish_reason=self.finish_reason,
        )
        self._prompt, self._text, self._token_ids = "", [], []
        return data
