"""Which tree of drafts is best, given how often a draft of each rank stands."""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class Shape(NamedTuple):
    """A tree in an order in which parents come first, the worthiest node first."""

    parents: list[int]  # the node that each one follows, -1: the text
    ranks: list[int]  # its place among its siblings
    worths: list[float]  # the chance that the text gets to it

    @property
    def expected(self) -> float:
        """How many drafts are expected to stand."""
        return sum(self.worths)


def best_shape(chances_DR: Sequence[Sequence[float]], num_nodes: int) -> Shape:
    """Return the tree of `num_nodes` that is expected to bring most.

    `chances_DR[depth][rank]`: of a draft given its parent, so that the chances of one depth sum to at most 1; the tree
    is no deeper than D. Sequoia (Chen et al. 2402.12374) finds the tree by dynamic programming over subtrees. Here a
    node's worth is a product of chances along its path, so a child is never worth more than its parent: the worthiest
    nodes are a tree, and taking them one after another gives the same optimum.
    """
    shape = Shape([], [], [])
    queue: list[tuple[float, int, int, int]] = []  # -worth, parent, rank, depth

    def enqueue(parent: int, depth: int, worth: float) -> None:
        for rank, chance in enumerate(chances_DR[depth]):
            if chance > 0:
                heappush(queue, (-worth * chance, parent, rank, depth))

    if chances_DR and num_nodes > 0:
        enqueue(-1, 0, 1.0)
    while queue and len(shape.parents) < num_nodes:
        negative, parent, rank, depth = heappop(queue)
        shape.parents.append(parent)
        shape.ranks.append(rank)
        shape.worths.append(-negative)
        if depth + 1 < len(chances_DR):
            enqueue(len(shape.parents) - 1, depth + 1, -negative)
    return shape
