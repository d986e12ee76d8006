"""Engine options: every option, every refusal, and which of three places wins."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from octavo.config import SCHEDULING_POLICIES, EngineConfig
from octavo.errors import ConfigError
from octavo.option_docs import option_docs

COUNT = "an integer from 1 to 2,147,483,647"
POLICIES = "one of fcfs, priority, fair"
MODES = "one of auto, swap, recompute"
BYTES = "an integer from 1 to 9,223,372,036,854,775,807"
COUNTS = (
    "num_kv_blocks max_num_seqs max_num_batched_tokens max_model_len default_max_tokens".split()
)
COUNTS += ["cpu_threads", "max_num_queued_tokens"]
COUNTS += ["tensor_parallel_size", "pipeline_parallel_size"]

GOOD = [
    ("load_format", "dummy", "dummy"),
    ("tokenizer", None, None),
    ("tokenizer", "some/dir", "some/dir"),
    ("trust_remote_code", "true", True),
    ("allow_pickle", True, True),
    ("max_prompt_bytes", "1000", 1000),
    ("model_impl", "static", "static"),
    ("dtype", "bfloat16", "bfloat16"),
    ("model_impl", "native", "native"),
    ("model_impl", "transformers", "transformers"),
    ("quantization", "int8", "int8"),
    ("device", "cuda", "cuda"),
    ("device", "cuda:12", "cuda:12"),
    ("deterministic", "false", False),
    ("block_size", "8", 8),
    ("block_size", 256.0, 256),
    ("num_kv_blocks", None, None),
    ("num_kv_blocks", "220", 220),
    ("gpu_memory_utilization", 1, 1.0),
    ("gpu_memory_utilization", "0.5", 0.5),
    ("kv_cache_memory_bytes", 2**40, 2**40),
    ("swap_space_bytes", 0, 0),
    ("swap_space_bytes", "1048576", 2**20),
    ("enable_prefix_caching", "0", False),
    ("enable_lora", "true", True),
    ("multi_lora", "adapters.json", "adapters.json"),
    ("max_loras", "4", 4),
    ("max_lora_rank", "64", 64),
    ("preemption_mode", "recompute", "recompute"),
    ("scheduling_policy", "priority", "priority"),
    ("scheduling_policy", "fair", "fair"),
    ("tenant_weights", "gold=4,free=0.5", "gold=4,free=0.5"),
    ("max_num_queued_requests", None, None),
    ("max_logprobs", 0, 0),
    ("max_logprobs", "1024", 1024),
    ("max_num_queued_requests", 0, 0),
    ("max_num_queued_requests", "7", 7),
    ("max_num_queued_tokens", 1, 1),
    ("max_num_seqs", " 5 ", 5),
    ("allow_inspect", "true", True),
    ("engine_process", "FALSE", False),
    ("engine_process", "1", True),
    ("drain_timeout_s", 0, 0.0),
    ("drain_timeout_s", "3600", 3600.0),
    ("step_timeout_s", 1, 1.0),
    ("step_timeout_s", "86400", 86_400.0),
    ("tensor_parallel_size", "2", 2),
    ("pipeline_parallel_size", 3, 3),
    ("distributed_executor_backend", "ray", "ray"),
    ("distributed_executor_backend", "mp", "mp"),
    ("ray_address", "[fd00::1]:6379", "[fd00::1]:6379"),
    ("ray_address", "head:65535", "head:65535"),
    ("log_format", "json", "json"),
    ("log_requests", "false", False),
    ("otlp_endpoint", "http://localhost:4318/v1/traces", "http://localhost:4318/v1/traces"),
    ("otlp_endpoint", "https://collector", "https://collector"),
    ("otlp_endpoint", None, None),
]

BAD = [
    ("model", "", "a checkpoint path, a hub id or 'demo'"),
    ("model", 5, "a string"),
    ("model", None, "a string"),
    ("tokenizer", ["x"], "a string"),
    ("dtype", "fp8", "one of auto, bfloat16, float16, float32"),
    ("model_impl", "vllm", "one of auto, native, transformers, static"),
    ("quantization", "int4", "one of none, int8, fp8"),
    ("load_format", "gguf", "one of auto, dummy"),
    ("device", "tpu", "auto, cpu, cuda or cuda:N"),
    ("device", "cpu:", "auto, cpu, cuda or cuda:N"),
    ("device", "cpu:0", "auto, cpu, cuda or cuda:N"),
    ("device", "cuda:", "auto, cpu, cuda or cuda:N"),
    ("device", "cuda:-1", "auto, cpu, cuda or cuda:N"),
    ("device", "cuda:٣", "auto, cpu, cuda or cuda:N"),
    ("device", "cpu\n", "auto, cpu, cuda or cuda:N"),
    ("block_size", 12, "a power of two from 8 to 256"),
    ("block_size", 4, "a power of two from 8 to 256"),
    ("block_size", 512, "a power of two from 8 to 256"),
    ("block_size", -16, "a power of two from 8 to 256"),
    ("gpu_memory_utilization", 0, "a number in (0, 1]"),
    ("gpu_memory_utilization", "nan", "a number in (0, 1]"),
    ("gpu_memory_utilization", 1.01, "a number in (0, 1]"),
    ("gpu_memory_utilization", "most", "a number"),
    ("gpu_memory_utilization", True, "a number"),
    ("trust_remote_code", 1, "true or false"),
    ("allow_pickle", "yes", "true or false"),
    ("max_prompt_bytes", 0, BYTES),
    ("max_prompt_bytes", "16MiB", "an integer"),
    ("max_prompt_bytes", "٢", "an integer"),
    ("kv_cache_memory_bytes", 0, BYTES),
    ("kv_cache_memory_bytes", 2**63, BYTES),
    ("kv_cache_memory_bytes", "4GiB", "an integer"),
    ("swap_space_bytes", -1, BYTES.replace("from 1", "from 0")),
    ("swap_space_bytes", "4GiB", "an integer"),
    ("max_logprobs", -1, "an integer from 0 to 1,024"),
    ("max_logprobs", 1025, "an integer from 0 to 1,024"),
    ("max_logprobs", "many", "an integer"),
    ("max_num_queued_requests", -1, COUNT.replace("from 1", "from 0")),
    ("max_num_queued_requests", 2**31, COUNT.replace("from 1", "from 0")),
    ("preemption_mode", "drop", MODES),
    ("preemption_mode", "", MODES),
    ("scheduling_policy", "FCFS", POLICIES),
    ("scheduling_policy", None, "a string"),
    ("tenant_weights", {"gold": 4}, "a string"),
    ("allow_inspect", "maybe", "true or false"),
    ("enable_prefix_caching", 1, "true or false"),
    ("enable_lora", 1, "true or false"),
    ("max_loras", 0, "an integer from 1 to 2,147,483,647"),
    ("max_lora_rank", 0, "an integer from 1 to 2,147,483,647"),
    ("engine_process", 1, "true or false"),
    ("engine_process", "yes", "true or false"),
    ("drain_timeout_s", -1, "seconds from 0 to 3600"),
    ("drain_timeout_s", float("inf"), "seconds from 0 to 3600"),
    ("drain_timeout_s", 10**400, "a number"),
    ("step_timeout_s", 0.5, "seconds from 1 to 86400"),
    ("step_timeout_s", float("nan"), "seconds from 1 to 86400"),
    ("distributed_executor_backend", "horovod", "mp or ray"),
    ("ray_address", "ray://head:10001", "auto, or HOST:PORT of a cluster that runs"),
    ("ray_address", "head:65536", "auto, or HOST:PORT of a cluster that runs"),
    ("ray_address", "head:0", "auto, or HOST:PORT of a cluster that runs"),
    ("ray_address", "he\0ad:1", "auto, or HOST:PORT of a cluster that runs"),
    ("ray_address", "local", "auto, or HOST:PORT of a cluster that runs"),
    ("log_format", "xml", "text or json"),
    ("log_format", None, "a string"),
    ("log_requests", "maybe", "true or false"),
    ("otlp_endpoint", "localhost:4318", "a URL that begins with http:// or https://"),
    ("otlp_endpoint", "http://", "a URL that begins with http:// or https://"),
    ("otlp_endpoint", "http://a b", "a URL that begins with http:// or https://"),
    ("otlp_endpoint", "", "a URL that begins with http:// or https://"),
    *[(name, 0, COUNT) for name in COUNTS],
    *[(name, 2**31, COUNT) for name in COUNTS],
    *[(name, 10**5000, COUNT) for name in COUNTS],
    *[(name, 1.5, "an integer") for name in COUNTS],
    *[(name, float("nan"), "an integer") for name in COUNTS],
    *[(name, True, "an integer") for name in COUNTS],
    *[(name, "9" * 5000, "an integer") for name in COUNTS],
]


def _names(cases):
    return [f"{name}-{index}" for index, (name, *_) in enumerate(cases)]


@pytest.fixture
def load(tmp_path):
    """Load options from the text of engine.json, parameters and the environment."""

    def load_text(text: str | bytes, parameters=None, environment=None) -> EngineConfig:
        path = tmp_path / "engine.json"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return EngineConfig.load(path, parameters or {}, environment or {})

    return load_text


@pytest.mark.parametrize(("name", "given", "read"), GOOD, ids=_names(GOOD))
def test_a_good_value_is_read(name, given, read):
    config = EngineConfig.from_mapping({"model": "demo", name: given})
    assert getattr(config, name) == read
    assert type(getattr(config, name)) is type(read)
    assert config == EngineConfig(**{"model": "demo", name: given})


@pytest.mark.parametrize(("name", "given", "allowed"), BAD, ids=_names(BAD))
def test_a_bad_value_is_refused_with_what_is_allowed(name, given, allowed):
    for make in (EngineConfig.from_mapping, lambda values: EngineConfig(**values)):
        with pytest.raises(ConfigError) as caught:
            make({"model": "demo", name: given})
        text = str(caught.value)
        assert text.startswith(f"option {name} is ")
        assert text.endswith(f" but must be {allowed}")
        assert len(text) < 200


def test_the_given_value_is_in_the_message():
    with pytest.raises(ConfigError, match=r"^option block_size is 12 but must be a power of two"):
        EngineConfig("demo", block_size="12")


def test_the_budget_covers_a_decode_of_every_sequence():
    assert EngineConfig("demo", max_num_seqs=5, max_num_batched_tokens=5)
    with pytest.raises(
        ConfigError,
        match=r"^option max_num_batched_tokens is 4 but must be at least max_num_seqs \(5\)$",
    ):
        EngineConfig("demo", max_num_seqs=5, max_num_batched_tokens=4)


def test_swapping_needs_swap_space():
    assert EngineConfig("demo", preemption_mode="swap").swap_space_bytes is None
    assert EngineConfig("demo", preemption_mode="auto", swap_space_bytes=0)
    with pytest.raises(
        ConfigError,
        match=r"^option preemption_mode is 'swap' but must be auto or recompute when "
        r"swap_space_bytes is 0$",
    ):
        EngineConfig("demo", preemption_mode="swap", swap_space_bytes="0")


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_tenant_weights_are_read_before_anything_is_loaded(policy):
    with pytest.raises(
        ConfigError,
        match=r"^option tenant_weights gives tenant 'gold' the weight 'x' but it must be a number ",
    ):
        EngineConfig("demo", scheduling_policy=policy, tenant_weights="gold=x")


def test_ranks_are_those_of_all_stages():
    assert EngineConfig("demo").num_ranks == 1
    assert EngineConfig("demo", tensor_parallel_size=2, pipeline_parallel_size="4").num_ranks == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"device": "cuda:1"},
            "device is 'cuda:1' but must be auto, cpu or cuda with 2 ranks; Ray ",
        ),
        ({"device": "cuda", "devices": "0,1"}, "devices is '0,1' but must be absent with Ray"),
    ],
)
def test_of_the_gpus_of_several_machines_ray_chooses(options, message):
    ray = {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2}
    with pytest.raises(ConfigError, match=f"^option {message}"):
        EngineConfig("m", **ray, **options)
    for device in ("auto", "cpu", "cuda"):
        assert EngineConfig("m", device=device, **ray).is_over_ray
    assert not EngineConfig("m", distributed_executor_backend="ray", devices="1").is_over_ray


def test_several_ranks_are_on_no_single_device():
    message = r"^option device is 'cuda:1' but must be auto, cpu or cuda with 2 ranks; option devi"
    with pytest.raises(ConfigError, match=message):
        EngineConfig("demo", device="cuda:1", tensor_parallel_size=2)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_devices_are_not_named_twice(device):
    message = f"^option devices is '0' but must be absent where device is {device}$"
    with pytest.raises(ConfigError, match=message):
        EngineConfig("demo", device=device, devices="0")


def test_devices_are_one_for_each_rank():
    assert EngineConfig("demo", devices="1,0", tensor_parallel_size=2).devices == "1,0"
    with pytest.raises(
        ConfigError, match=r"^option devices is '1' but must be 2 numbers, one for "
    ):
        EngineConfig("demo", device="cuda", devices="1", pipeline_parallel_size=2)


def test_several_ranks_take_the_native_decoder():
    message = "^option model_impl is 'transformers' but must be auto or native with 2 ranks$"
    with pytest.raises(ConfigError, match=message):
        EngineConfig("demo", model_impl="transformers", pipeline_parallel_size=2)


def test_an_unknown_option_names_the_nearest_and_lists_the_known(load):
    with pytest.raises(ConfigError) as caught:
        load('{"model": "demo", "num_kv_block": 1}')
    known = ", ".join(sorted(field.name for field in fields(EngineConfig)))
    assert str(caught.value) == (
        f"unknown engine option 'num_kv_block'; did you mean 'num_kv_blocks'? (known: {known})"
    )


def test_an_unknown_option_near_nothing_lists_the_known():
    with pytest.raises(ConfigError, match=r"^unknown engine option 'zzz' \(known: allow_inspect, "):
        EngineConfig.from_mapping({"model": "demo", "zzz": 1})


def test_a_missing_model_is_refused(load):
    with pytest.raises(ConfigError, match=r"^option 'model' is missing; name a checkpoint path"):
        load("{}")


def test_the_environment_beats_parameters_and_they_beat_the_file(load):
    text = '{"model": "file", "block_size": 8, "max_num_seqs": 3, "dtype": "float16"}'
    config = load(
        text,
        {"block_size": "32", "max_num_seqs": "4"},
        {"OCTAVO_MAX_NUM_SEQS": "5", "OCTAVO_NUM_KV_BLOCKS": "220", "OCTAVO_KERNELS": "reference"},
    )
    assert config == EngineConfig(
        "file", dtype="float16", block_size=32, max_num_seqs=5, num_kv_blocks=220
    )


def test_every_option_has_an_environment_variable(load):
    good = {name: str(read) for name, _, read in GOOD if read is not None}
    good |= {"model": "demo", "max_model_len": "9", "default_max_tokens": "9", "cpu_threads": "1"}
    good |= {"max_num_batched_tokens": "77", "model_impl": "native"}
    ranks = int(good["tensor_parallel_size"]) * int(good["pipeline_parallel_size"])
    good |= {"device": "cuda", "devices": ",".join(map(str, range(ranks)))}
    config = load("{}", environment={f"OCTAVO_{n.upper()}": v for n, v in good.items()})
    assert config == EngineConfig(**good)
    assert set(good) == {field.name for field in fields(EngineConfig)}


def test_without_engine_json_the_other_places_decide(tmp_path):
    config = EngineConfig.load(tmp_path / "absent.json", {"model": "demo"}, {})
    assert config == EngineConfig("demo")


def test_engine_json_is_utf8_wherever_it_is_read(load):
    assert load('{"model": "modèle/é😀"}').model == "modèle/é😀"


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe\x00", b'{"a": \xff}', b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut off", "not text", "bad utf-8", "deep", "long integer"],
)
def test_an_engine_json_that_is_not_json_is_refused(text, load):
    with pytest.raises(ConfigError, match=r"engine\.json cannot be read as JSON: "):
        load(text)


@pytest.mark.parametrize("text", ["[]", "null", '"demo"', "5"])
def test_an_engine_json_that_is_no_object_is_refused(text, load):
    with pytest.raises(ConfigError, match=r"engine\.json must hold a JSON object of engine opti"):
        load(text)


def test_an_engine_json_that_is_a_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read as JSON: .*directory"):
        EngineConfig.load(tmp_path, {}, {})


def test_every_option_is_documented_in_order_with_its_default():
    docs = option_docs()
    assert [name for name, _, _ in docs] == [field.name for field in fields(EngineConfig)]
    assert all(text.endswith(".") and len(text) > 20 for _, _, text in docs)
    defaults = {name: default for name, default, _ in docs}
    assert defaults["model"] == "required"
    assert defaults["block_size"] == "16"
    assert defaults["num_kv_blocks"] == "null"
    assert defaults["engine_process"] == "true"
    assert defaults["dtype"] == '"auto"'


def test_quantities_name_their_unit():
    units = {"_tokens": "oken", "_bytes": "bytes", "_s": "econds", "_len": "tokens"}
    for name, _, text in option_docs():
        for suffix, word in units.items():
            assert not name.endswith(suffix) or word in text, name


def test_options_are_frozen_and_cross_processes():
    config = EngineConfig("demo", block_size=32)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(FrozenInstanceError):
        config.block_size = 16


def test_a_path_object_is_no_model_name():
    with pytest.raises(ConfigError, match=r"^option model is PosixPath.* must be a string$"):
        EngineConfig(Path("x"))
