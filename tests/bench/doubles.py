"""Doubles for the tests of the bench: a clock that only moves when told, and an `LLM` over a toy model."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.backends.base import Feed, Scores
from forerun.backends.toy import ToySession
from forerun.engine import llm as llm_module
from forerun.engine.llm import LLM

VOCAB_SIZE = 53
END_ID = 52


class FakeClock:
    """Time passes only by `advance`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class SlowSession(ToySession):
    """A toy whose pass over n rows takes `cost(n)` seconds of a fake clock; it notes the widths it was asked for."""

    def __init__(self, *, clock: FakeClock, cost: Callable[[int], float], vocab_size: int = 7) -> None:
        super().__init__(ToySession.random(vocab_size, order=1)._logits)
        self.widths: list[int] = []
        self._clock, self._cost = clock, cost

    def extend(self, feeds: Sequence[Feed], *, taps: Sequence[int] = ()) -> Scores:
        rows = sum(len(feed.tokens) for feed in feeds)
        self.widths.append(rows)
        self._clock.advance(self._cost(rows))
        return super().extend(feeds, taps=taps)


class FakeTokenizer:
    """One token a byte modulo the vocabulary."""

    chat_template = None
    eos_ids = (END_ID,)
    fingerprint = "fake"
    vocab_size = VOCAB_SIZE
    token_bytes = tuple(bytes([97 + i % 26]) for i in range(VOCAB_SIZE))

    def encode_prompt(self, text: str) -> list[int]:
        return [byte % END_ID for byte in text.encode()]


class SizedToy(ToySession):
    """A toy that says what it is, as real sessions do."""

    dtype, device, weight_bytes = "fp32", "cpu", 4 * VOCAB_SIZE**2


def use_toy(patch: pytest.MonkeyPatch, *, max_len: int = 4096) -> None:
    """Let `LLM` load a sharp toy model, on which n-grams do well, whatever the target is called."""
    logits = ToySession.random(VOCAB_SIZE, order=1, spread=4.0, seed=3)._logits
    logits[:, END_ID] -= 100.0
    checkpoint = SimpleNamespace(tokenizer=FakeTokenizer())
    patch.setattr(llm_module, "load_model", lambda *_a, **_k: checkpoint)
    patch.setattr(llm_module, "open_session", lambda *_a, **_k: SizedToy(logits, max_len=max_len))


def toy_llm(patch: pytest.MonkeyPatch, **settings: Any) -> LLM:
    use_toy(patch)
    return LLM("toy", **settings)
