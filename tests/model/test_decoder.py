import itertools

import pytest
import torch

PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.4}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.6,
    "short_factor": [1.0, 1.1, 1.4],
    "long_factor": [1.5, 3.0, 4.5],
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.3,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0}
QWEN3_MOE = {
    "head_dim": 16,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 27,
    "norm_topk_prob": True,
}

# What each case is there for is its name.
CASES = {
    "llama": ("llama", {}),
    "llama-tied-embeddings": ("llama", {"tie_word_embeddings": True}),
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-head-per-kv-head": ("llama", {"num_key_value_heads": 6}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim-of-its-own": ("llama", {"head_dim": 16}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding-window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn-rope-tied": ("qwen2", {"rope_parameters": YARN_ROPE, "tie_word_embeddings": True}),
    "qwen2-window-from-second-layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases": ("qwen3", {"head_dim": 22, "attention_bias": True}),
    "smollm3-one-layer-not-rotated": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window-where-not-rotated": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 20},
    ),
    "phi3-window": ("phi3", {"sliding_window": 20}),
    "phi3-partial-longrope-kept-short": (
        "phi3",
        {
            "rope_parameters": LONG_ROPE,
            "original_max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2-capped-and-scaled-on-its-own": (
        "gemma2",
        {
            "head_dim": 22,
            "sliding_window": 20,
            "query_pre_attn_scalar": 30,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3-rotates-by-kind-of-layer": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 20,
            "query_pre_attn_scalar": 30,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": LINEAR_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "granite": ("granite", {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3-windows-and-yarn": (
        "olmo3",
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral-window-and-one-expert-a-token": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 20},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe-every-second-layer-weights-as-they-are": (
        "qwen3_moe",
        {**QWEN3_MOE, "decoder_sparse_step": 2, "norm_topk_prob": False, "attention_bias": True},
    ),
    "qwen3_moe-window-and-a-layer-excepted": (
        "qwen3_moe",
        {**QWEN3_MOE, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 20},
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 4}),
    "olmoe-every-expert-for-every-token": (
        "olmoe",
        {"num_experts": 3, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "stablelm": ("stablelm", {"rope_parameters": PARTIAL_ROPE, "use_qkv_bias": True}),
    "stablelm-side-by-side": (
        "stablelm",
        {"rope_parameters": PARTIAL_ROPE, "use_parallel_residual": True},
    ),
    "stablelm-norms-of-each-head": (
        "stablelm",
        {"rope_parameters": PARTIAL_ROPE, "use_parallel_residual": True, "qk_layernorm": True},
    ),
}


@pytest.fixture(params=CASES)
def case(request, make_checkpoint):
    model_type, overrides = CASES[request.param]
    return make_checkpoint(model_type, **overrides)


@torch.inference_mode()
def reference_logits(model, token_ids):
    """Return transformers' logits of every position, with no cache at all."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


def best_tokens(model, prompt, tokens):
    """Return what transformers would say in the place of each token of an answer."""
    return reference_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :].argmax(-1).tolist()


def test_float32_logits_of_every_position_equal_transformers(case, load, make_driver, make_prompt):
    directory, reference = case
    prompt = make_prompt(77)
    logits = make_driver(load(directory)).step({"a": prompt}, all_rows=True)
    assert logits.dtype == torch.float32
    # Logits here are of the order of 5; the products are summed in another order than MKL's.
    torch.testing.assert_close(logits, reference_logits(reference, prompt), rtol=0, atol=5e-5)


def test_greedy_continuations_equal_transformers_through_chunks_and_pages(
    case, load, make_driver, make_prompt
):
    directory, reference = case
    prompts = {f"prompt of {n}": make_prompt(n) for n in (1, 16, 37, 90)}
    tokens, _ = make_driver(load(directory)).generate(prompts, num_tokens=26, chunk=16)
    # Each is the best after those before it, so all are the greedy ones.
    assert tokens == {n: best_tokens(reference, p, tokens[n]) for n, p in prompts.items()}


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_bfloat16_log_probabilities_stay_near_transformers(
    model_type, make_checkpoint, load, make_driver, make_prompt
):
    directory, reference = make_checkpoint(model_type, dtype=torch.bfloat16, head_dim=16)
    prompt = make_prompt(60)
    model = load(directory)
    assert model.dtype == torch.bfloat16
    ours = make_driver(model).step({"a": prompt}, all_rows=True).log_softmax(-1)
    theirs = reference_logits(reference, prompt).log_softmax(-1)
    # Both round to 8 bits after each operation, at other places; 0.5 % of logits near 5 is 0.025
    # a rounding, and three layers add up.
    assert (ours - theirs).abs().max() < 0.35
    assert (ours - theirs).abs().mean() < 0.05


@pytest.mark.parametrize("case_name", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_in_bfloat16_are_as_near_to_float32_as_transformers_is(
    case_name, make_checkpoint, load, make_driver, make_prompt
):
    model_type, options = CASES[case_name]
    directory, reference = make_checkpoint(model_type, dtype=torch.bfloat16, **options)
    prompt = make_prompt(60)
    ours = make_driver(load(directory)).step({"a": prompt}, all_rows=True).log_softmax(-1)
    theirs = reference_logits(reference, prompt).log_softmax(-1)
    exact = reference_logits(reference.float(), prompt).log_softmax(-1)
    # Where two experts are nearly as likely, rounding chooses; so both are far off here and there.
    assert (ours - exact).abs().mean() < 1.1 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_logits_have_the_same_bits_alone_in_a_batch_chunked_and_with_any_block_size(
    dtype, model_type, make_checkpoint, load, make_driver, make_prompt
):
    directory, _ = make_checkpoint(model_type, head_dim=16)
    prompts = {str(n): make_prompt(n) for n in (40, 1, 17, 64, 5, 33, 90)}
    alone = {}
    for name, prompt in prompts.items():
        driver = make_driver(load(directory, dtype))
        alone[name] = driver.generate({name: prompt}, num_tokens=6, chunk=1000)[1][name]
    for block_size, chunk in itertools.product((8, 16, 32), (1, 16, 1000)):
        driver = make_driver(load(directory, dtype, block_size=block_size), seed=chunk)
        _, together = driver.generate(prompts, num_tokens=6, chunk=chunk)
        for name in prompts:
            assert torch.equal(together[name], alone[name]), (name, block_size, chunk)


OTHER_FORMS = {
    "gemma2": {"head_dim": 16, "sliding_window": 20},
    "granite": {"residual_multiplier": 0.4, "logits_scaling": 0.5},
    "olmo3": {"sliding_window": 20},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
}


@pytest.mark.parametrize("model_type", OTHER_FORMS)
def test_layers_of_other_forms_give_the_same_bits_alone_and_in_a_chunked_batch(
    model_type, make_checkpoint, load, make_driver, make_prompt
):
    directory, _ = make_checkpoint(model_type, **OTHER_FORMS[model_type])
    prompts = {str(n): make_prompt(n) for n in (40, 1, 17, 90)}
    model = load(directory, "bfloat16")
    _, together = make_driver(load(directory, "bfloat16", block_size=8)).generate(prompts, 6, 16)
    for name, prompt in prompts.items():
        _, alone = make_driver(model).generate({name: prompt}, num_tokens=6, chunk=1000)
        assert torch.equal(together[name], alone[name]), name


def test_only_the_asked_rows_reach_the_vocabulary_in_the_asked_order(
    make_checkpoint, load, make_driver, make_prompt
):
    directory, _ = make_checkpoint("llama")
    prompts = {"a": make_prompt(9), "b": make_prompt(4)}
    every = make_driver(load(directory)).step(prompts, all_rows=True)
    last = make_driver(load(directory)).step(prompts)
    assert every.shape == (13, 211)
    assert torch.equal(last, every[[8, 12]])


def test_a_step_that_samples_nothing_returns_no_logits_and_still_fills_the_cache(
    make_checkpoint, load, make_driver, make_prompt, monkeypatch
):
    directory, _ = make_checkpoint("llama")
    model = load(directory)
    prompt = make_prompt(30)
    whole = make_driver(model).step({"a": prompt})
    driver = make_driver(model)
    forward = model.decoder.forward
    no_rows = torch.empty(0, dtype=torch.int64)
    with monkeypatch.context() as patch:
        patch.setattr(model.decoder, "forward", lambda *args: forward(*args[:-1], no_rows))
        assert driver.step({"a": prompt[:20]}).shape == (0, 211)
    assert torch.equal(driver.step({"a": prompt[20:]}), whole)
