"""What shifts or masks logits by the text so far: bias, penalties, minimum length, the user's callables.

A constraint knows the committed text and is told the drafted path to each row as a value, so that rejected drafts
never enter its state and there is nothing to roll back. The same objects serve p and q.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from forerun.errors import EngineError
from forerun.sampling.arrays import Array, like, namespace
from forerun.types import LogitsProcessor, SamplingParams

Path = tuple[int, ...]  # drafted tokens between the committed text and a row


class Constraint(Protocol):
    """Shifts or masks the rows of one sequence."""

    def shift(self, logits_RV: Array, paths: Sequence[Path]) -> Array:
        """Return the rows changed. `paths[r]` leads to row r. The array is the caller's own: it may be changed."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Take committed tokens of the output into account."""

    def fork(self) -> "Constraint":
        """Return an independent copy."""


class LogitBias:
    """Adds a number to some logits; -inf forbids a token."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._ids = np.fromiter(bias, dtype=np.int64)
        self._values = np.fromiter(bias.values(), dtype=np.float32)

    def shift(self, logits_RV: Array, paths: Sequence[Path]) -> Array:
        ids = like(self._ids, logits_RV)
        logits_RV[:, ids] = logits_RV[:, ids] + like(self._values, logits_RV)
        return logits_RV

    def advance(self, tokens: Sequence[int]) -> None:
        pass

    def fork(self) -> "LogitBias":
        return self


class Penalties:
    """Repetition counts prompt and output, presence and frequency the output only; each plus the drafted path."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._seen = dict.fromkeys(prompt)  # prompt and output, in order of first appearance
        self._counts: dict[int, int] = {}  # output only

    def shift(self, logits_RV: Array, paths: Sequence[Path]) -> Array:
        if self._repetition != 1.0:
            rows, ids = _pairs(self._seen, paths)
            self._divide(logits_RV, rows, ids)
        if self._presence or self._frequency:
            rows_list: list[int] = []
            ids_list: list[int] = []
            amounts: list[float] = []
            for r, path in enumerate(paths):
                counts = self._counts
                if path:
                    counts = dict(counts)
                    for token in path:
                        counts[token] = counts.get(token, 0) + 1
                rows_list += [r] * len(counts)
                ids_list += counts
                amounts += [self._presence + self._frequency * count for count in counts.values()]
            if ids_list:
                where = (like(rows_list, logits_RV), like(ids_list, logits_RV))
                logits_RV[where] = logits_RV[where] - like(np.asarray(amounts, dtype=np.float32), logits_RV)
        return logits_RV

    def _divide(self, logits_RV: Array, rows: np.ndarray, ids: np.ndarray) -> None:
        xp, where = namespace(logits_RV), (like(rows, logits_RV), like(ids, logits_RV))
        x = logits_RV[where]
        logits_RV[where] = xp.where(x < 0, x * self._repetition, x / self._repetition)

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._seen[token] = None
            self._counts[token] = self._counts.get(token, 0) + 1

    def fork(self) -> "Penalties":
        copy = object.__new__(Penalties)
        copy.__dict__.update(self.__dict__, _seen=dict(self._seen), _counts=dict(self._counts))
        return copy


class MinTokens:
    """Forbids the end tokens until the output has `count` tokens."""

    def __init__(self, count: int, end_ids: Sequence[int]) -> None:
        self._left = count
        self._end_ids = np.asarray(end_ids, dtype=np.int64)

    def shift(self, logits_RV: Array, paths: Sequence[Path]) -> Array:
        rows = np.asarray([r for r, path in enumerate(paths) if len(path) < self._left], dtype=np.int64)
        if rows.size and self._end_ids.size:
            logits_RV[like(rows[:, None], logits_RV), like(self._end_ids[None, :], logits_RV)] = -np.inf
        return logits_RV

    def advance(self, tokens: Sequence[int]) -> None:
        self._left = max(0, self._left - len(tokens))

    def fork(self) -> "MinTokens":
        copy = object.__new__(MinTokens)
        copy.__dict__.update(self.__dict__)
        return copy


class Processor:
    """A callable of the user's: f(all token ids so far, logits (V,)) -> logits (V,). It must be a pure function."""

    def __init__(self, function: LogitsProcessor, prompt: Sequence[int]) -> None:
        self._function = function
        self._tokens = list(prompt)

    def shift(self, logits_RV: Array, paths: Sequence[Path]) -> Array:
        for r, path in enumerate(paths):
            try:
                row_V = self._function([*self._tokens, *path], logits_RV[r])
            except Exception as error:
                raise EngineError(f"a logits processor failed: {type(error).__name__}: {error}") from error
            if getattr(row_V, "shape", None) != logits_RV[r].shape:
                raise EngineError(
                    f"a logits processor returned {type(row_V).__name__}; expected logits of the same shape"
                )
            logits_RV[r] = row_V
        return logits_RV

    def advance(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def fork(self) -> "Processor":
        return Processor(self._function, self._tokens)


def constraints_for(params: SamplingParams, prompt: Sequence[int], end_ids: Sequence[int]) -> list[Constraint]:
    """Return the constraints that `params` ask for, in the order in which `transformers` applies them."""
    found: list[Constraint] = []
    if params.logit_bias:
        found.append(LogitBias(dict(params.logit_bias)))
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        found.append(Penalties(params, prompt))
    if params.min_tokens:
        found.append(MinTokens(params.min_tokens, end_ids))
    found += [Processor(function, prompt) for function in params.logits_processors]
    return found


def _pairs(seen: dict[int, None], paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, id) index arrays: every seen id in every row, and the new ids of each row's path, once each."""
    base = np.fromiter(seen, dtype=np.int64, count=len(seen))
    extra = [sorted({token for token in path if token not in seen}) for path in paths]
    rows = [np.repeat(np.arange(len(paths)), base.size)] + [np.full(len(ids), r) for r, ids in enumerate(extra)]
    ids = [np.tile(base, len(paths))] + [np.asarray(ids, dtype=np.int64) for ids in extra]
    return np.concatenate(rows), np.concatenate(ids)
