import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from octavo_client.chat import GREETING
from octavo_client.cli import chat

PROGRAM = [sys.executable, "-c", "from octavo_client.cli import chat; chat()"]


@pytest.fixture
def talk(server):
    def talk(text, *args):
        return CliRunner().invoke(chat, ["--url", server.url, *args], input=text)

    return talk


def conversations(server):
    """Return the messages of every request, each as `role: content`."""
    return [
        [f"{message['role']}: {message['content']}" for message in json.loads(request["messages"])]
        for request in server.requests
    ]


def test_the_conversation_is_kept(server, talk):
    server.plays(server.delta("A", 1), server.last("!", 2))
    result = talk("one\n\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "A!\nA!\n")
    assert conversations(server) == [
        ["user: one"],
        ["user: one", "assistant: A!", "user: two"],
    ]


def test_what_was_read_and_how_fast_it_went_follows_each_answer_on_stderr(server, talk):
    timing = server.TIMING.replace('"cached_tokens": 0', '"cached_tokens": 6')
    server.plays(server.delta("A", 1), server.last("!", 2, timing=timing))
    stderr = talk("one\ntwo\n").stderr
    assert stderr.count("[7 tokens read, 6 of them cached; 2 tokens in ") == 2
    assert stderr.count(", 333.3 tokens/s; stop]\n") == 2


def test_exit_leaves_before_the_end_of_input(server, talk):
    talk("one\n/exit\ntwo\n")
    assert len(server.requests) == 1


def test_help_says_what_there_is_and_asks_nothing_of_the_model(server, talk):
    result = talk("/help\n")
    assert (result.stdout, result.stderr) == ("", f"{GREETING}\n")
    assert server.requests == []


def test_clear_forgets_all_but_the_system_message(server, talk):
    talk("one\n/clear\ntwo\n", "--system", "Be brief.", "--max-tokens", "4")
    assert conversations(server) == [
        ["system: Be brief.", "user: one"],
        ["system: Be brief.", "user: two"],
    ]
    assert server.requests[1]["sampling_parameters"] == b'{"max_tokens": 4}'


def test_an_error_ends_a_conversation_from_a_pipe(server, talk):
    server.plays(server.fail("UNAVAILABLE", "the queue is full"))
    result = talk("one\ntwo\n")
    assert result.exit_code == 1
    assert "the queue is full" in result.stderr
    assert len(server.requests) == 1


class Terminal:
    """The chat program as a person sees it; stdin, stdout and stderr are one terminal."""

    def __init__(self, url):
        self._near, far = pty.openpty()
        self.process = subprocess.Popen([*PROGRAM, "--url", url], stdin=far, stdout=far, stderr=far)
        os.close(far)
        self._unread = ""

    def wait_for(self, text):
        while text not in self._unread:
            self._unread += os.read(self._near, 4096).decode()
        self._unread = self._unread.partition(text)[2]

    def type(self, text):
        os.write(self._near, text.encode())

    def press_ctrl_c(self):
        self.process.send_signal(signal.SIGINT)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._near)


@pytest.fixture
def terminal(server):
    terminal = Terminal(server.url)
    watchdog = threading.Timer(10, terminal.process.kill)
    watchdog.start()
    yield terminal
    watchdog.cancel()
    terminal.close()


def test_ctrl_c_stops_the_answer_and_not_the_chat(server, terminal):
    server.plays(server.delta("Once", 1), server.HANG)
    terminal.wait_for("> ")
    terminal.type("a story\n")
    terminal.wait_for("Once")
    terminal.press_ctrl_c()
    terminal.wait_for("stopped")
    server.wait_cancelled()
    server.plays(server.last("Done", 1))
    terminal.wait_for("> ")
    terminal.type("half a li")
    terminal.wait_for("half a li")
    time.sleep(0.2)  # line editing notices the signal only once it waits for the next key
    terminal.press_ctrl_c()
    terminal.wait_for("> ")
    terminal.type("go on\n")
    terminal.wait_for("1 token in ")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(5) == 0
    assert conversations(server)[1] == ["user: a story", "assistant: Once", "user: go on"]


def test_an_error_stops_the_answer_and_not_the_chat(server, terminal):
    server.plays(server.refuse("INVALID_ARG: top_p is 7.0 but must be a number in (0, 1]"))
    terminal.wait_for("> ")
    terminal.type("one\n")
    terminal.wait_for("Error: --top-p is 7.0 but must be")
    server.plays(server.last("Done", 1))
    terminal.wait_for("> ")
    terminal.type("two\n")
    terminal.wait_for("Done")
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(5) == 0
    assert conversations(server) == [["user: one"], ["user: two"]]
