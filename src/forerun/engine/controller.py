"""The controller: as many drafts, by whom, as bring the most expected tokens per second; none where they don't pay.

A draft is worth the chance that it gets accepted, the product of the chances along its path. The chances are measured:
each drafter sorts its drafts into keys, and how often drafts of a key turn out right is counted over all requests,
with old counts fading; a sequence whose drafts do better or worse than that moves its own. What a row costs is measured
too (`forerun.engine.costs`). So a round is the choice that maximises

    (sequences + sum of the worths) / (t(rows) + K · c + overhead)

over all sequences together: one budget, spent on the worthiest drafts first. Drafts that were picked without chance may
be trimmed like that after they are known, and the guesses of several drafters merged into one tree. Of a draft model
the number of drafts is settled before it draws the first one, from past rounds alone.

A draft model may draft a chain or, for a single sequence, the tree that its measured chances make the best one.

Drafts that were trimmed away are compared with what was written all the same, so that nothing has to be tried to be
learnt about, except a draft model that doesn't pay: it is probed now and then, less and less often, and meanwhile
reads nothing.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.backends.base import depths
from forerun.drafters.base import Chosen, Drafter, Outcome, Proposal
from forerun.drafters.shapes import Shape, best_shape
from forerun.engine.costs import Clock, Correction, CostTable
from forerun.engine.policy import Guess, Report, ask
from forerun.engine.sequence import Work
from forerun.types import Decision, SamplingParams

_FADE = 0.995  # of counts, each time a draft of a key is judged
_SURE = 0.98  # no draft is taken to be surer than this
_FIRST_GUESS = 0.5  # chance of a draft of which nothing is known
_RANK_FADE = 0.3  # the same, from one rank to the next
_PRIOR = 3.0  # how many drafts the mean of its drafter counts for in a key's chance
_OWN_PRIOR = 4.0  # how many expected acceptances it takes to move a sequence off the mean of all
_OWN_FADE = 0.95
_LEAST_WORTH = 0.02  # a draft below it is not looked at
_PROBE_ROUNDS, _MOST_PROBE_ROUNDS = 64, 2048  # after so many a draft model that doesn't pay is tried, then twice that
_READS_ROUNDS = 8  # a draft model that wasn't chosen for so many doesn't read along
_MAX_MODEL_DRAFTS = 16
_USUAL_ROWS = 32  # rounds that also read long prompts say nothing about others
_LENGTH_STEP = 32  # tokens of text over which costs are taken to be the same
_MOST_KNOWN = 512
_SLEEPS = ((4, 4), (32, 8))  # after so many rounds without a draft, drafters are asked once in so many

_MAX_TREE = 24  # drafts
_TREE_DEPTHS = 6
_TREE_RANKS = 4
_NEARLY = 0.9  # where a chain promises less than so much of what is best, no tree is looked for
_TREE_ROUNDS = 32  # the best tree of a draft model is looked for once in so many

Name = str | tuple[str, int]  # a drafter; its drafts of a later rank
Key = tuple[Name, int, Hashable]


class Estimates:
    """How often drafts turn out right, over all requests: by drafter, temperature, and the drafter's own key."""

    def __init__(self) -> None:
        self._counts: dict[Key, list[float]] = {}  # key -> accepted, judged
        self._totals: dict[tuple[Name, int], list[float]] = {}

    def chance(self, key: Key) -> float:
        """Return the chance of a draft, given that those before it stand."""
        total = self._totals.get(key[:2])
        first = _FIRST_GUESS if isinstance(key[0], str) else _FIRST_GUESS * _RANK_FADE ** key[0][1]
        mean = (total[0] + first) / (total[1] + 1.0) if total else first
        counts = self._counts.get(key)
        if counts is None:
            return mean
        return (counts[0] + _PRIOR * mean) / (counts[1] + _PRIOR)

    def learn(self, key: Key, accepted: bool) -> None:
        for counts in (self._counts.setdefault(key, [0.0, 0.0]), self._totals.setdefault(key[:2], [0.0, 0.0])):
            counts[0] = counts[0] * _FADE + accepted
            counts[1] = counts[1] * _FADE + 1.0

    def table(self) -> dict[str, dict[str, float]]:
        """Return what is known, for people: drafter and key -> chance and number of drafts."""
        return {
            f"{drafter} t{mood} {key}": {"chance": self.chance((drafter, mood, key)), "judged": counts[1]}
            for (drafter, mood, key), counts in sorted(self._counts.items(), key=lambda item: str(item[0]))
        }


class Candidate(NamedTuple):
    """A draft that could be made: the same by whoever offers it."""

    token: int
    parent: int
    key: Key  # of the first who offers it; with several drafters it also says what the others think of this place


@dataclass
class _Own:
    """What is known of one sequence."""

    luck: dict[Name, list[float]] = field(default_factory=dict)  # drafter -> accepted, expected
    trees: dict[str, tuple[int, Shape | None]] = field(default_factory=dict)  # draft model -> round, its best tree
    idle: int = 0  # rounds since a draft was made
    candidates: list[Candidate] = field(default_factory=list)  # of this round
    written: int = 0  # tokens when they were offered
    mood: int = 0
    is_awake: bool = False


class _Plan(NamedTuple):
    """What a draft model is to do in a round."""

    model: Drafter
    depth: int
    expected: dict[int, float]  # tokens, by the place of a sequence
    seconds: float  # of drafting
    parents: list[int] | None = None  # of a tree


class Controller:
    """A `Policy` over any number of drafters."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: CostTable,
        *,
        draft_costs: Mapping[str, CostTable] | None = None,
        estimates: Estimates | None = None,
        row_seconds: Mapping[bool, float] | None = None,
        max_drafts: int = 16,
        clock: Clock | None = None,
    ) -> None:
        """`draft_costs`: of the passes of draft models, by the drafter's name; drafters without are taken as free.

        `row_seconds[greedy]`: what the choice at one more row costs. With a `clock` a round's overhead is measured.
        """
        self.drafters = drafters
        self.max_drafts = max_drafts
        self.estimates = estimates or Estimates()
        self._costs = costs
        self._draft_costs = dict(draft_costs or {})
        self._free = [drafter for drafter in drafters if drafter.name not in self._draft_costs]
        self._models = [drafter for drafter in drafters if drafter.name in self._draft_costs]
        self._row_seconds = row_seconds or {}
        self._num_top = max((drafter.num_top for drafter in drafters), default=0)
        self._own: dict[int, _Own] = {}
        self._round = 0
        self._clock = clock
        self._correction = Correction(costs(1))
        self._added: dict[tuple[int, int, bool], list[float]] = {}  # plain rows, length, greedy -> seconds by drafts
        self._began = self._drafting = 0.0
        self._is_usual = False
        self._probes = {
            drafter.name: (_PROBE_ROUNDS, _PROBE_ROUNDS) for drafter in self._models
        }  # in which round, wait
        self._chosen = {drafter.name: 0 for drafter in self._models}  # in which round
        self._expected = (0.0, 0.0)  # of this round: seconds of its plain pass, and what drafts were to add
        self._slowness: dict[str, float] = {}  # seconds that a draft model took over those that were expected

    def num_top(self, seq: int) -> int:
        own = self._own.get(seq)
        return self._num_top if own is not None and own.is_awake else 0

    def propose(self, works: Sequence[Work], num_rows: int, *, branches: bool) -> list[Guess]:
        self._drafting = 0.0
        if self._clock:
            self._began = self._clock()
        self._round += 1
        requests = [work.sequence for work in works]
        owns = [self._own.setdefault(request.id, _Own()) for request in requests]
        offered = self._offers(works, owns, branches=branches)
        worths = [self._worths(own, candidates) for own, candidates in zip(owns, offered, strict=True)]
        length = sum(len(request.tokens) for request in requests) / max(1, len(requests))
        chosen, rate = self._spend(works, worths, num_rows, length)
        plan = self._model_that_beats(rate, works, owns, num_rows, length, branches=branches)
        if plan is not None:
            guesses = self._ask_model(plan, works, rate, num_rows, length)
            expected = [plan.expected.get(i, 1.0) for i in range(len(works))]
        else:
            guesses = [_guess(candidates, kept) for candidates, kept in zip(offered, chosen, strict=True)]
            expected = [1.0 + sum(own[i] for i in kept) for own, kept in zip(worths, chosen, strict=True)]
        num_drafts = 0
        for request, own, candidates, guess in zip(requests, owns, offered, guesses, strict=True):
            own.candidates, own.written, own.mood = candidates, len(request.tokens), _mood(request.params)
            own.idle = 0 if guess.proposal.tokens else own.idle + 1
            num_drafts += len(guess.proposal.tokens)
        self._expected = self._costs(num_rows, length), self._adds(works, num_rows, num_drafts, length)[num_drafts]
        self._is_usual = num_rows <= _USUAL_ROWS
        plain = self._seconds(works, num_rows, 0, length)
        seconds = self._seconds(works, num_rows, num_drafts, length) + (plan.seconds if plan else 0.0)
        return [
            guess._replace(
                decision=Decision(
                    plan.model.name if plan else guess.drafter,
                    len(candidates),
                    len(guess.proposal.tokens),
                    tokens,
                    seconds,
                    plain,
                )
            )
            for guess, candidates, tokens in zip(guesses, offered, expected, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome], reports: Sequence[Report]) -> None:
        for drafter in self.drafters:
            if hasattr(drafter, "reads_along"):  # which costs a draft model passes
                drafter.reads_along = self._round - self._chosen.get(drafter.name, 0) <= _READS_ROUNDS
            drafter.observe(outcomes)
        texts = {outcome.seq: outcome.tokens for outcome in outcomes}
        for report in reports:
            own = self._own.get(report.seq)
            if own is not None and report.seq in texts:
                self._learn(own, texts[report.seq], report)
        if self._clock and reports and self._is_usual:
            plain, added = self._expected
            self._correction.observe(added, self._clock() - self._began - self._drafting - plain)

    def release(self, seq: int) -> None:
        self._own.pop(seq, None)
        for drafter in self.drafters:
            drafter.release(seq)

    def _offers(self, works: Sequence[Work], owns: Sequence[_Own], *, branches: bool) -> list[list[Candidate]]:
        """Ask the free drafters for all that they have, and merge what they say of each sequence."""
        offered: list[list[Candidate]] = [[] for _ in works]
        for work, own in zip(works, owns, strict=True):
            own.is_awake = work.k > 0 and _is_awake(own)
        asked = [i for i, own in enumerate(owns) if own.is_awake]
        if not asked:
            return offered
        views = [works[i].sequence.view(branches=branches) for i in asked]
        budgets = [works[i].k for i in asked]
        found = [ask(drafter, views, budgets) for drafter in self._free]
        for place, i in enumerate(asked):
            mood = _mood(works[i].sequence.params)
            named = [
                (drafter.name, proposals[place])
                for drafter, proposals in zip(self._free, found, strict=True)
                if proposals[place].tokens
            ]
            offered[i] = self._merge(named, mood, owns[i], branches=branches)
        return offered

    def _merge(self, named: Sequence[tuple[str, Proposal]], mood: int, own: _Own, *, branches: bool) -> list[Candidate]:
        """Lay proposals over each other; where no tree may be made, take the one that is worth most."""
        if len(named) > 1 and not branches:
            each = [self._merge([one], mood, own, branches=True) for one in named]
            return max(each, key=lambda candidates: sum(self._worths(own, candidates)))
        candidates: list[Candidate] = []
        places: dict[tuple[int, int], int] = {}
        offered_by: list[set[str]] = []
        for name, proposal in named:
            assert isinstance(proposal, Chosen), f"{name} draws its drafts: what it costs must be known"
            own_places: list[int] = []
            for i, token in enumerate(proposal.tokens):
                parent = i - 1 if proposal.parents is None else proposal.parents[i]
                parent = own_places[parent] if parent >= 0 else -1
                key = (name, mood, proposal.keys[i] if proposal.keys is not None else i)
                place = places.get((parent, token))
                if place is None:
                    place = places[parent, token] = len(candidates)
                    candidates.append(Candidate(token, parent, key))
                    offered_by.append(set())
                offered_by[place].add(name)
                own_places.append(place)
        return candidates if len(named) == 1 else _beside_each_other(candidates, offered_by)

    def _chance(self, own: _Own, key: Key) -> float:
        luck = own.luck.get(key[0])
        factor = (luck[0] + _OWN_PRIOR) / (luck[1] + _OWN_PRIOR) if luck else 1.0
        return min(_SURE, self.estimates.chance(key) * factor)

    def _worths(self, own: _Own, candidates: Sequence[Candidate]) -> list[float]:
        """Return the chance of each candidate that the text gets to it."""
        worths: list[float] = []
        for candidate in candidates:
            chance = self._chance(own, candidate.key)
            worths.append(chance if candidate.parent < 0 else chance * worths[candidate.parent])
        return worths

    def _spend(
        self, works: Sequence[Work], worths: Sequence[Sequence[float]], num_rows: int, length: float
    ) -> tuple[list[list[int]], float]:
        """Return which candidates of each sequence are drafted, and tokens per second. A child is worth less than its
        parent, so whatever is taken first by worth is a tree.
        """
        ranked = sorted(
            (-worth, i, candidate)
            for i, own in enumerate(worths)
            for candidate, worth in enumerate(own)
            if worth >= _LEAST_WORTH
        )
        tokens = float(len(works))
        plain, factor = self._seconds(works, num_rows, 0, length), self._correction.factor
        best_count, best_rate = 0, tokens / plain
        added = self._adds(works, num_rows, len(ranked), length)
        for count, (negative, _i, _candidate) in enumerate(ranked, start=1):
            tokens -= negative
            rate = tokens / (plain + factor * added[count])
            if rate > best_rate:
                best_count, best_rate = count, rate
        chosen: list[list[int]] = [[] for _ in works]
        for _worth, i, candidate in ranked[:best_count]:
            if len(chosen[i]) < works[i].k:
                chosen[i].append(candidate)
        return chosen, best_rate

    def _seconds(self, works: Sequence[Work], num_rows: int, num_drafts: int, length: float) -> float:
        """Return what a round takes without what draft models take."""
        added = self._adds(works, num_rows, num_drafts, length)[num_drafts]
        return self._costs(num_rows, length) + self._correction.fixed + self._correction.factor * added

    def _adds(self, works: Sequence[Work], num_rows: int, most: int, length: float) -> list[float]:
        """Return what 0, 1, …, `most` drafts or more add to a round by what was measured at load, in seconds."""
        greedy = not works or works[0].sequence.sampler.is_greedy
        place = num_rows, int(length) // _LENGTH_STEP, greedy
        known = self._added.get(place)
        if known is None:
            if len(self._added) > _MOST_KNOWN:
                self._added.clear()
            known = self._added[place] = [0.0]
        if len(known) <= most:
            each, middle = self._row_seconds.get(greedy, 0.0), (place[1] + 0.5) * _LENGTH_STEP
            plain = self._costs(num_rows, middle)
            for count in range(len(known), most + 8):
                known.append(self._costs(num_rows + count, middle) - plain + each * count)
        return known

    def _model_that_beats(
        self,
        rate: float,
        works: Sequence[Work],
        owns: Sequence[_Own],
        num_rows: int,
        length: float,
        *,
        branches: bool,
    ) -> _Plan | None:
        """Return what the draft model should do that promises the most tokens per second, if that is above `rate`.

        One that doesn't is probed with a single draft now and then.
        """
        best: _Plan | None = None
        able = [i for i, work in enumerate(works) if work.k > 0]
        if not able:
            return best
        for drafter in self._models:
            tokens, drafting = float(len(works)), 0.0
            expected, reach = dict.fromkeys(able, 1.0), dict.fromkeys(able, 1.0)
            most = 0.0  # that a chain of this one promises
            for depth in range(1, min(_MAX_MODEL_DRAFTS, drafter.max_drafts) + 1):
                live = [i for i in able if works[i].k >= depth]
                if not live:
                    break
                for i in live:
                    key = (drafter.name, _mood(works[i].sequence.params), depth - 1)
                    reach[i] *= self._chance(owns[i], key)
                    expected[i] += reach[i]
                    tokens += reach[i]
                drafting += self._drafting_seconds(drafter, len(live), length)
                num_drafts = sum(min(depth, works[i].k) for i in able)
                promised = tokens / (self._seconds(works, num_rows, num_drafts, length) + drafting)
                if promised < 0.8 * most:
                    break
                most = max(most, promised)
                if promised > rate:
                    best, rate = _Plan(drafter, depth, dict(expected), drafting), promised
            if branches and len(works) == 1 and hasattr(drafter, "shape") and most > _NEARLY * rate:
                shape = self._best_tree(drafter, works, owns[0], num_rows, length)
                if shape is not None:
                    drafting = self._tree_seconds(drafter, shape, length)
                    seconds = self._seconds(works, num_rows, len(shape.parents), length) + drafting
                    if (1.0 + shape.expected) / seconds > rate:
                        rate = (1.0 + shape.expected) / seconds
                        best = _Plan(drafter, len(shape.parents), {0: 1.0 + shape.expected}, drafting, shape.parents)
        if best is None:
            return self._probe(able, length)
        self._chosen[best.model.name] = self._round
        self._probes[best.model.name] = (self._round + _PROBE_ROUNDS, _PROBE_ROUNDS)
        return best

    def _probe(self, able: Sequence[int], length: float) -> _Plan | None:
        """Return the plan of a single draft by a model whose turn it is; each time in vain it waits for longer."""
        for model in self._models:
            at, wait = self._probes[model.name]
            if self._round >= at:
                wait = min(2 * wait, _MOST_PROBE_ROUNDS)
                self._probes[model.name] = (self._round + wait, wait)
                drafting = self._drafting_seconds(model, len(able), length)
                return _Plan(model, 1, dict.fromkeys(able, 1.0 + _FIRST_GUESS), drafting)
        return None

    def _drafting_seconds(self, model: Drafter, num_rows: int, length: float) -> float:
        return self._draft_costs[model.name](num_rows, length) * self._slowness.get(model.name, 1.0)

    def _tree_seconds(self, model: Drafter, shape: Shape, length: float) -> float:
        """Return what it takes to draft a tree: a pass for each depth, over all drafts so far."""
        depth_of = depths(shape.parents)
        so_far = [sum(depth < level for depth in depth_of) for level in range(max(depth_of) + 1)]
        return sum(self._drafting_seconds(model, max(1, count), length) for count in so_far)

    def _best_tree(
        self, model: Drafter, works: Sequence[Work], own: _Own, num_rows: int, length: float
    ) -> Shape | None:
        """Return the tree that promises most by the chances of past rounds, for the only sequence; None for a chain."""
        found = own.trees.get(model.name)
        if found is not None and self._round - found[0] < _TREE_ROUNDS:
            return found[1]
        mood = _mood(works[0].sequence.params)
        chances_DR = [
            [self._chance(own, _rank_key(model.name, mood, depth, rank)) for rank in range(_TREE_RANKS)]
            for depth in range(min(_TREE_DEPTHS, works[0].k))
        ]
        best, most = None, 0.0
        for depth in range(1, len(chances_DR) + 1):
            whole = best_shape(chances_DR[:depth], min(_MAX_TREE, works[0].k))
            for count in range(1, len(whole.parents) + 1):
                shape = Shape(whole.parents[:count], whole.ranks[:count], whole.worths[:count])
                drafting = self._tree_seconds(model, shape, length)
                rate = (1.0 + shape.expected) / (self._seconds(works, num_rows, count, length) + drafting)
                if rate > most:
                    best, most = shape, rate
        if best is not None and not any(best.ranks):
            best = None
        own.trees[model.name] = (self._round, best)
        return best

    def _ask_model(self, plan: _Plan, works: Sequence[Work], rate: float, num_rows: int, length: float) -> list[Guess]:
        """Let a draft model draft. A chain stops early where the shape of its law promises less than a draft costs."""
        model = plan.model
        if hasattr(model, "stop_below"):
            row = self._costs(num_rows + 2, length) - self._costs(num_rows + 1, length)
            model.stop_below = min(0.9, rate * (self._drafting_seconds(model, 1, length) + row) / max(1, len(works)))
        if hasattr(model, "shape"):
            model.shape = None if plan.parents is None else _shape_of(plan.parents)
        asked = [i for i, work in enumerate(works) if work.k > 0]
        views = [works[i].sequence.view(branches=plan.parents is not None) for i in asked]
        guesses = [Guess()] * len(works)
        start = self._clock() if self._clock else 0.0
        proposals = ask(model, views, [min(plan.depth, works[i].k) for i in asked])
        for i, proposal in zip(asked, proposals, strict=True):
            planned = (model.name, min(plan.depth, works[i].k))
            guesses[i] = Guess(proposal, model.name if proposal.tokens else None, planned=planned)
        if self._clock:
            self._drafting = self._clock() - start
            if all(len(proposal.tokens) == plan.depth for proposal in proposals):  # it did what was planned
                slowness = self._slowness.get(model.name, 1.0)
                measured = min(max(self._drafting / max(plan.seconds, 1e-9) * slowness, 0.25), 4.0)
                self._slowness[model.name] = slowness + 0.1 * (measured - slowness)
        return guesses

    def _learn(self, own: _Own, text: Sequence[int], report: Report) -> None:
        """Compare what was offered, drafted or not, with what was written."""
        written = text[own.written :]
        children: dict[int, list[int]] = {}
        for i, candidate in enumerate(own.candidates):
            children.setdefault(candidate.parent, []).append(i)
        at: int | None = -1
        for token in written:
            if at is None:
                break
            following, at = children.get(at, ()), None
            for i in following:
                accepted = own.candidates[i].token == token
                if accepted:
                    at = i
                self._count(own, own.candidates[i].key, accepted)
        self._learn_model(own, report)
        own.candidates = []

    def _learn_model(self, own: _Own, report: Report) -> None:
        """Count how the drafts of a model went. One that it was asked for and didn't make, not being sure, brought
        nothing: a plan is worth what it brings, not what its drafts are worth.
        """
        proposal = report.guess.proposal
        if report.guess.planned is None:
            return
        name, num_planned = report.guess.planned
        if len(report.path) == len(proposal.tokens) < num_planned and proposal.parents is None:
            self._count(own, _rank_key(name, own.mood, len(proposal.tokens), 0), False)
        children: dict[int, list[int]] = {}
        for i in range(len(proposal.tokens)):
            children.setdefault(i - 1 if proposal.parents is None else proposal.parents[i], []).append(i)
        node = -1
        for depth, kept in enumerate([*report.path, None]):
            for rank, child in enumerate(children.get(node, ())):
                self._count(own, _rank_key(name, own.mood, depth, rank), child == kept)
            node = len(proposal.tokens) if kept is None else kept

    def _count(self, own: _Own, key: Key, accepted: bool) -> None:
        luck = own.luck.setdefault(key[0], [0.0, 0.0])
        luck[0] = luck[0] * _OWN_FADE + accepted
        luck[1] = luck[1] * _OWN_FADE + self.estimates.chance(key)
        self.estimates.learn(key, accepted)


def _beside_each_other(candidates: Sequence[Candidate], offered_by: Sequence[set[str]]) -> list[Candidate]:
    """Return the candidates with keys that tell whether other drafters agree, offer something else, or say nothing.

    A draft on which two agree is surer than one on which they differ, whoever made it.
    """
    asked: dict[int, set[str]] = {}
    for candidate, names in zip(candidates, offered_by, strict=True):
        asked.setdefault(candidate.parent, set()).update(names)
    return [
        candidate._replace(
            key=(*candidate.key[:2], (candidate.key[2], len(names) - 1, len(asked[candidate.parent]) - len(names)))
        )
        for candidate, names in zip(candidates, offered_by, strict=True)
    ]


def _rank_key(name: str, mood: int, depth: int, rank: int) -> Key:
    """Return the key of a draft model's draft: of those that compete for a place, the one that comes `rank`-th."""
    return (name, mood, depth) if rank == 0 else ((name, rank), mood, min(depth, 2))


def _shape_of(parents: Sequence[int]) -> Callable[[int], Sequence[int]]:
    return lambda count: parents[:count]


def _is_awake(own: _Own) -> bool:
    every = 1
    for rounds, once_in in _SLEEPS:
        if own.idle > rounds:
            every = once_in
    return own.idle % every == 0


def _mood(params: SamplingParams) -> int:
    """Return the class of temperature: greedy, and steps of a half."""
    return 0 if params.temperature == 0.0 else 1 + min(3, int(params.temperature * 2))


def _guess(candidates: Sequence[Candidate], kept: Sequence[int]) -> Guess:
    """Return the tree of those candidates that are kept; a chain as one."""
    if not kept:
        return Guess()
    order = sorted(kept)
    place = {candidate: i for i, candidate in enumerate(order)}
    place[-1] = -1
    parents = [place[candidates[i].parent] for i in order]
    tokens = [candidates[i].token for i in order]
    is_chain = parents == list(range(-1, len(parents) - 1))
    names = dict.fromkeys(str(candidates[i].key[0]) for i in order)
    return Guess(Chosen(tokens, None if is_chain else parents), "+".join(names))
