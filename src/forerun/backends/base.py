"""The contract of a backend: a `Session` is a model with a cache of many sequences.

It has one verb, `extend`: feed these tokens, give me the logits of the last m rows. Prefill, plain decoding and
verification of drafts, in chains and in trees, are all that. A cache is a length; every rollback (`keep`) is absolute.

What a session does *not* know: sampling, drafts, end tokens, text.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from forerun.errors import OptionError

Array = Any  # a numpy array or a torch tensor; the mathematics is written for both


class Feed(NamedTuple):
    """The new tokens of one sequence in a pass."""

    seq: int
    tokens: Sequence[int]  # at least one, appended at positions length, length + 1, …
    num_logits: int = 0  # logits are wanted for the last num_logits of these rows
    # A tree: the earlier row of this feed that each row follows, -1 for what is cached; None: the one before.
    # A row sees what is cached, its ancestors and itself; its position is length plus the number of its ancestors.
    parents: Sequence[int] | None = None


class Scores(NamedTuple):
    """What a pass returns."""

    logits: Array  # (R, V): the wanted rows of all feeds, in the order of the feeds
    taps: Mapping[int, Array] = MappingProxyType({})  # layer -> (N, D): hidden states after it, all rows in order


def depths(parents: Sequence[int]) -> list[int]:
    """Return how many ancestors each row of a tree has."""
    found: list[int] = []
    for parent in parents:
        assert -1 <= parent < len(found), f"row {len(found)} of a tree follows {parent}"
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def lineage(parents: Sequence[int]) -> np.ndarray:
    """Return which rows of a tree each of its rows sees, its ancestors and itself: (n, n), bool."""
    sees = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            sees[row] |= sees[parent]
    return sees


def checked_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """Return `layers` as a list. Raises OptionError unless they are some of a model's, in order."""
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= min(layers) <= max(layers) < num_layers:
        raise OptionError(f"layers are {list(layers)}; expected some of 0 … {num_layers - 1}, in order, each once")
    return list(layers)


class Session(Protocol):
    """A model with a cache of many sequences.

    Invariant: `length(seq)` rows of sequence `seq` are cached, at positions 0 … length - 1. Between a pass over a tree
    and the `keep` that picks a path of it, the rows of the tree count too, in their order.
    """

    vocab_size: int  # V: ids 0 … V - 1 are real tokens; padded rows of the head are already cut off
    max_len: int  # the most positions that a sequence may have
    num_layers: int
    can_branch: bool  # takes trees; without it `Feed.parents` is always None, and `path` a chain's beginning

    def open(self) -> int:
        """Start an empty sequence and return its handle."""

    def length(self, seq: int) -> int:
        """Return how many positions of `seq` are cached."""

    def extend(self, feeds: Sequence[Feed], *, taps: Sequence[int] = ()) -> Scores:
        """Append the tokens of each feed to its sequence, in one pass; each sequence appears at most once.

        Logits and taps come in the order of the rows, whatever the tree. After a tree comes a `keep`, then more.
        Raises RequestError before anything is changed when a sequence would grow past `max_len`.
        """

    def keep(self, seq: int, length: int, path: Sequence[int] = ()) -> None:
        """Forget all rows of `seq` from position `length` on. 0 ≤ length ≤ length(seq).

        With a `path`, `length` is that from before the last extend of `seq`, and `path` lists rows of that extend, each
        following the one before: they stay, at positions length, length + 1, …
        """

    def fork(self, seq: int, length: int) -> int:
        """Return a new sequence that begins with the first `length` rows of `seq`; the two are independent."""

    def release(self, seq: int) -> None:
        """Forget `seq` and free its memory."""

    def subset(self, layers: Sequence[int]) -> "Session":
        """Return a session of these layers alone, in their order, with the same weights and a cache of its own.

        Raises OptionError.
        """

    def room(self) -> int:
        """Return how many more positions, over all sequences, the cache can take."""
