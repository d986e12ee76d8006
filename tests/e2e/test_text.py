"""What text comes out: whole characters, nothing of a stop string, and the end asked for."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client, Completion, Delta

pytestmark = pytest.mark.e2e

COUNT = "1, 2, 3, 4, 5,"
COUNTED = " 6, 7, 8, 9, 10, 11,"
NUM_COUNTED = 20
HELLO = [{"role": "user", "content": "Say hello."}]
END_OF_TURN = 2


def greedy(server: TritonServer, prompt: str | None = None, **params: Any) -> list[Delta]:
    with Client(server.grpc_url, timeout_s=60) as client:
        return list(client.stream(prompt, **{"temperature": 0, "max_tokens": 20, **params}))


def whole(deltas: list[Delta]) -> Completion:
    return Completion.from_deltas(deltas)


def test_emoji_of_three_tokens_comes_in_one_piece(demo_server: TritonServer) -> None:
    deltas = greedy(demo_server, "🎉" * 8, max_tokens=18)
    assert [delta.text for delta in deltas] == ["🎉"] * 6
    assert [delta.num_output_tokens for delta in deltas] == [3] * 6


def test_emoji_cut_off_by_the_limit_becomes_one_replacement_character(
    demo_server: TritonServer,
) -> None:
    assert whole(greedy(demo_server, "🎉" * 8, max_tokens=5)).text == "🎉\ufffd"


def test_chinese_characters_of_several_tokens_come_whole(demo_server: TritonServer) -> None:
    deltas = greedy(demo_server, "我喜欢中国。我喜欢中国。我喜欢", max_tokens=4)
    assert "".join(delta.text for delta in deltas) == "中国。"
    assert [delta.text for delta in deltas] == ["中", "国", "。"]


def test_random_bytes_stream_as_the_text_that_comes_without_streaming(
    tiny_server: TritonServer,
) -> None:
    params = {"max_tokens": 300, "ignore_eos": True, "temperature": 5.0}
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        for seed in range(8):
            prompt = [216, 10813, 232 + seed]
            at_once = client.generate(input_ids=prompt, seed=seed, **params)
            deltas = list(client.stream(input_ids=prompt, seed=seed, **params))
            assert whole(deltas) == at_once
            assert all(delta.text for delta in deltas[:-1])
            assert "\0" not in at_once.text


def test_numbers_are_counted_on(demo_server: TritonServer) -> None:
    answer = whole(greedy(demo_server, COUNT, max_tokens=NUM_COUNTED))
    assert (answer.text, answer.num_output_tokens) == (COUNTED, NUM_COUNTED)
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("stop", ["8, 9", ["no match", " 8", ", 8,"], [", 8, 9, 10, 1"]])
def test_stop_string_over_several_tokens_is_held_back_and_left_out(
    demo_server: TritonServer, stop: str | list[str]
) -> None:
    deltas = greedy(demo_server, COUNT, stop=stop)
    stops = [stop] if isinstance(stop, str) else stop
    ends = [COUNTED.find(text) + len(text) for text in stops if text in COUNTED]
    seen = COUNTED[: min(ends)]
    found = max((text for text in stops if seen.endswith(text)), key=len)
    assert whole(deltas).text == seen.removesuffix(found)
    assert deltas[-1].finish_reason == "stop"
    shown = greedy(demo_server, COUNT, stop=stop, include_stop_str_in_output=True)
    assert whole(shown).text == seen


def test_text_that_only_looked_like_a_stop_string_is_sent_after_all(
    demo_server: TritonServer,
) -> None:
    answer = whole(greedy(demo_server, COUNT, stop=["9, 11", "11, 12"], max_tokens=NUM_COUNTED))
    assert (answer.text, answer.finish_reason) == (COUNTED, "length")


def test_min_tokens_lets_earlier_stop_strings_pass(demo_server: TritonServer) -> None:
    # " 6, 7," are six tokens: a space, a digit and a comma each.
    answer = whole(greedy(demo_server, COUNT, stop=", ", min_tokens=7))
    assert (answer.text, answer.finish_reason) == (" 6, 7, 8", "stop")


def test_stop_token_ends_the_answer_and_is_counted_but_not_shown(
    demo_server: TritonServer,
) -> None:
    comma = whole(greedy(demo_server, COUNT)).token_ids[2]
    answer = whole(greedy(demo_server, COUNT, stop_token_ids=[comma]))
    assert (answer.text, answer.num_output_tokens) == (" 6", 3)
    assert (answer.token_ids[-1], answer.finish_reason) == (comma, "stop")
    later = whole(greedy(demo_server, COUNT, stop_token_ids=[comma], min_tokens=4))
    assert (later.text[:2], later.num_output_tokens > 3) == (" 6", True)


def test_messages_are_answered_up_to_the_end_of_the_turn(demo_server: TritonServer) -> None:
    answer = whole(greedy(demo_server, messages=HELLO, max_tokens=60))
    assert answer.text.startswith("Hello")
    assert "<|im_end|>" not in answer.text
    assert (answer.token_ids[-1], answer.finish_reason) == (END_OF_TURN, "stop")
    longer = whole(greedy(demo_server, messages=HELLO, max_tokens=60, ignore_eos=True))
    assert longer.token_ids[: len(answer.token_ids)] == answer.token_ids
    assert (longer.num_output_tokens, longer.finish_reason) == (60, "length")


def test_the_end_of_the_turn_is_shown_when_special_tokens_are_kept(
    demo_server: TritonServer,
) -> None:
    plain = whole(greedy(demo_server, messages=HELLO, max_tokens=60))
    both = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    shown = whole(greedy(demo_server, messages=HELLO, max_tokens=60, **both))
    assert shown.token_ids == plain.token_ids
    assert shown.text == plain.text + "<|im_end|>"


def test_an_emoji_cut_by_the_limit_is_finished_when_its_ids_are_continued(
    demo_server: TritonServer,
) -> None:
    ids = list(whole(greedy(demo_server, "🎉" * 8, max_tokens=5)).token_ids)
    prompt = [token for _ in range(8) for token in ids[:3]]
    answer = whole(greedy(demo_server, input_ids=prompt + ids, max_tokens=4))
    assert answer.text == "🎉🎉"


def test_same_seed_gives_the_same_answer_and_another_seed_another(
    tiny_server: TritonServer,
) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        answers = [client.generate("a", seed=seed, max_tokens=20) for seed in (1, 1, -1)]
        unseeded = [client.generate("a", max_tokens=20) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0].token_ids != answers[2].token_ids
    assert unseeded[0].token_ids != unseeded[1].token_ids


def test_ids_and_text_of_the_same_prompt_are_the_same_request(demo_server: TritonServer) -> None:
    ids = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]
    by_ids = whole(greedy(demo_server, input_ids=ids))
    assert by_ids == whole(greedy(demo_server, COUNT))
