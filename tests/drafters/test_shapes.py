"""The best tree is found: compared with all trees, by brute force."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.shapes import best_shape

chances = st.lists(st.lists(st.floats(0.01, 0.5), min_size=1, max_size=2), min_size=1, max_size=3)


def all_worths(chances_DR: list[list[float]]) -> dict[tuple[int, ...], float]:
    """The worth of every possible node, by its ranks from the root."""
    nodes = {}
    for depth in range(1, len(chances_DR) + 1):
        for path in itertools.product(*(range(len(row)) for row in chances_DR[:depth])):
            worth = 1.0
            for level, rank in enumerate(path):
                worth *= chances_DR[level][rank]
            nodes[path] = worth
    return nodes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chances, st.integers(0, 5))
def test_no_tree_of_as_many_nodes_is_worth_more(chances_DR: list[list[float]], num_nodes: int) -> None:
    nodes = all_worths(chances_DR)
    best = 0.0
    for chosen in itertools.combinations(nodes, min(num_nodes, len(nodes))):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            best = max(best, sum(nodes[path] for path in chosen))
    shape = best_shape(chances_DR, num_nodes)
    assert len(shape.parents) == min(num_nodes, len(nodes))
    assert all(-1 <= parent < i for i, parent in enumerate(shape.parents))
    assert len(set(zip(shape.parents, shape.ranks, strict=True))) == len(shape.parents)
    assert shape.expected == pytest.approx(best)


def test_a_sure_first_rank_makes_a_chain_and_an_even_law_a_fan() -> None:
    assert best_shape([[0.9, 0.05]] * 5, 4).parents == [-1, 0, 1, 2]
    assert best_shape([[0.25, 0.24, 0.23, 0.22]] * 5, 4).parents == [-1] * 4
    assert best_shape([], 4).parents == []
    assert best_shape([[0.0, 0.0]], 4).parents == []
