"""The values that users meet: frozen, checked when they are made."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from forerun.errors import RequestError

Array = Any
Verify = Literal["block", "token", "coupled"]
Source = Literal["draft", "bonus", "resample", "plain"]
FinishReason = Literal["stop", "length", "aborted", "error"]
LogitsProcessor = Callable[[Sequence[int], Array], Array]
VERIFY_RULES: tuple[Verify, ...] = get_args(Verify)


@dataclass(frozen=True)
class SamplingParams:
    """How to write: the law of the next token, and when to stop.

    Transforms act in the order of `transformers`: logit bias, repetition penalty, presence and frequency penalties,
    minimum length, the user's processors, temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0  # 0: greedy, ties go to the lowest id
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # tokens of prompt and output: logits above 0 are divided by it, others multiplied
    presence_penalty: float = 0.0  # on tokens of the output, once
    frequency_penalty: float = 0.0  # on tokens of the output, for each occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0  # no end token before so many tokens
    max_tokens: int | None = None  # None: until the context is full
    stop: Sequence[str] = ()  # the text ends before the first of these
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None: a fresh one for each request
    logprobs: int | None = None  # report log-probabilities, with so many alternatives
    logits_processors: Sequence[LogitsProcessor] = ()  # f(token ids so far, logits (V,)) -> logits (V,); pure
    k: int | None = None  # drafts a round; None: as the engine is set
    verify: Verify | None = None  # None: as the engine is set
    isolated: bool = False  # drafts learn nothing from this text for others, and nothing from others for this one

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        _check(_number(self.temperature, 0), "temperature", self.temperature, "a finite number, 0 (greedy) or more")
        _check(_whole(self.top_k, 0), "top_k", self.top_k, "a whole number, 0 (off) or more")
        _check(_number(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "a number above 0, up to 1 (off)")
        _check(_number(self.min_p, 0, 1), "min_p", self.min_p, "a number from 0 (off) to 1")
        penalty = self.repetition_penalty
        _check(_number(penalty, 0) and penalty > 0, "repetition_penalty", penalty, "a finite number above 0 (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(_number(getattr(self, name)), name, getattr(self, name), "a finite number (0 is off)")
        _check(_whole(self.min_tokens, 0), "min_tokens", self.min_tokens, "a whole number, 0 or more")
        _check(
            self.max_tokens is None or _whole(self.max_tokens, 1), "max_tokens", self.max_tokens, "1 or more, or None"
        )
        _check(all(isinstance(stop, str) and stop for stop in self.stop), "stop", self.stop, "strings, none empty")
        _check(all(map(_whole, self.stop_token_ids)), "stop_token_ids", self.stop_token_ids, "token ids")
        _check(self.seed is None or _whole(self.seed), "seed", self.seed, "a whole number")
        _check(self.logprobs is None or _whole(self.logprobs, 0, 100), "logprobs", self.logprobs, "0 to 100, or None")
        _check(self.k is None or _whole(self.k, 0, 64), "k", self.k, "a whole number from 0 to 64, or None")
        _check(isinstance(self.isolated, bool), "isolated", self.isolated, "True or False")
        rules = ", ".join(VERIFY_RULES)
        _check(self.verify is None or self.verify in VERIFY_RULES, "verify", self.verify, f"one of {rules}")
        for token, bias in self.logit_bias.items():
            ok = _whole(token, 0) and (_number(bias) or bias == -math.inf)
            _check(ok, "logit_bias", {token: bias}, "token ids with a number each (-inf forbids a token)")


@dataclass(frozen=True)
class TokenLogprob:
    """The target's own log-probability of an emitted token: log-softmax of its raw logits, before any transform."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most likely ids with theirs, most likely first


@dataclass(frozen=True)
class TokenTrace:
    """Where an emitted token came from."""

    token_id: int
    round: int
    source: Source
    position: int  # in the draft, from 0; for a bonus or resampled token, how many drafts came before it
    p_target: float  # its mass under the target's law, after all transforms
    p_draft: float | None  # its mass under the drafter's law; None where nothing was drafted


@dataclass(frozen=True)
class SpeculationStats:
    """Counts of speculation, defined in docs/metrics.md. Sums over rounds; add two to pool them."""

    rounds: int = 0  # target passes in which at least one token was emitted
    proposed: int = 0
    reached: int = 0
    accepted: int = 0
    emitted: int = 0
    reached_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        return SpeculationStats(
            self.rounds + other.rounds,
            self.proposed + other.proposed,
            self.reached + other.reached,
            self.accepted + other.accepted,
            self.emitted + other.emitted,
            _add_padded(self.reached_by_position, other.reached_by_position),
            _add_padded(self.accepted_by_position, other.accepted_by_position),
        )

    @property
    def tokens_per_round(self) -> float:
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over reached."""
        return self.accepted / self.reached if self.reached else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Accepted over reached at each position of the draft."""
        pairs = zip(self.accepted_by_position, self.reached_by_position, strict=True)
        return tuple(accepted / reached if reached else 0.0 for accepted, reached in pairs)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "proposed": self.proposed,
            "reached": self.reached,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "tokens_per_round": self.tokens_per_round,
            "acceptance_rate": self.acceptance_rate,
            "accepted_over_proposed": self.accepted / self.proposed if self.proposed else 0.0,
            "acceptance_by_position": list(self.acceptance_by_position),
        }


class Decision(NamedTuple):
    """What the controller decided for a sequence in a round, and on what grounds."""

    drafter: str | None  # who was to draft; None: nobody
    num_offered: int  # drafts that the free drafters had
    num_drafts: int  # of the sequence
    expected_tokens: float  # of the sequence in this round
    seconds: float  # that the whole round was expected to take, drafting included
    plain_seconds: float  # the same without any drafts


@dataclass(frozen=True)
class Output:
    """The whole answer to one request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    speculation: SpeculationStats
    traces: tuple[TokenTrace, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None  # finish_reason "error": what went wrong
    prefill_s: float = 0.0  # from the start to the first emitted token
    decode_s: float = 0.0  # from the first emitted token to the last

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Piece:
    """What one round added to a stream: text that may be shown, and the tokens behind it."""

    text: str  # never half a character, never part of a stop string
    tokens: tuple[TokenTrace, ...]
    spans: tuple[tuple[str, Source], ...]  # the text again, cut by the origin of its tokens
    stats: SpeculationStats  # of this round alone
    logprobs: tuple[TokenLogprob, ...] | None = None
    output: Output | None = None  # set on the last piece
    decision: Decision | None = None  # on the drafts of this round, where a controller decides


def _whole(x: object, least: float = -math.inf, most: float = math.inf) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and least <= x <= most


def _number(x: object, least: float = -math.inf, most: float = math.inf) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and least <= x <= most


def _check(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise RequestError(f"{name} is {got!r}; expected {expected}")


def _add_padded(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    size = max(len(a), len(b))
    return tuple(x + y for x, y in zip(a + (0,) * (size - len(a)), b + (0,) * (size - len(b)), strict=True))
