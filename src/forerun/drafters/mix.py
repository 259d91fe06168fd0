"""Several drafters in one tree: each one's guesses are branches of it.

A node's candidates stand in the order of the drafters and are judged in that order, settled before any is drawn. Where
two drafters offer the same token they share a row of the pass, and both entries stay: dropping one would bend the law.
"""

from collections.abc import Sequence

from forerun.backends.base import depths
from forerun.drafters.base import NOTHING, Chosen, Drafter, Drawn, Offer, Outcome, Proposal, Tree, View
from forerun.sampling.arrays import Array, like, namespace


class MixDrafter:
    """Asks the free drafters first, then the draft models with what is left of the budget.

    Where no tree may be made, the first of them that has a guess is taken.
    """

    name = "mix"

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.max_drafts = max(drafter.max_drafts for drafter in drafters)
        self.num_top = max(drafter.num_top for drafter in drafters)
        self._models = [drafter for drafter in drafters if hasattr(drafter, "session")]
        self._free = [drafter for drafter in drafters if not hasattr(drafter, "session")]

    @property
    def drafters(self) -> Sequence[Drafter]:
        """All of them, in the order in which their candidates are judged."""
        return [*self._free, *self._models]

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        budgets = [min(budget, self.max_drafts) for budget in budgets]
        parts = [1 + len(self._models) if view.branches else 1 for view in views]
        rooms = [-(-budget // part) for budget, part in zip(budgets, parts, strict=True)]
        found: list[list[Proposal]] = [[] for _ in views]
        for drafter in self._free:
            self._ask(drafter, views, rooms, found)
        found = [[merged(own, room)] for own, room in zip(found, rooms, strict=True)]
        for place, drafter in enumerate(self._models):
            left = [budget - sum(len(p.tokens) for p in own) for budget, own in zip(budgets, found, strict=True)]
            rooms = [count // max(1, part - 1 - place) for count, part in zip(left, parts, strict=True)]
            self._ask(drafter, views, rooms, found)
        return [merged(own, budget) for own, budget in zip(found, budgets, strict=True)]

    @staticmethod
    def _ask(drafter: Drafter, views: Sequence[View], budgets: Sequence[int], found: list[list[Proposal]]) -> None:
        """Add what a drafter says to what was found for each view, if a tree may be made or nothing was found."""
        asked = [
            i
            for i, view in enumerate(views)
            if budgets[i] > 0 and (view.branches or not any(p.tokens for p in found[i]))
        ]
        proposals = drafter.propose([views[i] for i in asked], [budgets[i] for i in asked])
        for i, proposal in zip(asked, proposals, strict=True):
            found[i].append(proposal)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for drafter in self.drafters:
            drafter.observe(outcomes)

    def fork(self, seq: int, child: int) -> None:
        for drafter in self.drafters:
            drafter.fork(seq, child)

    def release(self, seq: int) -> None:
        for drafter in self.drafters:
            drafter.release(seq)

    def forget(self) -> None:
        for drafter in self.drafters:
            drafter.forget()


def merged(proposals: Sequence[Proposal], budget: int) -> Proposal:
    """Lay proposals over each other, depth by depth, up to a budget of rows.

    What was drawn must fit: only point masses may be left out.
    """
    proposals = [proposal for proposal in proposals if proposal.tokens]
    if len(proposals) < 2:
        return proposals[0] if proposals else NOTHING
    entries = []  # depth, proposal, place among its offers, draft, row of q
    for which, proposal in enumerate(proposals):
        parents = _parents(proposal)
        depth_of = depths(parents)
        for place, (draft, law) in enumerate(_offers(proposal)):
            entries.append((depth_of[draft], which, place, draft, law))
    first_law, laws = _stacked(proposals)
    tokens, node_parents, offers = list[int](), list[int](), list[Offer]()
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    at: dict[tuple[int, int], int] = {}  # (proposal, its draft) -> node
    for _depth, which, _place, draft, law in sorted(entries, key=lambda entry: entry[:3]):
        proposal = proposals[which]
        before = _parents(proposal)[draft]
        parent = -1 if before < 0 else at.get((which, before))
        if parent is None:
            continue
        node = nodes.get((parent, proposal.tokens[draft]))
        if node is None:
            if len(tokens) == budget:
                assert law is None, "what was drawn must be judged"
                continue
            node = nodes[parent, proposal.tokens[draft]] = len(tokens)
            tokens.append(proposal.tokens[draft])
            node_parents.append(parent)
        at[which, draft] = node
        offers.append(Offer(node, None if law is None else first_law[which] + law))
    if laws is None:
        is_chain = node_parents == list(range(-1, len(tokens) - 1))
        return Chosen(tokens, None if is_chain else node_parents)
    return Tree(tokens, node_parents, offers, laws)


def _parents(proposal: Proposal) -> Sequence[int]:
    return range(-1, len(proposal.tokens) - 1) if proposal.parents is None else proposal.parents


def _offers(proposal: Proposal) -> Sequence[tuple[int, int | None]]:
    if isinstance(proposal, Tree):
        return proposal.offers
    return [(i, i if isinstance(proposal, Drawn) else None) for i in range(len(proposal.tokens))]


def _stacked(proposals: Sequence[Proposal]) -> tuple[list[int], Array | None]:
    """Return where each one's rows of q begin, and all of them; None without any."""
    first, rows, count = list[int](), list[Array](), 0
    for proposal in proposals:
        first.append(count)
        if not isinstance(proposal, Chosen):
            own = proposal.q_KV if isinstance(proposal, Drawn) else proposal.q_MV
            rows.append(own)
            count += own.shape[0]
    return first, namespace(rows[0]).concat([like(own, rows[0]) for own in rows]) if rows else None
