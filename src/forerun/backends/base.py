"""The contract of a backend: a `Session` is a model with a cache of many sequences.

It has one verb, `extend`: feed these tokens, give me the logits of the last m rows. Prefill, plain decoding and
verification of drafts are all that. A cache is a length; every rollback (`keep`) is absolute.

What a session does *not* know: sampling, drafts, end tokens, text.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

Array = Any  # a numpy array or a torch tensor; the mathematics is written for both


class Feed(NamedTuple):
    """The new tokens of one sequence in a pass."""

    seq: int
    tokens: Sequence[int]  # at least one, appended at positions length, length + 1, …
    num_logits: int = 0  # logits are wanted for the last num_logits of these rows


class Scores(NamedTuple):
    """What a pass returns."""

    logits: Array  # (R, V): the wanted rows of all feeds, in the order of the feeds
    taps: Mapping[int, Array] = MappingProxyType({})  # layer -> (N, D): hidden states after it, all rows in order


class Session(Protocol):
    """A model with a cache of many sequences.

    Invariant: `length(seq)` rows of sequence `seq` are cached, at positions 0 … length - 1.
    """

    vocab_size: int  # V: ids 0 … V - 1 are real tokens; padded rows of the head are already cut off
    max_len: int  # the most positions that a sequence may have
    num_layers: int

    def open(self) -> int:
        """Start an empty sequence and return its handle."""

    def length(self, seq: int) -> int:
        """Return how many positions of `seq` are cached."""

    def extend(self, feeds: Sequence[Feed], *, taps: Sequence[int] = ()) -> Scores:
        """Append the tokens of each feed to its sequence, in one pass; each sequence appears at most once.

        Raises RequestError before anything is changed when a sequence would grow past `max_len`.
        """

    def keep(self, seq: int, length: int) -> None:
        """Forget all rows of `seq` from position `length` on. 0 ≤ length ≤ length(seq)."""

    def fork(self, seq: int, length: int) -> int:
        """Return a new sequence that begins with the first `length` rows of `seq`; the two are independent."""

    def release(self, seq: int) -> None:
        """Forget `seq` and free its memory."""

    def room(self) -> int:
        """Return how many more positions, over all sequences, the cache can take."""
