"""The looks at a metrics endpoint of the last minutes, and what they say of each model.

Knows nothing of connections or of drawing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from octavo_client.metrics_change import Change, change_between, total
from octavo_client.metrics_page import Key, ModelSample, Sample

#: How far back the curves go.
SPAN_S = 180.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A value a look, the latest last; None where there was none to be had."""

    values: tuple[float | None, ...]
    first: int
    """The number of looks before the first value."""
    capacity: int
    """Values that it has when it is as long as it gets."""

    def cells(self, width: int, merge: Callable[[Sequence[float]], float]) -> list[float | None]:
        """Merge as few values each as let the whole curve fit into `width` cells.

        Which values are together does not depend on how many have followed, so cells stay as they
        are while they move to the left.
        """
        size = -(-self.capacity // max(width - 1, 1))
        numbers = range(self.first, self.first + len(self.values))
        groups = groupby(zip(numbers, self.values, strict=True), lambda item: item[0] // size)
        known = [[value for _, value in group if value is not None] for _, group in groups]
        return [merge(values) if values else None for values in known][-width:]


@dataclass(frozen=True, slots=True)
class Trend:
    """A model as it is, and what happened to it."""

    now: ModelSample
    last: Change | None
    """Since the look before; None if that had nothing of this model."""
    window: Change
    """All that is known of the last seconds that were asked for."""
    generation_rate: Curve
    """Tokens a second."""
    waiting: Curve
    """Requests."""


@dataclass(frozen=True, slots=True)
class _Look:
    models: Mapping[Key, ModelSample]
    changes: Mapping[Key, Change]


class History:
    """What was seen in the last minutes; a look that failed leaves a gap in it.

    Args:
        interval_s: seconds between two looks.
        window_s: seconds that `Trend.window` tells of.
    """

    def __init__(self, interval_s: float, window_s: float) -> None:
        self._num_curve_looks = max(round(SPAN_S / interval_s), 2)
        self._num_window_looks = max(round(window_s / interval_s), 1)
        kept = max(self._num_curve_looks, self._num_window_looks)
        self._looks: deque[_Look | None] = deque(maxlen=kept)
        self._num_looks = 0
        self._last: Sample | None = None
        self._follows = False

    @property
    def last(self) -> Sample | None:
        """The latest look that did not fail."""
        return self._last

    def add(self, sample: Sample) -> None:
        """Take what was seen; it is compared with the look just before, unless that failed."""
        before = self._last.models if self._last is not None and self._follows else {}
        seconds = sample.time_s - self._last.time_s if self._last is not None else 0.0
        changes = {
            key: change_between(before[key], model, seconds)
            for key, model in sample.models.items()
            if key in before and seconds > 0.0
        }
        self._append(_Look(sample.models, changes))
        self._last, self._follows = sample, True

    def miss(self) -> None:
        """Take it that nothing could be seen."""
        self._append(None)
        self._follows = False

    def trend(self, key: Key) -> Trend:
        """Return what is known of a model that the latest look that did not fail had."""
        if self._last is None:
            raise KeyError(key)
        changes = [look.changes.get(key) if look else None for look in self._looks]
        models = [look.models.get(key) if look else None for look in self._looks]
        rates = [change.rate("generation_tokens_total") if change else None for change in changes]
        waiting = [model.gauges.get("num_requests_waiting") if model else None for model in models]
        recent = changes[-self._num_window_looks :]
        return Trend(
            now=self._last.models[key],
            last=changes[-1],
            window=total(change for change in recent if change is not None),
            generation_rate=self._curve(rates),
            waiting=self._curve(waiting),
        )

    def _append(self, look: _Look | None) -> None:
        self._looks.append(look)
        self._num_looks += 1

    def _curve(self, values: Sequence[float | None]) -> Curve:
        shown = tuple(values[-self._num_curve_looks :])
        return Curve(shown, self._num_looks - len(shown), self._num_curve_looks)
