"""The contract of a drafter: guess what the target will write, and say from which law the guesses were drawn.

Exactness belongs to the pair (how drafts were made, how they are judged). So the type of a proposal names how its
tokens came to be, and that alone selects the rule; a pairing that isn't exact can't be written down:

    Chosen   point masses, picked without chance: n-grams, argmax     a walk along the target's own choices
    Drawn    a chain: draft i was drawn from row i of q               `block_rule` or `token_rule`
    Tree     candidates for each node, in the order of drawing        `traversal_rule` or `list_rule`

In coupled mode all are judged by a walk along the target's own choices: the text doesn't depend on the drafts there.

Whether a draft is made may depend on anything known before it was drawn, and not on that draft itself. What was drawn
is never taken out again; what was chosen may be, by whoever hasn't seen the target's draw.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from forerun.sampling.arrays import Array
from forerun.sampling.laws import Sampler
from forerun.types import Verify


class Chosen(NamedTuple):
    """Point masses: a chain, or a tree in which no node has two children with one token.

    `keys[i]` is the drafter's own word for how sure it is of draft i, given that the target went along with those that
    lead to it: drafts with one key are taken to be accepted equally often. What a key is worth is measured.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None  # the earlier draft that each one follows, -1: the text. None: a chain
    keys: Sequence[Hashable] | None = None  # None: by depth


class Drawn(NamedTuple):
    """A chain drawn from q: `q_KV[i]` is the whole law, after all transforms, from which token i was drawn."""

    tokens: Sequence[int]
    q_KV: Array  # (K, V), V as wide as the target's

    @property
    def parents(self) -> None:
        return None


class Offer(NamedTuple):
    """One candidate for what follows a node."""

    draft: int  # which draft it is; two offers of one node may be the same draft
    law: int | None  # the row of q that it was drawn from, without what this row gave earlier here; None: point mass


class Tree(NamedTuple):
    """Candidates for each node, judged in their order, which was settled before any was drawn.

    A row of q belongs to one node. Several offers from it were drawn without replacement.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    offers: Sequence[Offer]  # those of one node (the parent of their drafts) in the order of drawing
    q_MV: Array  # (M, V)


Proposal = Chosen | Drawn | Tree
NOTHING = Chosen(())


class View(NamedTuple):
    """What a drafter may look at. It holds values, so a drafter can be asked about a text that isn't written yet."""

    seq: int
    tokens: Sequence[int]  # prompt and output; the last one is not yet in the target's cache
    sampler: Sampler
    verify: Verify
    branches: bool = False  # whether a tree may be proposed
    ahead: int = 0  # so many tokens at the end are themselves only drafts, of which the sampler hasn't been told

    @property
    def path(self) -> tuple[int, ...]:
        """The tokens at the end that the sampler doesn't know of."""
        return tuple(self.tokens[len(self.tokens) - self.ahead :])


class Verified(NamedTuple):
    """What the target said of a proposal, its rows in the order of the pass."""

    tokens: Sequence[int]  # the last committed one, then the drafts
    top_ids: Array  # (rows, n): the likeliest tokens after each row by the raw logits, best first; on the host


class Outcome(NamedTuple):
    """What happened to a sequence: `tokens[start:]` are new, whether prompt pieces or output."""

    seq: int
    tokens: Sequence[int]
    start: int
    verified: Verified | None = None  # where the drafter asks for it, and the sequence has written
    num_prompt: int | None = None  # of `tokens`, how many were given; None: nothing of it is for other texts' drafts


class Drafter(Protocol):
    """Proposes drafts for many sequences at once. It owns whatever state it keeps for them."""

    name: str
    max_drafts: int  # the most that it offers in a round
    num_top: int  # how many of the target's likeliest tokens it wants to see of every verified row

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        """Return one proposal for each view, of at most its budget of drafts; fewer, or none, is fine.

        A view whose `branches` is false gets a chain.
        """

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what was committed. Called for every piece of a prompt and after every round."""

    def fork(self, seq: int, child: int) -> None:
        """Give `child` the state of `seq`."""

    def release(self, seq: int) -> None:
        """Forget a sequence; one that was never seen is fine."""

    def forget(self) -> None:
        """Forget what was learned from texts that have ended, as if none had been."""
