"""`octavo inspect` and `Client.inspect`: what a scripted server says is drawn or passed on."""

import asyncio
import json
import signal
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner
from rich.console import Console

from octavo_client import AsyncClient, InvalidRequest
from octavo_client.block_map import BlockMap
from octavo_client.codec import encode_inspection
from octavo_client.engine_view import EngineView
from octavo_client.inspect_command import inspect


def make_sequence(request_id, status, **values):
    return {
        "request_id": request_id,
        "index": 0,
        "status": status,
        "lora_name": None,
        "tenant": "",
        "priority": 0,
        "num_prompt_tokens": 4,
        "num_tokens": 4,
        "num_computed_tokens": 0,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        "block_table": [],
        "host_table": [],
        "age_s": 2.5,
        "waiting_s": None,
        **values,
    }


@pytest.fixture
def state():
    """Two forks that share two blocks, a swapped sequence and one that never ran."""
    fork = {"num_tokens": 10, "num_computed_tokens": 9}
    return {
        "block_size": 4,
        "device": {
            "states": "ssu..ucc",
            "hashes": {"0": "0123456789ab", "6": "66" * 6, "7": "77" * 6},
            "num_owners": {"0": 2, "1": 2},
        },
        "host": {"states": "u.", "hashes": {}, "num_owners": {}},
        "sequences": [
            make_sequence("7", "running", block_table=[0, 1, 2], **fork),
            make_sequence("7", "running", index=1, block_table=[-1, 1, 5], **fork),
            make_sequence(
                "5", "swapped", host_table=[0], num_computed_tokens=3, waiting_s=1.25, priority=2
            ),
            make_sequence("9", "waiting", waiting_s=0.5, tenant="gold\x1b[2J", lora_name="x\x07"),
        ],
        "num_allocated_slots": 16,
        "num_used_slots": 11,
        "num_query_tokens": 16,
        "num_hit_tokens": 4,
        "num_swap_preemptions": 1,
        "num_recompute_preemptions": 2,
    }


@pytest.fixture
def run(server):
    def run(*args, columns=80):
        env = {"COLUMNS": str(columns), "TERM": "dumb"}
        return CliRunner().invoke(inspect, ["--url", server.url, *args], env=env)

    return run


def drawn(renderable, width, **options):
    console = Console(width=width, highlight=False, **options)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_request_is_a_parameter_without_any_tensor():
    request = encode_inspection("octavo")
    assert (request.model_name, len(request.inputs)) == ("octavo", 0)
    assert request.parameters["inspect"].bool_param is True


def test_both_clients_return_the_servers_json(server, client, state):
    async def ask():
        async with AsyncClient(server.url) as other:
            return await other.inspect(timeout_s=5)

    server.plays(server.last(json.dumps(state)))
    assert client.inspect(timeout_s=5) == state
    assert asyncio.run(ask()) == state


def test_the_picture_has_totals_queues_shared_blocks_and_pools(server, run, state):
    server.plays(server.last(json.dumps(state)))
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.rstrip() for line in result.stdout.splitlines()] == [
        "slots: 16 allocated, 11 used, 31.2 % waste",
        "prefix cache: 4 of 16 prompt tokens found, 25.0 % hits",
        "preemptions: 1 by swap, 2 by recomputing",
        "computed: tokens with KV / known tokens; 7[1]: its second answer",
        "",
        "2 running, first to last",
        "#  request  status   computed  blocks  shared    age  block table",
        "1  7[0]     running      9/10       3       2  2.5 s  0-2",
        "2  7[1]     running      9/10       2       1  2.5 s  (1 out of window) 1 5",
        "",
        "2 waiting, first to last",
        "#  request  status   computed  host  waits  priority  adapter  tenant      age",
        "1  5        swapped       3/4     1  1.2 s         2                     2.5 s",
        "2  9        waiting       0/4        0.5 s            x�       gold�[2J  2.5 s",
        "",
        "2 shared blocks, with hash and number of owners",
        "     0  0123456789ab  2",
        "     1  not full      2",
        "",
        "8 blocks of 4 tokens, 1 a cell",
        "█ 2 shared  ▓ 2 used  ░ 2 cached  · 2 free",
        "0 ██▓··▓░░",
        "",
        "2 host blocks, 1 a cell",
        "█ 0 shared  ▓ 1 used  ░ 0 cached  · 1 free",
        "0 ▓·",
    ]


def test_a_narrow_terminal_gets_fewer_columns_and_whole_lines(state):
    lines = drawn(EngineView(state), 40)
    assert max(map(len, lines)) <= 40
    assert "1  7[0]     running      9/10       3" in lines
    assert "1  7[0]     running      9/10" in drawn(EngineView(state), 36)
    assert "1  5        swapped       3/4     1" in lines


def test_a_terminal_without_unicode_gets_letters_of_ascii(state):
    class Latin(Console):
        encoding = "iso-8859-1"

    console = Latin(width=80, highlight=False)
    with console.capture() as capture:
        console.print(BlockMap("blocks", "suc."))
    assert [line.rstrip() for line in capture.get().splitlines()] == [
        "4 blocks, 1 a cell",
        "# 1 shared  = 1 used  - 1 cached  . 1 free",
        "0 #=-.",
    ]


def test_colour_is_only_for_terminals(state):
    plain = drawn(BlockMap("blocks", "su"), 40, force_terminal=False)
    coloured = drawn(BlockMap("blocks", "su"), 40, force_terminal=True, color_system="standard")
    assert plain[-1] == "0 █▓"
    assert coloured[-1] == "0 \x1b[35m█\x1b[0m\x1b[32m▓\x1b[0m"


@pytest.mark.parametrize(("num_blocks", "blocks_a_cell"), [(1024, 1), (1025, 2), (1_000_000, 1024)])
def test_a_pool_of_any_size_fits_into_sixteen_rows(num_blocks, blocks_a_cell):
    title, _, *rows = drawn(BlockMap("blocks", "c" * num_blocks), 80)
    assert len(rows) <= 16
    assert sum(row.count("░") for row in rows) == -(-num_blocks // blocks_a_cell)
    assert title == f"{num_blocks:,} blocks, {blocks_a_cell:,} a cell"


def test_a_cell_of_many_blocks_shows_the_one_most_in_use():
    states = ".c.u.suc" + "." * 24
    assert drawn(BlockMap("blocks", states, max_rows=1), 20) == [
        "32 blocks, 2 a cell",
        "█ 1 shared  ▓ 2 used",
        " 0 ░▓█▓············",
    ]


def test_rows_of_free_blocks_are_one_line_and_leave_a_fine_scale_to_the_rest():
    states = "uc" + "." * 62 + "." * 1000 + "s"
    title, _, *rows = drawn(BlockMap("blocks", states), 80)
    assert title == "1,065 blocks, 1 a cell"
    assert rows == ["   0 ▓░" + "·" * 62, "  64 960 free blocks", "1024 " + "·" * 40 + "█"]
    assert drawn(BlockMap("blocks", "." * 8192), 80)[2:] == ["   0 8,192 free blocks"]


@pytest.mark.parametrize("height", [18, 24, 40])
def test_a_watched_picture_fits_the_terminal_and_shows_the_sequences_first(state, height):
    table = list(range(0, 8000, 2))
    sequences = [make_sequence(str(i), "running", block_table=table) for i in range(30)]
    sequences += [make_sequence(str(i), "waiting", waiting_s=0.5) for i in range(30, 60)]
    state["sequences"] = sequences
    state["device"] = {
        "states": "us.c" * 20_000,
        "hashes": {},
        "num_owners": {str(block): 2 for block in range(1, 80_000, 4)},
    }
    state["host"] = {"states": "u..." * 20_000, "hashes": {}, "num_owners": {}}
    lines = drawn(EngineView(state, height), 80)
    assert len(lines) <= height
    assert all(len(line) <= 80 for line in lines)
    running, waiting, shared, device, host = (
        next(place for place, line in enumerate(lines) if title in line)
        for title in ("30 running", "30 waiting", "20,000 shared", "80,000 blocks", "80,000 host")
    )
    assert waiting - running >= 3, "a header and a sequence"
    assert shared - waiting >= 3, "a header and a sequence"
    assert host - device >= 3, "a title, a legend and a row"
    assert len(lines) - host >= 3, "a title, a legend and a row"


def test_what_fits_the_terminal_is_shown_whole(state):
    lines = drawn(EngineView(state, 24), 80)
    assert len(lines) == 21
    assert [line for line in lines if "shown" in line] == []


def test_only_the_block_table_is_cut_short(state):
    table = [block for start in range(0, 400, 3) for block in (start, start + 1)]
    state["sequences"] = [
        make_sequence(
            str(i), "running", block_table=table, num_tokens=1233, num_computed_tokens=1232
        )
        for i in range(2)
    ]
    lines = drawn(EngineView(state), 80)
    start = lines.index("2 running, first to last") + 1
    assert lines[start : start + 2] == [
        "#  request  status    computed  blocks  shared    age  block table",
        "1  0        running  1232/1233     268       2  2.5 s  0-1 3-4 6-7 9-10 12-13 1…",
    ]


def test_one_shared_block_is_no_plural(state):
    state["device"]["num_owners"] = {"0": 2}
    assert "1 shared block, with hash and number of owners" in drawn(EngineView(state), 80)


def test_a_long_queue_is_counted_rather_than_listed(state):
    state["sequences"] = [make_sequence(str(i), "waiting", waiting_s=0.0) for i in range(1000)]
    lines = drawn(EngineView(state), 80)
    assert "1,000 waiting, first to last; 24 shown, --json shows all" in lines
    assert "24  23       waiting       0/4  0.0 s  2.5 s" in lines


def test_an_idle_engine_is_drawn_too(state):
    state["sequences"] = []
    state |= {"num_allocated_slots": 0, "num_used_slots": 0, "num_query_tokens": 0}
    lines = drawn(EngineView(state), 80)
    assert "slots: 0 allocated, 0 used, no waste" in lines
    assert lines[lines.index("0 running") :][:3] == ["0 running", "", "0 waiting"]


def test_json_is_one_line_for_programs(server, run, state):
    server.plays(server.last(json.dumps(state)))
    result = run("--json")
    assert (result.exit_code, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    assert json.loads(line) == state


def test_a_refusal_is_one_line_that_names_the_option_and_exit_code_2(server, run):
    server.plays(server.refuse("INVALID_ARG: allow_inspect is false"))
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "Error: allow_inspect is false\n"


def test_a_silent_engine_is_not_waited_for_too_long(server, run):
    server.plays(server.HANG)
    result = run("--timeout", "0.1")
    assert result.exit_code == 1
    assert "not finished within 0.1 s" in result.stderr


def test_a_refusal_reaches_callers_as_their_own_error(server, client):
    server.plays(server.refuse("INVALID_ARG: allow_inspect is false"))
    with pytest.raises(InvalidRequest, match="allow_inspect"):
        client.inspect()


def test_watching_looks_again_until_ctrl_c(server, state):
    server.plays(server.last(json.dumps(state)))
    code = "from octavo_client.inspect_command import inspect; inspect()"
    args = ["--url", server.url, "--json", "--watch", "0.1"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    watchdog = threading.Timer(20, process.kill)
    watchdog.start()
    with process:
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    watchdog.cancel()
    assert [json.loads(line) for line in lines] == [state] * 3
    assert (process.returncode, errors) == (130, b"\n")


def test_a_watched_picture_has_the_terminal_for_itself_until_the_end(server, state):
    answers = iter([(server.last(json.dumps(state)),), (server.refuse("INVALID_ARG: enough"),)])
    server.script = lambda _: next(answers)
    env = {"COLUMNS": "80", "TERM": "xterm", "FORCE_COLOR": "1"}
    result = CliRunner().invoke(inspect, ["--url", server.url, "--watch", "0.1"], env=env)
    enter, leave = "\x1b[?1049h", "\x1b[?1049l"
    screen = result.stdout.partition(enter)[2].partition(leave)[0]
    assert "2 running" in screen
    assert "2 host blocks, 1 a cell" in screen
    assert (result.exit_code, result.stderr) == (2, "Error: enough\n")
