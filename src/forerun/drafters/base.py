"""The contract of a drafter: guess what the target will write, and say from which law the guesses were drawn.

Exactness belongs to the pair (how drafts were made, how they are judged). So the type of a proposal names how its
tokens came to be, and that alone selects the rule; a pairing that isn't exact can't be written down:

    Chosen(tokens)     point masses: picked without chance (n-grams, argmax)     judged by `point_rule`
    Drawn(tokens, q)   draft i was drawn from q[i] with the DRAFT uniforms        judged by `block_rule` or `token_rule`

In coupled mode either is judged by `coupled_rule`: the text doesn't depend on the drafts there.

Whether position k is drafted may depend on anything known before draft k was drawn, and not on draft k itself.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from forerun.sampling.arrays import Array
from forerun.sampling.laws import Sampler
from forerun.types import Verify


class Chosen(NamedTuple):
    """A chain of point masses."""

    tokens: Sequence[int]


class Drawn(NamedTuple):
    """A chain drawn from q: `q_KV[i]` is the whole law, after all transforms, from which token i was drawn."""

    tokens: Sequence[int]
    q_KV: Array  # (K, V), V as wide as the target's


Proposal = Chosen | Drawn
NOTHING = Chosen(())


class View(NamedTuple):
    """What a drafter may look at. It holds values, so a drafter can be asked about a text that isn't written yet."""

    seq: int
    tokens: Sequence[int]  # prompt and output; the last one is not yet in the target's cache
    sampler: Sampler
    verify: Verify


class Outcome(NamedTuple):
    """What happened to a sequence: `tokens[start:]` are new, whether prompt pieces or output."""

    seq: int
    tokens: Sequence[int]
    start: int


class Drafter(Protocol):
    """Proposes drafts for many sequences at once. It owns whatever state it keeps for them."""

    name: str
    max_drafts: int  # the most that it offers in a round

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        """Return one proposal for each view, of at most its budget of tokens; fewer, or none, is fine."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what was committed. Called for every piece of a prompt and after every round."""

    def fork(self, seq: int, child: int) -> None:
        """Give `child` the state of `seq`."""

    def release(self, seq: int) -> None:
        """Forget a sequence; one that was never seen is fine."""
