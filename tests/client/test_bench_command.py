import json
import os
import re
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner

from octavo_client.bench.command import bench

PNG = b"\x89PNG\r\n\x1a\n"
SMALL = ("--requests", "6", "--concurrency", "2", "--warm-up", "1")


@pytest.fixture
def run(server):
    server.plays(server.delta("a", 1), server.last("bc", 2, 3))

    def run(*args):
        options = ("--url", server.url, "--output-tokens", "3", "--prompt-tokens", "4")
        return CliRunner().invoke(bench, [*options, *args])

    return run


def test_a_run_is_a_table_on_stdout_and_exit_code_0(server, run):
    result = run(*SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "octavo: 2 clients, prompts of 4 random token ids, answers of 3 tokens, seed 0\n\nms"
    )
    assert re.search(r"^requests +6 ok, 0 cancelled, 0 failed *$", result.stdout, re.M)
    assert len(server.requests) == 7, "six and the one to warm up"


def test_a_label_is_shown_as_it_is(run):
    assert run(*SMALL, "--label", "[bold]a").stdout.startswith("[bold]a: 2 clients")


def test_a_run_that_sends_nothing_has_a_report_and_a_plot(run, tmp_path):
    file = tmp_path / "run.png"
    result = run("--rate", "0.001", "--duration", "0.01", "--plot", str(file))
    assert result.exit_code == 0, result.output
    assert "0 ok, 0 cancelled, 0 failed" in result.stdout
    assert file.read_bytes().startswith(PNG)


def test_failures_are_counted_by_code_and_exit_with_1(server, run):
    server.plays(server.refuse("UNAVAILABLE: full"))
    result = run(*SMALL)
    assert result.exit_code == 1
    assert "0 ok, 0 cancelled, 6 failed (6 UNAVAILABLE)" in result.stdout
    assert re.search(r"^first UNAVAILABLE +full *$", result.stdout, re.M)


def test_cancelled_requests_are_no_failures(server, run):
    server.plays(server.delta("a", 1), server.delta("b", 1), server.HANG)
    result = run(*SMALL, "--cancel", "1")
    assert result.exit_code == 0, result.output
    assert "0 ok, 6 cancelled, 0 failed" in result.stdout


def test_json_has_settings_figures_and_every_request(server, run, tmp_path):
    file = tmp_path / "run.json"
    assert run(*SMALL, "--json", str(file), "--label", "mine", "--seed", "5").exit_code == 0
    written = json.loads(file.read_text())
    assert written["server"] == {"url": server.url, "model": "octavo", "counted": {}}
    assert written["settings"]["label"] == "mine"
    assert written["settings"]["workload"]["seed"] == 5
    assert written["settings"]["workload"]["output_tokens"]["text"] == "3"
    assert written["report"]["num_ok"] == len(written["requests"]) == 6
    assert written["report"]["time_to_first_token_s"]["count"] == 6
    assert [num for _, num in written["requests"][0]["arrivals"]] == [1, 2]


def test_json_on_stdout_stands_there_alone(run):
    result = run(*SMALL, "--json", "-")
    assert json.loads(result.stdout)["report"]["num_ok"] == 6
    assert "time to first token" in result.stderr


def test_a_plot_is_a_png(run, tmp_path):
    file = tmp_path / "run.png"
    assert run(*SMALL, "--plot", str(file)).exit_code == 0
    assert file.read_bytes().startswith(PNG)


def test_a_plot_of_failures_alone_is_a_png_too(server, run, tmp_path):
    server.plays(server.refuse("UNAVAILABLE: full"))
    file = tmp_path / "run.png"
    assert run(*SMALL, "--plot", str(file)).exit_code == 1
    assert file.read_bytes().startswith(PNG)


def test_without_matplotlib_a_plot_is_refused_before_anything_is_sent(server, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['matplotlib'] = None\n")
    code = "from octavo_client.cli import bench; bench()"
    result = subprocess.run(
        [sys.executable, "-c", code, "--url", server.url, "--plot", "x.png"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == (
        "Error: --plot needs matplotlib, which is not installed; run pip install matplotlib\n"
    )
    assert server.requests == []


def test_poisson_arrivals_for_a_time(server, run):
    result = run("--rate", "40", "--duration", "0.5", "--warm-up", "0")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("octavo: 40 requests/s, prompts")
    assert len(server.requests) == 23, "as the seed has it"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--rate", "1", "--concurrency", "1"), "--concurrency and --rate exclude each other"),
        (("--prompt-tokens", "9-3"), "'9-3' is no distribution of lengths: 1 <= A"),
        (("--token-ids", "9", "3"), "--token-ids is 9 3 but must rise"),
        (("--shared-prefix", "1.5"), "1.5 is not in the range"),
        (("--requests", "0"), "0 is not in the range"),
        (("--metrics-url", "localhost:8002"), "'localhost:8002' must look like http://"),
        (("--json", "/no/such/folder/run.json"), "No such file or directory"),
        (("--plot", "/no/such/folder/run.png"), "No such file or directory"),
        (("--header", "grpc-x=1"), "header 'grpc-x' must be of letters"),
    ],
)
def test_wrong_options_are_told_before_anything_is_sent(server, run, options, told):
    result = run(*options)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
    assert server.requests == []


def test_no_server_is_one_line(free_url):
    result = CliRunner().invoke(bench, ["--url", free_url])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: no model octavo is ready at {free_url}\n"


@pytest.fixture
def metrics_url():
    """Serve a counter that has gone on by 16 at each look."""
    looks = iter(range(0, 160, 16))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = "octavo_prefix_cache_hits_total"
            text = f'# TYPE {name} counter\n{name}{{model="octavo",version="1"}} {next(looks)}\n'
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        Thread(target=http.serve_forever).start()
        yield f"http://127.0.0.1:{http.server_port}/metrics"
        http.shutdown()


def test_the_servers_own_counters_are_told_if_it_is_said_where(run, metrics_url):
    result = run(*SMALL, "--metrics-url", metrics_url)
    assert result.exit_code == 0, result.output
    assert re.search(r"^server counted +16 prefix cache hits *$", result.stdout, re.M)


def test_metrics_that_cannot_be_read_are_a_warning(run, free_url):
    result = run(*SMALL, "--metrics-url", f"http://{free_url}/metrics")
    assert result.exit_code == 0
    assert "6 ok" in result.stdout
    assert f"Warning: no metrics from http://{free_url}/metrics" in result.stderr


def test_ctrl_c_reports_what_there_is_and_exits_with_130(server):
    answers = iter([[server.last("abc", 1, 2, 3)], [server.delta("a", 1), server.HANG]])
    server.script = lambda _: next(answers)
    code = "from octavo_client.cli import bench; bench()"
    options = "--warm-up 0 --concurrency 1 --output-tokens 3".split()
    with subprocess.Popen(
        [sys.executable, "-c", code, "--url", server.url, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while len(server.requests) < 2 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (130, "")
    assert "1 ok, 0 cancelled, 0 failed, 1 interrupted" in shown
    assert server.wait_cancelled()["stream"] is True


def test_the_documentation_lists_every_option():
    page = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text()
    table = page[page.index("| option |") : page.index("Lengths are written")]
    names = {name for option in bench.params for name in (*option.opts, *option.secondary_opts)}
    cells = " ".join(re.findall(r"^\| ([^|]*) \|", table, re.M))
    assert set(re.findall(r"--[\w-]+", cells)) == names
