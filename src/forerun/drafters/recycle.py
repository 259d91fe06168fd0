"""Token recycling (Luo et al. 2408.08696): what the target thought likely after a token, it will think likely again.

A table holds the likeliest successors of each token, as the target last said them; every verified row updates it, those
of rejected drafts too. Drafts are a tree over the table. For models that we know, it is filled ahead of time.
"""

from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from forerun.drafters.base import NOTHING, Chosen, Outcome, Proposal, View
from forerun.drafters.shapes import Shape, best_shape

NUM_SUCCESSORS = 8
_EMPTY = -1
_MAX_DEPTH = 6
# how often the target goes on with a token's successor of each rank, on texts of the demo model
_CHANCES = (0.33, 0.12, 0.07, 0.05, 0.035, 0.025, 0.02, 0.015)
_FOLDER = Path(__file__).with_name("successors")


class RecycleDrafter:
    """Drafts a tree of point masses, the worthiest nodes that the budget allows; a chain of best successors where no
    tree may be made.
    """

    name = "recycle"
    num_top = NUM_SUCCESSORS

    def __init__(self, table_VN: np.ndarray, *, max_drafts: int = 16) -> None:
        """`table_VN`: the successors of each token, likeliest first, -1 where none is known. It is kept as given for
        isolated requests, and updated in a copy for all others.
        """
        assert table_VN.shape[1] == NUM_SUCCESSORS
        self.max_drafts = max_drafts
        self._given = table_VN.astype(np.int32)
        self._table = self._given.copy()
        self._is_fresh = np.zeros(len(table_VN), bool)  # whether a row was updated

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        return [self._propose(view, min(budget, self.max_drafts)) for view, budget in zip(views, budgets, strict=True)]

    def _propose(self, view: View, budget: int) -> Proposal:
        if budget < 1:
            return NOTHING
        isolated = view.sampler.params.isolated
        table = self._given if isolated else self._table
        tokens, parents, keys = list[int](), list[int](), list[Hashable]()
        places: list[int | None] = []  # of the nodes of the shape, among the drafts
        levels: list[int] = []
        successors: dict[int, list[int]] = {}
        shape = _shape(budget) if view.branches else _chain(budget)
        for parent, rank in zip(shape.parents, shape.ranks, strict=True):
            place = -1 if parent < 0 else places[parent]
            places.append(None)
            if place is None:
                continue
            before = view.tokens[-1] if place < 0 else tokens[place]
            row = successors.get(before)
            if row is None:
                row = successors[before] = table[before].tolist()
            if row[rank] == _EMPTY:
                continue
            depth = 0 if place < 0 else levels[place] + 1
            places[-1] = len(tokens)
            keys.append((rank, min(depth, 2), not isolated and bool(self._is_fresh[before])))
            tokens.append(row[rank])
            parents.append(place)
            levels.append(depth)
        if not tokens:
            return NOTHING
        return Chosen(tokens, parents if view.branches else None, keys)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.verified is None or outcome.num_prompt is None:
                continue
            tokens = list(outcome.verified.tokens)
            top_RN = np.asarray(outcome.verified.top_ids)[:, :NUM_SUCCESSORS]
            self._table[tokens, : top_RN.shape[1]] = top_RN
            self._is_fresh[tokens] = True

    def fork(self, seq: int, child: int) -> None:
        """Nothing is kept for a sequence."""

    def release(self, seq: int) -> None:
        """Nothing is kept for a sequence."""

    def forget(self) -> None:
        self._table[:] = self._given
        self._is_fresh[:] = False


@cache
def _shape(budget: int) -> Shape:
    return best_shape([_CHANCES] * _MAX_DEPTH, budget)


@cache
def _chain(budget: int) -> Shape:
    return best_shape([_CHANCES[:1]] * _MAX_DEPTH, budget)


def successors(vocabulary: str, vocab_size: int) -> np.ndarray:
    """Return the table (V, 8) that the package has for a tokenizer, by its fingerprint; an empty one if it has none."""
    table_VN = np.full((vocab_size, NUM_SUCCESSORS), _EMPTY, np.int32)
    path = _FOLDER / f"{vocabulary}.npz"
    if path.is_file():
        with np.load(path) as file:
            known = file["tokens"] < vocab_size
            table_VN[file["tokens"][known]] = file["successors"][known].astype(np.int32)
        table_VN[table_VN >= vocab_size] = _EMPTY
    return table_VN


def save_successors(table_VN: np.ndarray, vocabulary: str, folder: Path = _FOLDER) -> Path:
    """Write the rows of a table that are full to where `successors` finds them."""
    tokens = np.flatnonzero((table_VN != _EMPTY).all(axis=1))
    narrow = np.uint16 if len(table_VN) <= 1 << 16 else np.uint32
    folder.mkdir(exist_ok=True)
    path = folder / f"{vocabulary}.npz"
    np.savez_compressed(path, tokens=tokens.astype(narrow), successors=table_VN[tokens].astype(narrow))
    return path
