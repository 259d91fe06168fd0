"""What a pass costs on this machine: measured once for a model, kept on disk, read by the controller.

t(rows, length)   seconds of a pass over so many new rows, with so many positions cached before each
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from forerun.backends.base import Feed, Session
from forerun.models.files import write_atomically
from forerun.sampling.arrays import on_host
from forerun.sampling.choose import choose
from forerun.sampling.laws import Row, Sampler
from forerun.types import SamplingParams

ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32)
_LONG_ROWS = (1, 4, 8, 16)
_SHORT, _LONG = 64, 1024  # positions cached
_REPEATS = 7
_FIXED = 0.05  # of a pass, is what a round takes beside it, as long as nothing is known
_PRIOR_ROUNDS = 8.0
_FADING = 0.98
_HICCUP = 3.0
Clock = Callable[[], float]


@dataclass(frozen=True)
class CostTable:
    """Seconds of a pass by its rows, with few positions cached, and what each further position adds.

    Between measured numbers of rows it is a straight line; beyond them it goes on as at the end. It never falls.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]  # at `_SHORT` positions
    slope_rows: tuple[int, ...]
    slopes: tuple[float, ...]  # seconds a cached position, by rows

    def __call__(self, rows: int, length: float = _SHORT) -> float:
        """Return the seconds of a pass over `rows`; `length` is the mean number of positions cached."""
        if rows <= 0:
            return 0.0
        return _line(self.rows, self.seconds, rows) + max(0.0, length - _SHORT) * _line(
            self.slope_rows, self.slopes, rows
        )


class Correction:
    """What rounds take beside what was measured at load: a fixed part, and a factor on what drafts add.

    A machine's arithmetic gets slower and faster with its neighbours, its memory hardly, so the price of a further row
    moves against that of a pass. Least squares over past rounds, old ones fading, beginning with a few that went as
    measured; a round of more than `_HICCUP` times what was expected says nothing about the next.
    """

    def __init__(self, pass_seconds: float) -> None:
        """`pass_seconds`: of a pass over one row."""
        self._pass = pass_seconds
        self.fixed, self.factor = _FIXED * pass_seconds, 1.0
        self._sums = [0.0] * 5  # weight, x, y, x², xy
        for x in (0.0, pass_seconds):
            self._add(x, self.fixed + x, _PRIOR_ROUNDS / 2)

    def observe(self, added: float, beyond: float) -> None:
        """Learn from a round: drafts were to add so many seconds, and it took so many beyond the plain pass."""
        if beyond + self._pass > _HICCUP * (self._pass + self.fixed + self.factor * added):
            return
        self._sums = [_FADING * total for total in self._sums]
        for x in (0.0, self._pass):  # the beginning never fades altogether
            self._add(x, _FIXED * self._pass + x, (1.0 - _FADING) * _PRIOR_ROUNDS / 2)
        self._add(added, beyond, 1.0)
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        self.factor = min(max((weight * xy - x * y) / spread, 0.5), 3.0)
        self.fixed = min(max((y - self.factor * x) / weight, -0.3 * self._pass), 2.0 * self._pass)

    def _add(self, x: float, y: float, weight: float) -> None:
        for i, value in enumerate((1.0, x, y, x * x, x * y)):
            self._sums[i] += weight * value


def _line(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[i - 1], xs[i], ys[i - 1], ys[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def measure(session: Session, clock: Clock) -> CostTable:
    """Time passes over one sequence."""
    most = min(max(ROWS), session.room(), session.max_len // 4)
    rows = tuple(count for count in ROWS if count <= most)
    seconds = _times(session, clock, rows, min(_SHORT, session.max_len // 2))
    length = min(_LONG, session.max_len - most, session.room() - most)
    slope_rows = tuple(count for count in _LONG_ROWS if count <= most)
    slopes = (0.0,) * len(slope_rows)
    if length >= 2 * _SHORT:
        long = _times(session, clock, slope_rows, length)
        slopes = tuple(
            max(0.0, (after - _line(rows, seconds, count)) / (length - _SHORT))
            for count, after in zip(slope_rows, long, strict=True)
        )
    return CostTable(rows, seconds, slope_rows, _never_falling(slopes))


def _times(session: Session, clock: Clock, rows: Sequence[int], length: int) -> tuple[float, ...]:
    """Return the median seconds of a pass for each number of rows, in turns so that a disturbance hits all alike."""
    seq = session.open()
    session.extend([Feed(seq, [i % session.vocab_size for i in range(length)])])
    found: list[list[float]] = [[] for _ in rows]
    try:
        for turn in range(_REPEATS + 1):
            for times, count in zip(found, rows, strict=True):
                start = clock()
                feed = Feed(seq, [(i * 7 + 1) % session.vocab_size for i in range(count)], count)
                float(session.extend([feed]).logits[-1, 0])  # waits for a device that works on its own
                if turn:  # the first one warms up
                    times.append(clock() - start)
                session.keep(seq, length)
    finally:
        session.release(seq)
    return _never_falling([median(times) for times in found])


def _never_falling(values: Sequence[float]) -> tuple[float, ...]:
    """Return the nearest values that never fall: neighbours that do are pooled (isotonic regression)."""
    pools: list[list[float]] = []  # mean, weight
    for value in values:
        pools.append([value, 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2], pools.pop()
            pools[-1] = [(a * n + b * m) / (n + m), n + m]
    return tuple(mean for mean, weight in pools for _ in range(int(weight)))


def measure_choices(session: Session, clock: Clock) -> dict[bool, float]:
    """Return the seconds that the target's choice takes at one more row: greedy (True) and sampled (False)."""
    seq = session.open()
    try:
        logits_RV = on_host(session.extend([Feed(seq, [0] * 5, 5)]).logits)
    finally:
        session.release(seq)
    found = {}
    for greedy in (True, False):
        row = Row(Sampler(SamplingParams(temperature=0.0 if greedy else 0.8), (), (), seed=0))
        times: list[list[float]] = [[], []]
        for _ in range(_REPEATS):
            for few, count in enumerate((1, 5)):
                start = clock()
                choose(logits_RV[:count], [row] * count, [0.5] * count)
                times[few].append(clock() - start)
        found[greedy] = max(0.0, median(times[1]) - median(times[0])) / 4
    return found


def measured(session: Session, clock: Clock, *, folder: Path | None, key: Mapping[str, Any]) -> CostTable:
    """Return the table kept under `key` in `folder`, or measure it and keep it. A broken file is measured again."""
    name = hashlib.sha256(json.dumps(dict(key), sort_keys=True, default=str).encode()).hexdigest()[:24]
    path = folder / f"{name}.json" if folder else None
    if path is not None:
        try:
            kept = json.loads(path.read_text())["table"]
            return CostTable(**{field: tuple(values) for field, values in kept.items()})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass
    table = measure(session, clock)
    if path is not None:
        with suppress(OSError):  # what can't be kept is measured each time
            write_atomically(path, json.dumps({"key": dict(key), "table": asdict(table)}, default=str).encode())
    return table
