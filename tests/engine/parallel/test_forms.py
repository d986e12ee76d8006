"""Answers that must have a form have it, and are those of one rank."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from octavo.sampling_params import SamplingParams


def test_forms_are_kept_beside_free_answers(grid, make_drivers, make_prompts, byte_tokenizer):
    choices = ["yes", "no, sir"]
    drivers = make_drivers(tokenizer=str(byte_tokenizer))
    for driver in drivers:
        prompts = make_prompts([5, 6, 7, 8])
        for index, prompt in enumerate(prompts):
            values = {"temperature": 1.5, "seed": index, "max_tokens": 30}
            form = {"structured_outputs": {"choice": choices}} if index % 2 else {}
            driver.add(f"{index}", prompt, SamplingParams.from_mapping({**values, **form}))
        driver.run()
    ours, theirs = drivers
    for name in "0123":
        assert ours.tokens(name) == theirs.tokens(name)
    text = PreTrainedTokenizerFast.from_pretrained(byte_tokenizer)
    for name in "13":
        assert text.decode(ours.tokens(name), skip_special_tokens=True) in choices
