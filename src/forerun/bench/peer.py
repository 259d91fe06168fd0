"""What another engine is to the bench: what it is given, what it brings. `peers` has the list."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from forerun.bench.measure import Contender, Passes
from forerun.models.load import ForeignFolder
from forerun.models.weights import Checkpoint


class PeerSetup(NamedTuple):
    """What a peer is to run, and how: as resolved for ourselves."""

    checkpoint: Checkpoint | ForeignFolder
    dtype: str  # what our weights are kept in
    device: str
    threads: int
    num_positions: int = 2048  # of the longest text
    cache_dir: Path | None = None
    argument: str = ""  # what stands behind the colon in the peer's name


class PeerMissingError(Exception):
    """A peer that can't take part; the message says why, and what to do about it."""


class Peer(Protocol):
    """Another engine, loaded."""

    contenders: Sequence[Contender]  # plain first, then its own ways to speculate
    remarks: Sequence[str]  # what a reader of its numbers ought to know
    passes: Passes | None  # for its curve
