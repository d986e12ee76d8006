import json
import re
import signal
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from octavo_client.cli import COMMANDS, generate

#: The fake server decodes for 3 ms; in what it sends at once nobody saw a first token.
STATS = r"\[7 tokens read; {} in [\d.]+ s(, first after [\d.]+ s)?, {} tokens/s; {}\]\n"


@pytest.fixture
def run(server):
    def run(command, *args, **options):
        return CliRunner().invoke(command, ["--url", server.url, *args], **options)

    return run


def test_the_commands_of_the_octavo_program_are_these():
    names = "generate chat health inspect top bench"
    assert [command.name for command in COMMANDS] == names.split()


def test_the_answer_goes_to_stdout_and_statistics_to_stderr(server, run):
    server.plays(server.delta("Hel", 1), server.last("lo", 2, 3, finish_reason="length"))
    result = run(generate, "hi")
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    assert re.fullmatch(STATS.format("3 tokens", "666.7", "length"), result.stderr)


def test_every_sampling_option_reaches_the_server(server, run):
    options = "--max-tokens 3 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 7"
    options += " --lora-name legal"
    scheduling = "--priority -1 --deadline 1.5 --tenant gold --cache-salt s --n 2"
    result = run(
        generate, *options.split(), *scheduling.split(), "--stop", "a", "--stop", "b", "hi"
    )
    assert result.exit_code == 0
    assert json.loads(server.requests[0]["sampling_parameters"]) == {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "lora_name": "legal",
        "stop": ["a", "b"],
        "priority": -1,
        "deadline_ms": 1500.0,
        "tenant": "gold",
        "cache_salt": "s",
        "n": 2,
    }


def test_options_that_are_not_given_are_left_to_the_server(server, run):
    run(generate, "hi")
    assert server.requests[0]["sampling_parameters"] == b"{}"


def test_a_dash_reads_the_prompt_from_stdin(server, run):
    run(generate, "-", input="two\nlines")
    assert server.requests[0]["text_input"] == b"two\nlines"


def test_no_stream_prints_the_whole(server, run):
    server.plays(server.last("Hello", 1, 2))
    result = run(generate, "--no-stream", "hi")
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    assert re.fullmatch(STATS.format("2 tokens", "333.3", "stop"), result.stderr)
    assert server.requests[0]["stream"] is False


def test_json_prints_one_object_for_each_response(server, run):
    server.plays(server.delta("né", 1), server.last("!", 2))
    result = run(generate, "--json", "hi")
    shared = {"num_input_tokens": 7, "num_output_tokens": 1, "index": 0}
    timing = json.loads(server.TIMING)
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"text": "né", "token_ids": [1], "finish_reason": None, "timing": None, **shared},
        {"text": "!", "token_ids": [2], "finish_reason": "stop", "timing": timing, **shared},
    ]


def test_several_answers_are_printed_whole_with_headings_between_them(server, run):
    answers = (("One", "stop", (1,)), ("Two", "length", (2, 3)))
    server.plays(server.answers(*answers, final=True, timing=server.TIMING))
    result = run(generate, "--n", "2", "hi")
    assert result.exit_code == 0
    assert result.stdout == "--- 1 of 2: stop ---\nOne\n--- 2 of 2: length ---\nTwo\n"
    assert re.fullmatch(STATS.format("3 tokens", "333.3", "stop, length"), result.stderr)
    assert server.requests[0]["stream"] is False


def test_several_answers_are_one_json_object_each(server, run):
    server.plays(server.answers(("One", "stop", (1,)), ("Two", "length", (2, 3)), final=True))
    for options in (["--n", "2"], ["--n", "2", "--no-stream"]):
        objects = [
            json.loads(line) for line in run(generate, *options, "--json", "hi").stdout.splitlines()
        ]
        assert [(each["index"], each["text"]) for each in objects] == [(0, "One"), (1, "Two")]


def test_tokens_that_were_cached_are_told(server, run):
    timing = server.TIMING.replace('"cached_tokens": 0', '"cached_tokens": 6')
    server.plays(server.last("Hello", 1, timing=timing))
    assert run(generate, "hi").stderr.startswith("[7 tokens read, 6 of them cached; 1 token in")


def test_json_without_streaming_prints_one_object(server, run):
    server.plays(server.last("Hello", 1, 2))
    result = run(generate, "--json", "--no-stream", "hi")
    assert json.loads(result.stdout)["text"] == "Hello"


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [("INTERNAL", 1), ("UNAVAILABLE", 1), ("CANCELLED", 1), ("INVALID_ARGUMENT", 2)],
)
def test_an_error_is_one_line_and_an_exit_code(server, run, status, exit_code):
    server.plays(server.delta("Hel"), server.fail(status, "it went wrong"))
    result = run(generate, "hi")
    assert (result.exit_code, result.stdout) == (exit_code, "Hel\n")
    assert re.fullmatch(r"Error: .*it went wrong\n", result.stderr)


def test_bad_usage_exits_with_2(run):
    result = run(generate, "--top-k", "many", "hi")
    assert result.exit_code == 2
    assert "'many' is not a valid integer" in result.stderr


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("top_p is 7.0 but must be a number in (0, 1]", "--top-p is 7.0"),
        ("n is 65 but max_num_seqs is 64", "--n is 65 but max_num_seqs is 64"),
        ("tenant has 300 characters but", "--tenant has 300"),
        ("deadline_ms is 1e+99 but", "--deadline in milliseconds is 1e+99"),
        ("the prompt has 9 tokens", "the prompt has 9"),
    ],
)
def test_errors_name_the_option_rather_than_the_parameter(server, run, message, told):
    server.plays(server.refuse(f"INVALID_ARG: {message}"))
    result = run(generate, "hi")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {told}")


@pytest.mark.parametrize(
    "command",
    [each for each in COMMANDS if any("--timeout" in option.opts for option in each.params)],
    ids=lambda command: command.name,
)
def test_seconds_are_checked_before_anything_is_sent(server, run, command):
    prompt = ["hi"] if command is generate else []
    for option in ("--timeout", "--deadline") if prompt else ("--timeout",):
        result = run(command, *prompt, option, "-1")
        assert result.exit_code == 2
        assert f"'{option}': -1.0 is not in the range x>0" in result.stderr
    assert server.requests == []


@pytest.mark.parametrize("header", ["x-key", "=secret", " =secret"])
def test_a_header_without_name_or_value_is_refused_without_being_shown(server, run, header):
    result = run(generate, "--header", header, "hi")
    assert result.exit_code == 2
    assert "Invalid value for '--header': it must be a name, '=' and a value" in result.stderr
    assert "secret" not in result.stderr


def test_a_key_file_needs_its_certificate(server, run):
    result = run(generate, "--key", __file__, "hi")
    assert result.exit_code == 2
    assert result.stderr == "Error: --key is given without --cert but must have it beside\n"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_names_the_variable_of_the_address(command):
    result = CliRunner().invoke(
        command, ["--help"], auto_envvar_prefix=f"OCTAVO_{command.name.upper()}"
    )
    assert re.search(rf"\bOCTAVO_{command.name.upper()}_(METRICS_)?URL\b", result.stdout)


def test_a_time_limit_ends_the_command(server, run):
    server.plays(server.delta("a"), server.HANG)
    result = run(generate, "--timeout", "0.2", "hi")
    assert (result.exit_code, result.stdout) == (1, "a\n")
    assert result.stderr == "Error: the request was not finished within 0.2 s and was cancelled\n"


def test_no_server_is_one_line_that_names_the_address(free_url):
    result = CliRunner().invoke(generate, ["--url", free_url, "hi"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: no gRPC server answers at {free_url}: Connection refused\n"


def test_ctrl_c_cancels_on_the_server_and_exits_with_130(server):
    server.plays(server.delta("Hel", 1), server.HANG)
    code = "from octavo_client.cli import generate; generate()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--url", server.url, "hi"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(10, process.kill)
    watchdog.start()
    with process:
        assert process.stdout.read(3) == "Hel"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    watchdog.cancel()
    assert (process.returncode, rest, errors) == (130, "\n", "\n")
    assert server.wait_cancelled()["text_input"] == b"hi"
