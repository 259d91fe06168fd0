"""The arithmetic of the bench: pure functions over what was measured.

What this module does *not* know: models, clocks, tables. Times are seconds.
"""

from collections.abc import Iterator, Sequence
from statistics import median, median_low
from typing import Any, NamedTuple

from forerun.types import SpeculationStats

# Two tokens count as tied when their logits differ by at most so much of the row's largest logit: two steps from one
# number to the next in bf16 and fp16; in fp32, where a step is nothing, what sums in another order may come to. With
# q8 and q4, what rounding activations to 8 bits in another way may come to: more than bf16's.
TIE_TOLERANCE = {"q4": 2.0**-5, "q8": 2.0**-5, "bf16": 2.0**-6, "fp16": 2.0**-9, "fp32": 2.0**-15}


class Run(NamedTuple):
    """One answer of one contender to one prompt."""

    token_ids: tuple[int, ...]
    num_first: int  # tokens that came together with the first one: the clock starts after them
    prefill_s: float  # until the first token
    decode_s: float  # from the first token to the last
    speculation: SpeculationStats | None = None

    @property
    def num_timed(self) -> int:
        return len(self.token_ids) - self.num_first


class Cell(NamedTuple):
    """All runs of one contender on one prompt: so many timed tokens in so many seconds, by the median."""

    num_tokens: int
    seconds: float


class Difference(NamedTuple):
    """Where two texts part, and whether rounding explains it."""

    prompt_id: str
    position: int  # of the first token that differs, in the output
    tokens: tuple[int | None, int | None]  # of the text in question and of the reference; None: it ended before
    margin: float | None  # how far the less likely of the two lies below the best logit; None: not a greedy text
    tolerance: float | None  # what rounding explains
    verdict: str  # near-tie | real | not judged


def order(num_contenders: int, *, repetition: int, prompt: int) -> list[int]:
    """Return who goes first: forward and backward in turn, over repetitions and over prompts."""
    forward = list(range(num_contenders))
    return forward[::-1] if (repetition + prompt) % 2 else forward


def schedule(num_prompts: int, num_contenders: int, repetition: int) -> Iterator[tuple[int, int]]:
    """Yield (prompt, contender) for one repetition of the workload."""
    for prompt in range(num_prompts):
        for contender in order(num_contenders, repetition=repetition, prompt=prompt):
            yield prompt, contender


def condense(runs: Sequence[Run]) -> Cell:
    """Return the median of the repetitions; runs that ended with their first token have no speed."""
    timed = [run for run in runs if run.num_timed > 0]
    if not timed:
        return Cell(0, 0.0)
    num_tokens = median_low([run.num_timed for run in timed])
    return Cell(num_tokens, num_tokens * median(run.decode_s / run.num_timed for run in timed))


def rate(cells: Sequence[Cell]) -> float | None:
    """Return tokens per second over all cells: total tokens over total time."""
    seconds = sum(cell.seconds for cell in cells)
    return sum(cell.num_tokens for cell in cells) / seconds if seconds > 0 else None


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def speedup_range(runs: Sequence[Sequence[Run]], baseline: Sequence[Sequence[Run]]) -> tuple[float, float] | None:
    """Return the least and the largest speed-up that a single repetition shows; None unless there are several.

    `runs` and `baseline`: [prompt][repetition].
    """
    found = []
    for own, other in zip(zip(*runs, strict=True), zip(*baseline, strict=True), strict=True):
        value = ratio(rate([condense([run]) for run in own]), rate([condense([run]) for run in other]))
        if value is not None:
            found.append(value)
    return (min(found), max(found)) if len(found) > 1 else None


def pooled(runs: Sequence[Run]) -> SpeculationStats | None:
    """Return the sum of all counts; None if nobody counted."""
    counted = [run.speculation for run in runs if run.speculation is not None]
    return sum(counted, SpeculationStats()) if counted else None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first position at which two texts differ; None if they are the same."""
    if tuple(a) == tuple(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def tie_margin(logits: Sequence[float], tokens: Sequence[int]) -> float:
    """Return how far the least of `tokens` lies below the largest logit: 0 if all of them are the largest."""
    return max(logits) - min(logits[token] for token in tokens)


def tie_tolerance(logits: Sequence[float], dtype: str) -> float:
    """Return the margin up to which rounding explains that greedy decoding took another token."""
    return max(max(logits), -min(logits)) * TIE_TOLERANCE.get(dtype, TIE_TOLERANCE["fp32"])


def difference_at(prompt_id: str, position: int, text: Sequence[int], reference: Sequence[int]) -> Difference:
    """Return a difference that nothing is known about but where it is."""
    tokens = (_at(text, position), _at(reference, position))
    return Difference(prompt_id, position, tokens, None, None, "not judged")


def with_logits(difference: Difference, logits: Sequence[float], dtype: str) -> Difference:
    """Judge a difference between greedy texts by the logits at its position, (V,)."""
    tokens = [token for token in difference.tokens if token is not None]
    if len(tokens) < 2:
        return difference
    margin, tolerance = tie_margin(logits, tokens), tie_tolerance(logits, dtype)
    verdict = "near-tie" if margin <= tolerance else "real"
    return difference._replace(margin=margin, tolerance=tolerance, verdict=verdict)


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


class Ceiling(NamedTuple):
    """What reading all weights once for each token allows."""

    bytes_per_s: float
    bytes_per_pass: int
    cache_bytes: int | None  # of the last-level cache

    @property
    def tokens_per_s(self) -> float:
        return self.bytes_per_s / self.bytes_per_pass

    @property
    def fits_in_cache(self) -> bool:
        """Weights that stay in the cache are read faster than from memory: the ceiling can then be exceeded."""
        return self.cache_bytes is not None and self.bytes_per_pass <= self.cache_bytes


class Round(NamedTuple):
    """Where the time of one round went, in seconds."""

    num_drafts: int
    wall: float
    draft: float  # the drafter's own model included
    draft_model: float  # passes of the drafter's own model
    target: float
    sampling: float

    @property
    def rest(self) -> float:
        return self.wall - self.draft - self.target - self.sampling

    @property
    def overhead(self) -> float:
        """What is neither a pass of the target nor one of the drafter's model."""
        return self.wall - self.target - self.draft_model


ROUND_PARTS = ("draft", "draft_model", "target", "sampling", "rest", "wall", "overhead")


def split_rounds(rounds: Sequence[Round], one_row_s: float | None) -> dict[str, Any] | None:
    """Return the median of each part in ms, and the overhead as a share of a pass over one row."""
    if not rounds:
        return None
    parts = {f"{part}_ms": 1e3 * median(getattr(round_, part) for round_ in rounds) for part in ROUND_PARTS}
    share = ratio(parts["overhead_ms"], None if one_row_s is None else 1e3 * one_row_s)
    return {"rounds": len(rounds), **parts, "overhead_over_one_row_pass": share}


def full_rounds(rounds: Sequence[Round], k: int) -> list[Round]:
    """Return the rounds with K drafts, or with the most drafts that came up if there were none with K."""
    most = max((round_.num_drafts for round_ in rounds if round_.num_drafts <= k), default=0)
    return [round_ for round_ in rounds if round_.num_drafts == most]
