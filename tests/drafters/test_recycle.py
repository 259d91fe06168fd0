"""Token recycling: the table follows the target, isolated texts leave it alone, the package has one for the demo."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from forerun.drafters import recycle as module
from forerun.drafters.base import Chosen, Outcome, Verified, View
from forerun.drafters.recycle import RecycleDrafter, save_successors, successors
from forerun.sampling.laws import Sampler
from forerun.types import SamplingParams

V = 40


def empty() -> np.ndarray:
    return np.full((V, 8), -1)


def ask(drafter: RecycleDrafter, token: int, budget: int, *, branches: bool = True, isolated: bool = False) -> Chosen:
    sampler = Sampler(SamplingParams(isolated=isolated), (), (), seed=0)
    (proposal,) = drafter.propose([View(0, [3, token], sampler, "block", branches)], [budget])
    assert isinstance(proposal, Chosen)
    return proposal


def said(tokens: Sequence[int], top: Sequence[Sequence[int]], num_prompt: int | None = 1) -> Outcome:
    """The target read `tokens` in a round, and thought `top` likely after each."""
    return Outcome(0, [1, 2, 3], 2, Verified(tokens, np.asarray(top)), num_prompt)


def test_all_verified_rows_are_learned_rejected_ones_too() -> None:
    drafter = RecycleDrafter(empty())
    assert ask(drafter, 7, 8).tokens == ()
    drafter.observe([said([7, 8, 30], [range(8, 16), range(20, 28), range(31, 39)])])
    tree = ask(drafter, 7, 3)
    assert tree.tokens[0] == 8
    assert set(zip(tree.parents or (), tree.tokens, strict=True)) == {(-1, 8), (0, 20), (-1, 9)}
    assert ask(drafter, 30, 1).tokens == [31]
    drafter.observe([said([7], [range(16, 24)])])
    assert ask(drafter, 7, 1).tokens == [16]


def test_a_chain_is_the_likeliest_path_as_far_as_it_is_known() -> None:
    drafter = RecycleDrafter(empty())
    drafter.observe([said([7, 8], [range(8, 16), range(20, 28)])])
    chain = ask(drafter, 7, 9, branches=False)
    assert (chain.tokens, chain.parents) == ([8, 20], None)


def test_few_alternatives_are_enough() -> None:
    """A target with a smaller vocabulary than eight, or rows that say less."""
    drafter = RecycleDrafter(empty())
    drafter.observe([said([7], [[9, 10]])])
    tree = ask(drafter, 7, 8)
    assert tree.tokens == [9, 10]


def test_isolated_texts_neither_change_the_table_nor_see_its_changes() -> None:
    table = empty()
    table[7] = range(8, 16)
    drafter = RecycleDrafter(table)
    drafter.observe([said([7], [range(20, 28)], num_prompt=None)])
    assert ask(drafter, 7, 1).tokens == [8]
    drafter.observe([said([7], [range(20, 28)])])
    assert ask(drafter, 7, 1).tokens == [20]
    assert ask(drafter, 7, 1, isolated=True).tokens == [8]
    assert ask(drafter, 20, 1, isolated=True).tokens == ()


def test_a_table_is_kept_by_the_name_of_its_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    table = empty()
    table[7], table[9, :3] = range(8, 16), 5
    save_successors(table, "abc", tmp_path)
    found = successors("abc", V)
    assert found[7].tolist() == list(range(8, 16))
    assert (np.delete(found, 7, axis=0) == -1).all()
    assert (successors("abd", V) == -1).all()
    smaller = successors("abc", 10)  # a head without some of the tokens
    assert smaller[7].tolist() == [8, 9, *[-1] * 6]
    assert (successors("abc", 5) == -1).all()


def test_the_package_has_a_small_table_for_the_demo_model() -> None:
    (path,) = module._FOLDER.glob("*.npz")
    assert path.stat().st_size <= 400_000
    table = successors(path.stem, 49_152)
    assert ((table >= -1) & (table < 49_152)).all()
    full = (table != -1).all(axis=1)
    assert full.sum() > 5_000
    assert all(len(set(row)) == 8 for row in table[full].tolist())
