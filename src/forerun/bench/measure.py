"""Measuring: the workload, the cost of a pass over k rows, the time of a round. Clocks are arguments.

On a device that works on its own (CUDA), a stretch ends when the device has finished: `waiter` says how to wait.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from forerun.backends.base import Feed, Scores, Session
from forerun.bench.machine import Clock
from forerun.bench.stats import (
    Difference,
    Round,
    Run,
    difference_at,
    first_difference,
    order,
    schedule,
    with_logits,
)
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.sequence import Request
from forerun.engine.text import TextStream
from forerun.sampling.arrays import Array
from forerun.types import Output, SamplingParams

Wait = Callable[[], None]
Ids = Sequence[int]
_SETTLE_S = 0.005  # more than thread pools spin before they sleep
CURVE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32)
RACE_ROWS = (1, 2, 4, 8, 16)


class Contender(Protocol):
    """Someone who answers prompts and is timed."""

    name: str
    baseline: str | None  # the contender whose speed is its own plain speed; None: it is that itself
    has_our_weights: bool  # else its texts tell nothing

    def run(self, prompt_ids: Ids, params: SamplingParams) -> Run:
        """Answer one prompt."""


class Forerun:
    """Ourselves, with the drafts of the engine's settings or with none."""

    has_our_weights = True

    def __init__(self, llm: LLM, name: str, *, k: int | None, baseline: str | None = None) -> None:
        """`k` drafts a round; None: as the engine is set."""
        self.name = name
        self.baseline = baseline
        self._llm = llm
        self._k = k

    def run(self, prompt_ids: Ids, params: SamplingParams) -> Run:
        return as_run(self._llm.generate(list(prompt_ids), replace(params, k=self._k)))

    def run_batch(
        self, prompts: Sequence[Ids], params: Sequence[SamplingParams], *, clock: Clock = perf_counter
    ) -> "BatchRun":
        """Answer all prompts at once."""
        start = clock()
        outputs = self._llm.generate([list(ids) for ids in prompts], [replace(own, k=self._k) for own in params])
        return BatchRun(sum(len(output.token_ids) for output in outputs), clock() - start)


class BatchRun(NamedTuple):
    """Many prompts together: all their tokens, and the time from the first prompt handed in to the last token."""

    num_tokens: int
    seconds: float


def as_run(output: Output) -> Run:
    """Return the times of an answer; the tokens of its first round came with the first token."""
    num_first = sum(1 for trace in output.traces if trace.round == output.traces[0].round)
    return Run(output.token_ids, num_first, output.prefill_s, output.decode_s, output.speculation)


def run_workload(
    contenders: Sequence[Contender], prompts: Sequence[Ids], params: Sequence[SamplingParams], *, repetition: int
) -> Iterator[tuple[int, int, Run]]:
    """Run one repetition, contenders in turn on each prompt; yield (prompt, contender, run) as they come."""
    for prompt, contender in schedule(len(prompts), len(contenders), repetition):
        yield prompt, contender, contenders[contender].run(prompts[prompt], params[prompt])


def waiter(session: Session) -> Wait:
    """Return a function that returns when the session's device has finished what was asked of it."""
    if not str(getattr(session, "device", "cpu")).startswith("cuda"):
        return lambda: None
    probe = example_logits(session)[0, 0]

    def wait() -> None:
        probe.item()  # a copy to the host queues behind all the work before it

    return wait


def example_logits(session: Session) -> Array:
    """Return the logits of one row, (1, V): of the kind and on the device that the session computes with."""
    seq = session.open()
    try:
        return session.extend([Feed(seq, [0], 1)]).logits
    finally:
        session.release(seq)


class Passes(Protocol):
    """Something whose passes over k new tokens after a context can be timed."""

    def begin(self, context: Ids) -> None:
        """Read the context."""

    def step(self, tokens: Ids) -> None:
        """Compute the logits of all rows of `tokens`, and return when they are there."""

    def back(self) -> None:
        """Forget these tokens."""

    def end(self) -> None:
        """Forget the context."""


class SessionPasses:
    """The passes of a session of ours."""

    def __init__(self, session: Session, *, wait: Wait = lambda: None) -> None:
        self._session, self._wait = session, wait
        self._seq = self._length = 0

    def begin(self, context: Ids) -> None:
        self._seq, self._length = self._session.open(), len(context)
        self._session.extend([Feed(self._seq, context, 0)])
        self._wait()

    def step(self, tokens: Ids) -> None:
        self._session.extend([Feed(self._seq, tokens, len(tokens))])
        self._wait()

    def back(self) -> None:
        self._session.keep(self._seq, self._length)

    def end(self) -> None:
        self._session.release(self._seq)


def pass_times(
    engines: Sequence[Passes],
    context: Ids,
    *,
    rows: Sequence[int] = CURVE_ROWS,
    repeats: int = 9,
    clock: Clock = perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[dict[int, float]]:
    """Return for each engine the seconds of a pass over k new rows after `context`, for each k of `rows`.

    Medians; widths and engines take turns, in alternating order, so that a slow moment of the machine hits them all.
    Where there are several engines, each waits until the threads of the last one sleep and warms up before its turn.
    """
    times: list[dict[int, list[float]]] = [{k: [] for k in rows} for _ in engines]
    begun: list[Passes] = []
    try:
        for engine in engines:
            begun.append(engine)
            engine.begin(context)
        for repetition in range(-1, repeats):
            for index in order(len(rows), repetition=repetition, prompt=0):
                k = rows[index]
                tokens = [context[i % len(context)] for i in range(k)]
                for which in order(len(engines), repetition=repetition, prompt=index):
                    engine = engines[which]
                    if len(engines) > 1:
                        sleep(_SETTLE_S)
                        engine.step(tokens)
                        engine.back()
                    start = clock()
                    engine.step(tokens)
                    seconds = clock() - start
                    engine.back()
                    if repetition >= 0:  # the one before the first warms up
                        times[which][k].append(seconds)
        return [{k: median(found) for k, found in own.items()} for own in times]
    finally:
        for engine in begun:
            engine.end()


class Spans:
    """The stretches of a round, added up by name."""

    def __init__(self, *, wait: Wait = lambda: None, clock: Clock = perf_counter) -> None:
        self._seconds: dict[str, float] = {}
        self._wait = wait
        self._clock = clock

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self._wait()
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def take(self) -> Mapping[str, float]:
        """Return the sums since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken


class _TimedSession:
    """A session that names its passes."""

    def __init__(self, session: Session, spans: Spans) -> None:
        self._session = session
        self._spans = spans

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def extend(self, feeds: Sequence[Feed], *, taps: Sequence[int] = ()) -> Scores:
        with self._spans("draft_model"):
            return self._session.extend(feeds, taps=taps)


@contextmanager
def timed_drafter(drafter: Any, spans: Spans) -> Iterator[None]:
    """Tell the passes of the drafter's own model, if it has one, from the rest of drafting."""
    session = getattr(drafter, "session", None)
    if session is None:
        yield
        return
    drafter.session = _TimedSession(session, spans)
    try:
        yield
    finally:
        drafter.session = session


def time_rounds(
    llm: LLM,
    prompts: Sequence[Ids],
    params: Sequence[SamplingParams],
    *,
    k: int | None,
    wait: Wait = lambda: None,
    clock: Clock = perf_counter,
) -> list[Round]:
    """Answer the prompts one by one and return every round but those that read the prompt; text-making included."""
    spans = Spans(wait=wait, clock=clock)
    engine = llm.new_engine(span=spans)
    rounds: list[Round] = []
    with ExitStack() as timed:
        for drafter in llm.drafters:
            timed.enter_context(timed_drafter(drafter, spans))
        for seed, (ids, own) in enumerate(zip(prompts, params, strict=True)):
            engine.add(Request(tuple(ids), replace(own, k=k), seed=own.seed or seed))
            rounds += _rounds_of(engine, TextStream(llm.tokenizer.token_bytes, own.stop), spans, clock)
    return rounds


def _rounds_of(engine: Engine, text: TextStream, spans: Spans, clock: Clock) -> Iterator[Round]:
    is_writing = False
    while engine.has_work:
        spans.take()
        start = clock()
        events = engine.step()
        for event in events:
            text.add(event.tokens, text_end=event.text_end, is_last=event.finish_reason is not None)
        wall = clock() - start
        parts = spans.take()
        if is_writing:
            yield Round(
                num_drafts=sum(event.stats.proposed for event in events),
                wall=wall,
                **{part: parts.get(part, 0.0) for part in ("draft", "draft_model", "target", "sampling")},
            )
        is_writing = is_writing or bool(events)


def compare_texts(
    texts: Sequence[Ids],
    references: Sequence[Ids],
    prompts: Sequence[tuple[str, Ids]],
    *,
    session: Session,
    dtype: str,
    is_greedy: bool,
) -> list[Difference]:
    """Return where each text first leaves its reference. Greedy choices are judged by the logits after the prefix."""
    differences = []
    for (prompt_id, ids), text, reference in zip(prompts, texts, references, strict=True):
        position = first_difference(text, reference)
        if position is None:
            continue
        difference = difference_at(prompt_id, position, text, reference)
        if is_greedy:
            logits = last_logits(session, [*ids, *reference[:position]])
            difference = with_logits(difference, logits, dtype)
        differences.append(difference)
    return differences


def last_logits(session: Session, tokens: Ids) -> list[float]:
    """Return the logits after `tokens`, all read in one pass."""
    seq = session.open()
    try:
        logits: list[float] = session.extend([Feed(seq, tokens, 1)]).logits[0].tolist()
        return logits
    finally:
        session.release(seq)
