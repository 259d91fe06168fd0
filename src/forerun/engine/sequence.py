"""One request while it runs."""

from dataclasses import dataclass, field
from typing import Any

from forerun.drafters.base import View
from forerun.engine.ends import Ends
from forerun.sampling.laws import Sampler
from forerun.types import Decision, FinishReason, SamplingParams, SpeculationStats, TokenLogprob, TokenTrace, Verify


@dataclass(frozen=True)
class Request:
    """What the engine is asked for. `resume` names a kept sequence whose cache is used as far as the prompts agree."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0  # the one to use: `params.seed`, or a fresh one
    stream: int = 0  # tells apart requests with one seed, as n answers to one prompt
    keep: bool = False  # keep the caches when it ends, to be resumed or released
    resume: int | None = None


@dataclass(frozen=True)
class Event:
    """What a round did to one request."""

    request_id: int
    tokens: tuple[TokenTrace, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    stats: SpeculationStats  # of this round alone
    finish_reason: FinishReason | None = None
    drafter: str | None = None  # who drafted in this round
    decision: Decision | None = None  # where a controller decides
    text_end: int | None = None  # a stop was found: the text ends after so many bytes of the output
    error: str | None = None


@dataclass
class Sequence:
    """A request with its text and its place in the caches.

    Invariant between rounds: the target has cached at most len(tokens) - 1 of `tokens`, exactly so once it is writing
    (the last token is chosen but not fed).
    """

    id: int
    handle: int  # in the target's session
    tokens: list[int]  # prompt and output
    params: SamplingParams
    sampler: Sampler
    ends: Ends
    k: int
    verify: Verify
    max_len: int  # the text may grow to so many tokens
    reserved: int  # positions set aside in the cache
    keep: bool
    num_cached: int = 0
    num_prompt: int = 0
    num_rounds: int = 0

    @property
    def num_pending(self) -> int:
        """Tokens that the target has not read; 1 while it is writing."""
        return len(self.tokens) - self.num_cached

    def view(self, *, branches: bool = False) -> View:
        return View(self.id, self.tokens, self.sampler, self.verify, branches)


@dataclass(frozen=True)
class Work:
    """One sequence's share of a round: read so many pending tokens and, if that is all of them, write."""

    sequence: Any  # Sequence
    num_tokens: int
    k: int  # at most so many drafts; 0 unless the sequence is writing

    @property
    def writes(self) -> bool:
        return bool(self.num_tokens == self.sequence.num_pending)
