"""Load tools made for Triton's LLM backends drive Octavo without an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.local.demo_model import demo_checkpoint
from octavo.local.triton_server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]  # the first run installs

Run = Callable[..., str]

TEMPLATE = Path(__file__).parent / "generate_stream.jinja"
NUM_REQUESTS = 8
NUM_TOKENS = 16
WORKLOAD: tuple[object, ...] = (
    *("--concurrency", 2),
    *("--request-count", NUM_REQUESTS),
    *("--warmup-request-count", 2),
    *("--synthetic-input-tokens-mean", 32),
    *("--output-tokens-mean", NUM_TOKENS),
)


def check_figures(figures: dict[str, Any]) -> None:
    """Hold what both tools report to what was asked of them."""
    assert figures["request_count"]["avg"] == NUM_REQUESTS
    assert 0 < figures["time_to_first_token"]["avg"] < figures["request_latency"]["avg"]
    assert figures["inter_token_latency"]["avg"] > 0
    # They count tokens by encoding the text again, which may take fewer.
    assert 0.75 * NUM_TOKENS <= figures["output_sequence_length"]["avg"] <= NUM_TOKENS


def test_perf_analyzer_streams_over_grpc(
    demo_server: TritonServer, run_perf_analyzer: Run, tmp_path: Path
) -> None:
    sampling = json.dumps({"max_tokens": NUM_TOKENS, "ignore_eos": True})
    tensors = {
        "text_input": ["The capital of"],
        "stream": [True],
        "sampling_parameters": [sampling],
    }
    (tmp_path / "inputs.json").write_text(json.dumps({"data": [tensors]}))
    out = tmp_path / "profile.json"
    run_perf_analyzer(
        *("perf_analyzer", "-m", "octavo", "-i", "grpc", "-u", demo_server.grpc_url),
        *("--streaming", "--async", "--service-kind", "triton"),
        *("--input-data", tmp_path / "inputs.json", "--profile-export-file", out),
        *("--concurrency-range", 2, "--request-count", NUM_REQUESTS),
    )
    (experiment,) = json.loads(out.read_text())["experiments"]
    num_responses = [len(each["response_timestamps"]) for each in experiment["requests"]]
    assert len(num_responses) == NUM_REQUESTS
    assert all(1 < count <= NUM_TOKENS for count in num_responses)


def test_genai_perf_takes_octavo_for_the_vllm_backend(
    demo_server: TritonServer, run_perf_analyzer: Run, tmp_path: Path
) -> None:
    shown = run_perf_analyzer(
        *("genai-perf", "profile", "-m", "octavo", "-u", demo_server.grpc_url),
        *("--endpoint-type", "kserve", "--backend", "vllm", "--streaming"),
        *("--tokenizer", demo_checkpoint(), "--artifact-dir", tmp_path, *WORKLOAD),
    )
    assert "Time To First Token (ms)" in shown
    (report,) = tmp_path.glob("*/profile_export_genai_perf.json")
    check_figures(json.loads(report.read_text()))


def test_aiperf_streams_over_http_by_a_template(
    demo_server: TritonServer, run_aiperf: Run, tmp_path: Path
) -> None:
    run_aiperf(
        *("profile", "-m", "octavo", "-u", demo_server.http_url, "--ui", "none"),
        *("--endpoint-type", "template", "--endpoint", "/v2/models/octavo/generate_stream"),
        *("--extra-inputs", f"payload_template:{TEMPLATE}"),
        *("--extra-inputs", "response_field:text_output", "--streaming"),
        *("--tokenizer", demo_checkpoint(), "--artifact-dir", tmp_path, *WORKLOAD),
    )
    figures = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    check_figures(figures)
    assert figures["request_error_rate"]["avg"] == 0
