import json
import math

from octavo.request import TokenLogprob
from octavo.text.logprobs_text import logprobs_json
from octavo.text.tokenizer import Tokenizer


def test_an_object_has_the_token_itself_first_and_each_by_its_id(demo_tokenizer: Tokenizer) -> None:
    paris, the = (demo_tokenizer.encode(text)[0] for text in (" Paris", " the"))
    text = logprobs_json(
        demo_tokenizer, (TokenLogprob(paris, -0.25, 2), TokenLogprob(the, -0.125, 1))
    )
    assert list(json.loads(text).items()) == [
        (str(paris), {"logprob": -0.25, "rank": 2, "decoded_token": " Paris"}),
        (str(the), {"logprob": -0.125, "rank": 1, "decoded_token": " the"}),
    ]


def test_parts_of_characters_and_special_tokens_have_a_text(demo_tokenizer: Tokenizer) -> None:
    part = demo_tokenizer.encode("\U0001f9ff")[0]
    end = demo_tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    assert demo_tokenizer.token_text(part) == "\ufffd"
    assert demo_tokenizer.token_text(end) == "<|im_end|>"


def test_a_token_without_any_probability_is_valid_json(demo_tokenizer: Tokenizer) -> None:
    text = logprobs_json(demo_tokenizer, (TokenLogprob(5, -math.inf, 9),))
    (entry,) = json.loads(text, parse_constant=None).values()
    assert entry["logprob"] == -9999.0
