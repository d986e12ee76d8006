"""`octavo top` against a server that is only its metrics: exit codes, outages, keys and sizes."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner

from octavo_client.top.command import top

PATIENCE_S = 20.0
NO_METRICS = "no metrics from {}:"
NOT_THE_FORMAT = f"{NO_METRICS} the answer is not in Prometheus' format"
TOP = "from octavo_client.top.command import top; top()"


class MetricsServer:
    """Answers with a counter that grows by 100 tokens each time, or as it is told."""

    def __init__(self, port=0):
        self.page = self.growing
        self.num_asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.num_asked += 1
                status, text = outer.page()
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self._server = HTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def growing(self):
        labels = 'model="octavo",version="1"'
        return 200, (
            f"# TYPE octavo_engine_up gauge\noctavo_engine_up{{{labels}}} 1\n"
            "# TYPE octavo_generation_tokens_total counter\n"
            f"octavo_generation_tokens_total{{{labels}}} {100 * self.num_asked}\n"
        )

    def stop(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def start_metrics():
    servers = []

    def start(port=0):
        servers.append(MetricsServer(port))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def metrics(start_metrics):
    return start_metrics()


def run(url, *args):
    return CliRunner().invoke(top, ["--metrics-url", url, *args], env={"COLUMNS": "80"})


class Terminal:
    """`octavo top` in a terminal of its own, and everything that it has written there."""

    def __init__(self, *args, columns=80, lines=24):
        self._main, end = pty.openpty()
        self.resize(columns, lines)
        env = {**os.environ, "TERM": "xterm"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            env.pop(name, None)
        command = [sys.executable, "-c", TOP, *args]
        self.before = termios.tcgetattr(end)
        self._end = end
        self.process = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=end, env=env, start_new_session=True
        )
        self.text = ""

    def resize(self, columns, lines):
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, key):
        os.write(self._main, key)

    def read_until(self, words):
        """Read on until the words have come; return what came since the last call."""
        start, deadline = len(self.text), time.monotonic() + PATIENCE_S
        while words not in self.text[start:]:
            assert time.monotonic() < deadline, self.text[start:]
            if select.select([self._main], [], [], 0.1)[0]:
                self.text += os.read(self._main, 65536).decode(errors="replace")
        return self.text[start:]

    def settings(self):
        return termios.tcgetattr(self._end)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._end)


@pytest.fixture
def open_terminal():
    terminals = []

    def start(*args, **options):
        terminals.append(Terminal(*args, **options))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


def test_once_looks_twice_and_prints_one_picture(metrics):
    result = run(metrics.url, "--once", "--interval", "0.2")
    assert (result.exit_code, result.stderr, metrics.num_asked) == (0, "", 2)
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0].startswith(f"octavo top  {metrics.url}  ")
    assert lines[2] == "octavo, version 1: engine up"
    (rate,) = [line.split()[1] for line in lines if line.startswith("tokens/s")]
    assert 200.0 < float(rate) < 501.0, "100 tokens in a fifth of a second or a little more"
    assert "\x1b" not in result.stdout


def test_a_server_that_is_not_there_is_one_line_and_exit_code_1(free_url):
    result = run(f"http://{free_url}/metrics")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"Error: no metrics from http://{free_url}/metrics: connection refused\n"
    )


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ((404, "not found"), "no metrics from {}: status 404"),
        ((200, "<html>\n</html>"), NOT_THE_FORMAT),
        ((200, "up 1\n"), "{} has no metrics of Octavo; is the model loaded?"),
        ((200, "octavo_engine_up NaN\n"), NOT_THE_FORMAT),
        ((200, "octavo_kv_blocks_used -1\n"), NOT_THE_FORMAT),
        ((200, "octavo_kv_blocks_total 1e300\n"), NOT_THE_FORMAT),
        ((200, "# TYPE octavo_x histogram\noctavo_x_bucket 1\n"), NOT_THE_FORMAT),
        ((200, "# \n" * 6_000_000), f"{NO_METRICS} the answer has more than 16,777,216 bytes"),
    ],
    ids=["status", "text", "none of ours", "NaN", "negative", "huge", "bucket", "too long"],
)
def test_another_server_is_one_line_and_exit_code_1(metrics, page, reason):
    metrics.page = lambda: page
    result = run(metrics.url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: {reason.format(metrics.url)}\n"


@pytest.mark.parametrize("url", ["127.0.0.1:8002", "file:///etc/passwd", "http://", "http://a:b/"])
def test_what_is_no_address_of_metrics_is_exit_code_2(url):
    result = run(url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"'{url}' must look like http://127.0.0.1:8002/metrics" in result.stderr


def test_a_model_that_is_not_there_is_named_with_those_that_are(metrics):
    result = run(metrics.url, "--model", "other")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: {metrics.url} has no model 'other'; it has octavo\n"
    assert run(metrics.url, "--model", "octavo", "--once", "--interval", "0.1").exit_code == 0


def test_pictures_follow_each_other_in_a_pipe_until_ctrl_c(metrics):
    command = [sys.executable, "-c", TOP, "--metrics-url", metrics.url, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        watchdog = threading.Timer(PATIENCE_S, process.kill)
        watchdog.start()
        titles = 0
        while titles < 3:
            titles += process.stdout.readline().startswith(b"octavo top")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        watchdog.cancel()
    assert (process.returncode, errors) == (130, b"\n")


@pytest.mark.parametrize(("key", "exit_code"), [(b"q", 0), (b"\x03", 130)])
def test_a_key_ends_it_and_leaves_the_terminal_as_it_was(metrics, open_terminal, key, exit_code):
    terminal = open_terminal("--metrics-url", metrics.url, "--interval", "60")
    terminal.read_until("q ends")
    assert "\x1b[?1049h" in terminal.text, "the screen is its own"
    assert terminal.settings() != terminal.before
    started = time.monotonic()
    if exit_code == 130:
        terminal.process.send_signal(signal.SIGINT)
    else:
        terminal.press(key)
    terminal.read_until("\x1b[?1049l")
    assert terminal.process.wait(PATIENCE_S) == exit_code
    assert time.monotonic() - started < 10.0, "it does not wait for the next look"
    assert terminal.settings() == terminal.before
    assert "Traceback" not in terminal.text


def test_a_resized_terminal_is_drawn_anew_before_the_next_look(metrics, open_terminal):
    terminal = open_terminal("--metrics-url", metrics.url, "--interval", "60")
    terminal.read_until("steps/s")
    terminal.resize(200, 50)
    terminal.read_until("nothing yet              p50")
    asked = metrics.num_asked
    terminal.press(b"q")
    assert (terminal.process.wait(PATIENCE_S), asked) == (0, 1)


def test_a_server_that_goes_away_is_waited_for(start_metrics, open_terminal):
    server = start_metrics()
    terminal = open_terminal("--metrics-url", server.url, "--interval", "0.1", columns=120)
    terminal.read_until("engine up")
    server.stop()
    lost = terminal.read_until("connection refused; trying again")
    assert "engine up" in lost + terminal.read_until("engine up"), "what was seen last stays"
    start_metrics(server.port)
    while "trying again" in terminal.read_until("q ends"):
        pass
    terminal.read_until("engine up")
    terminal.press(b"q")
    assert terminal.process.wait(PATIENCE_S) == 0
