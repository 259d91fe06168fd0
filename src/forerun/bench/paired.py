"""`forerun bench --paired N`: is it ever slower? Plain and speculative in turn, on texts that nobody can guess.

Prompts are random words, the temperature is 1.5. Each pair answers one prompt of its own both ways; whoever goes first
in one pair goes second in the next.
"""

import random
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from forerun.bench.report import Table
from forerun.bench.run import Bench, Options, Progress, Quiet, loading
from forerun.engine.llm import LLM
from forerun.types import SamplingParams, Verify

TEMPERATURE = 1.5
_WORDS = 40
_BATCH_TOKENS = 48
_RESAMPLES = 2000
_RULES: tuple[Verify, ...] = ("block", "coupled")


class Interval(NamedTuple):
    """A median with the range that holds it in 95 of 100 resamplings."""

    median: float
    low: float
    high: float


def run_paired(options: Options, pairs: int, progress: Progress | None = None) -> dict[str, Any]:
    """Measure alone and, with `options.batch`, so many at once; by each rule that "auto" may meet."""
    progress = progress or Quiet()
    with LLM(options.config, progress=loading(progress)) as llm:
        bench = Bench(options, [], llm, progress)
        found = []
        for verify in _RULES:
            for size in [1, *([options.batch] if options.batch else [])]:
                label = f"{size} at once, verify {verify}"
                progress.stage(f"{pairs} pairs, {label}")
                ratios = _ratios(llm, options, pairs, size, verify, progress)
                found.append({"sequences": size, "verify": verify, "ratios": ratios, **interval(ratios)._asdict()})
        heading = bench.heading()
    progress.done()
    heading["workload"] |= {"file": None, "prompts": pairs, "temperature": TEMPERATURE, "repeats": 1}
    return {**heading, "paired": found}


def _ratios(llm: LLM, options: Options, pairs: int, size: int, verify: Verify, progress: Progress) -> list[float]:
    """Return the speed of speculative over plain decoding, pair by pair; the first, which warms up, is left out."""
    rng = random.Random(options.seed)
    tokens = options.max_tokens if size == 1 else min(options.max_tokens, _BATCH_TOKENS)
    ratios = []
    for pair in range(pairs + 1):
        prompts = [random_words(rng) for _ in range(size)]
        seconds: dict[int | None, float] = {}
        for k in ((0, None), (None, 0))[pair % 2]:
            params = [
                SamplingParams(
                    temperature=TEMPERATURE,
                    max_tokens=tokens,
                    ignore_eos=True,
                    seed=pair * size + i,
                    k=k,
                    verify=verify,
                )
                for i in range(size)
            ]
            start = perf_counter()
            llm.generate(prompts, params, raw=True)
            seconds[k] = perf_counter() - start
        progress.step(f"pair {pair} of {pairs}")
        if pair:
            ratios.append(seconds[0] / seconds[None])
    return ratios


def random_words(rng: random.Random) -> str:
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(_WORDS))


def interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the median with its bootstrap interval."""
    rng = random.Random(seed)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return Interval(median(values), medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)])


def paired_tables(document: Mapping[str, Any]) -> list[Table]:
    rows = [
        [
            f"{own['sequences']} at once, verify {own['verify']}",
            str(len(own["ratios"])),
            f"{own['median']:.3f}×",
            f"{own['low']:.3f} to {own['high']:.3f}",
            f"{min(own['ratios']):.3f} to {max(own['ratios']):.3f}",
        ]
        for own in document["paired"]
    ]
    title = f"Speculative over plain where nothing can be guessed: random words, temperature {TEMPERATURE}"
    return [Table(title, ["", "pairs", "median", "95% interval", "range"], rows)]
