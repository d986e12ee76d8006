"""What a sample of a metric costs: CPU of the thread that writes it, and of the server.

    python benchmarks/metrics_cost.py

A server hosts a model that does nothing but give a histogram so many samples a second; its thread
and its server are compared with seconds in which it gives none, in turns.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import click
import numpy as np
import psutil
import tritonclient.grpc as triton_grpc
from script_options import COUNT

from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer

SECONDS = 3.0
RATES = (0, 1_000, 5_000)

CONFIG = """\
backend: "python"
input [{ name: "rate" data_type: TYPE_FP32 dims: [ 2 ] }]
output [{ name: "cpu_s" data_type: TYPE_FP32 dims: [ 1 ] }]
instance_group [{ kind: KIND_CPU }]
"""
MODEL = """\
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="sample_cost", description="samples", kind=pb_utils.MetricFamily.HISTOGRAM
        )
        self.metric = self.family.Metric(labels={}, buckets=[0.01 * 2**n for n in range(14)])

    def execute(self, requests):
        rate, seconds = pb_utils.get_input_tensor_by_name(requests[0], "rate").as_numpy()
        started, cpu, given = time.monotonic(), time.thread_time(), 0
        while (passed := time.monotonic() - started) < seconds:
            # As the engine's metrics are written: ten times a second, all that waits.
            while given < rate * passed:
                self.metric.observe(0.01 * (given % 100))
                given += 1
            time.sleep(0.1)
        spent = np.array([time.thread_time() - cpu], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("cpu_s", spent)])]
"""


@click.command()
@click.option("--rounds", default=5, show_default=True, type=COUNT, help="Turns of each rate.")
def main(rounds: int) -> None:
    """Print the CPU that samples take, as a share of a core."""
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder, "cost", "1")
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG)
        (version / "model.py").write_text(MODEL)
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        with TritonServer(ServerOptions(repository=Path(folder), **ports)) as server:
            server.wait_ready(timeout_s=60)
            turns = [{rate: play(server, rate) for rate in RATES} for _ in range(rounds)]
    for rate in RATES:
        thread, process = zip(*(turn[rate] for turn in turns), strict=True)
        click.echo(
            json.dumps(
                {
                    "samples_per_s": rate,
                    "writing_thread": f"{statistics.median(thread):.2%} of a core",
                    "server": f"{statistics.median(process):.2%} of a core",
                }
            )
        )


def play(server: TritonServer, rate: int) -> tuple[float, float]:
    """Return the shares of a core that the writing thread and the server take at a rate."""
    tensor = triton_grpc.InferInput("rate", [2], "FP32")
    tensor.set_data_from_numpy(np.array([rate, SECONDS], np.float32))
    process = psutil.Process(server.pid)
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        before = process.cpu_times()
        answer = client.infer("cost", [tensor])
        after = process.cpu_times()
    server_s = after.user + after.system - before.user - before.system
    return float(answer.as_numpy("cpu_s")[0]) / SECONDS, server_s / SECONDS


if __name__ == "__main__":
    main()
