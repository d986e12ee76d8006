"""The time that work takes on a device, as decode steps see it: from memory, not from a warm cache.

Knows no kernel. On a CPU the same functions run a few times by the wall clock, so that whoever uses
them can be tested without a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Work = Callable[[], object]

_FLUSH_BYTES = 256 << 20  # several times any L2 cache
_WARM_UPS = 3
_BUDGET_S = 0.25  # of one measurement, about
_FEWEST, _MOST = 5, 100


def time_work(work: Work, device: torch.device, *, captured: bool = True) -> float:
    """Return the median seconds that `work` takes on the device, which begins each with a cold L2.

    Args:
        work: Queues work on the current stream, and waits for none of it.
        device: Where.
        captured: Replay it as a CUDA graph, so that time is the device's alone. Work that may not
            be captured is launched anew each time; then slow launches count where they do not hide
            behind the flush.
    """
    if device.type == "cpu":
        return _time_on_cpu(work)
    for _ in range(_WARM_UPS):
        work()
    replay = capture(work) if captured else work
    flush = torch.zeros(_FLUSH_BYTES // 4, device=device)
    first_s = _time_once(replay, flush)
    count = max(_FEWEST, min(_MOST, int(_BUDGET_S / max(first_s, 1e-6))))
    return statistics.median(_time_each(replay, flush, count))


def capture(work: Work) -> Work:
    """Return what replays `work` as a CUDA graph; it must have run before, and keeps its memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _time_on_cpu(work: Work) -> float:
    work()
    times_s = []
    for _ in range(3):
        started_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s)


def _time_once(work: Work, flush: torch.Tensor) -> float:
    return _time_each(work, flush, 1)[0]


def _time_each(work: Work, flush: torch.Tensor, count: int) -> list[float]:
    """Time `count` runs by events; the host is ahead of the device, and waits at the end only.

    The flush reads: what it wrote would have to leave the cache at the cost of what is timed.
    """
    marks = []
    for _ in range(count):
        flush.sum()
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]
