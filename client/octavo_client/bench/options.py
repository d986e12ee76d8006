"""The options of `octavo bench`, and the settings that they make.

Knows nothing of how a run is driven.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from octavo_client.bench.driver import Plan
from octavo_client.bench.lengths import FORMS, Lengths
from octavo_client.bench.workload import Workload, draw_arrivals
from octavo_client.cli_options import METRICS_URL, seconds

DEFAULT_CONCURRENCY = 8
DEFAULT_REQUESTS = 100

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Settings:
    """All that makes a run what it is."""

    label: str
    concurrency: int | None
    """None where requests arrive at a rate."""
    rate: float | None
    """Requests a second."""
    num_requests: int | None
    """None means as many as fit into the duration."""
    duration_s: float | None
    num_warm_up: int
    workload: Workload
    temperature: float
    ignore_eos: bool
    timeout_s: float | None
    metrics_url: str | None

    def plan(self) -> Plan:
        """Return when the requests that count are sent."""
        if self.rate is None:
            return Plan(self.concurrency, duration_s=self.duration_s)
        arrivals = draw_arrivals(self.rate, self.workload.seed)
        return Plan(arrivals=arrivals, duration_s=self.duration_s)

    def warm_up_plan(self) -> Plan:
        """Return when those before are sent: as many at once as there are clients, else all."""
        return Plan(self.concurrency or max(self.num_warm_up, 1))

    def describe(self) -> str:
        """Return what is asked of the server, in a line."""
        load = f"{self.rate:g} requests/s" if self.rate else f"{self.concurrency} clients"
        work = self.workload
        parts = [
            load,
            f"prompts of {work.prompt_tokens.text} random token ids",
            f"answers of {work.output_tokens.text} tokens",
            f"{work.shared_prefix:.0%} of each prompt shared" if work.shared_prefix else "",
            f"{work.cancel_share:.0%} cancelled" if work.cancel_share else "",
            f"seed {work.seed}",
        ]
        return ", ".join(part for part in parts if part)


class _LengthsType(click.ParamType):  # type: ignore[type-arg]
    name = "lengths"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Lengths:
        try:
            return value if isinstance(value, Lengths) else Lengths.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


_COUNT = click.IntRange(min=1)
_SHARE = click.FloatRange(0.0, 1.0)
_LOAD = (
    click.option(
        "--concurrency",
        type=_COUNT,
        help=f"Clients, each of which waits for its answer.  [default: {DEFAULT_CONCURRENCY}]",
    ),
    click.option(
        "--rate",
        type=click.FloatRange(min=0, min_open=True),
        help="Requests a second that arrive at random (Poisson), instead of --concurrency.",
    ),
    click.option(
        "--requests",
        "num_requests",
        type=_COUNT,
        help=f"Requests to send at most.  [default: {DEFAULT_REQUESTS}, if no --duration]",
    ),
    seconds("--duration", "duration_s", help="Seconds after which no request is sent any more."),
    click.option(
        "--warm-up",
        "num_warm_up",
        type=click.IntRange(min=0),
        default=4,
        show_default=True,
        help="Requests sent before, which do not count.",
    ),
    seconds("--timeout", "timeout_s", help="Seconds for a whole answer; default: no limit."),
)
_WORK = (
    click.option(
        "--prompt-tokens",
        type=_LengthsType(),
        default="128",
        show_default=True,
        help=f"Length of prompts: {FORMS}.",
    ),
    click.option(
        "--output-tokens",
        type=_LengthsType(),
        default="64",
        show_default=True,
        help="Length of answers, written alike.",
    ),
    click.option(
        "--token-ids",
        type=(click.IntRange(min=0), click.IntRange(min=0)),
        default=(100, 9_999),
        show_default=True,
        metavar="FIRST LAST",
        help="Prompts are random ids of this range of the vocabulary.",
    ),
    click.option(
        "--shared-prefix", type=_SHARE, default=0.0, help="Share of each prompt common to all."
    ),
    click.option(
        "--cancel",
        "cancel_share",
        type=_SHARE,
        default=0.0,
        help="Share of requests cancelled after a random number of tokens.",
    ),
    click.option("--seed", default=0, show_default=True, help="The same seed, the same workload."),
    click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True),
    click.option(
        "--ignore-eos/--heed-eos",
        default=True,
        show_default=True,
        help="Whether answers have exactly their length.",
    ),
)
_OUTPUT = (
    click.option("--label", default="", help="Name of the run in what is written."),
    click.option(
        "--metrics-url", type=METRICS_URL, help="Read what the server counts meanwhile, too."
    ),
    # Opened at once: a folder that is not there is told before the run, not after it.
    click.option(
        "--json",
        "json_file",
        type=click.File("w", lazy=False),
        help="Write settings, figures and requests.",
    ),
    click.option(
        "--plot",
        "plot_file",
        type=click.File("wb", lazy=False),
        help="Write a PNG; needs matplotlib.",
    ),
)


def bench_options(command: Command) -> Command:
    """Add all options but those of the connection."""
    for option in reversed((*_LOAD, *_WORK, *_OUTPUT)):
        command = option(command)
    return command


def settings_from(options: dict[str, Any]) -> Settings:
    """Return the settings that options make; those of where to write are left alone.

    Raises:
        click.UsageError: options contradict each other.
    """
    if options["concurrency"] and options["rate"]:
        raise click.UsageError("--concurrency and --rate exclude each other")
    first, last = options["token_ids"]
    if first > last:
        raise click.UsageError(f"--token-ids is {first} {last} but must rise")
    own = ("prompt_tokens", "output_tokens", "shared_prefix", "cancel_share", "seed")
    workload = Workload(**{name: options[name] for name in own}, token_ids=(first, last))
    as_given = ("label", "rate", "duration_s", "num_warm_up", "temperature", "ignore_eos")
    is_closed = options["rate"] is None
    return Settings(
        **{name: options[name] for name in (*as_given, "timeout_s", "metrics_url")},
        workload=workload,
        concurrency=(options["concurrency"] or DEFAULT_CONCURRENCY) if is_closed else None,
        num_requests=options["num_requests"]
        or (None if options["duration_s"] else DEFAULT_REQUESTS),
    )
