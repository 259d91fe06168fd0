"""A small language model of the same vocabulary as drafter, with a cache of its own.

Its cache is a length like the target's: it catches up by feeding `tokens[length:]`, so full acceptance, a rejection
and a text that was edited are all the same case. All sequences draft together, one pass for each depth.

With an `inner` drafter a pass may bring several drafts: the model judges what the inner one guesses just as the target
judges a draft, so what it drafts still has the model's own law q (a cascade: Chen et al. 2312.11462). The inner
drafter may be another model with an inner drafter of its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from forerun.backends.base import Feed, Session, depths
from forerun.drafters.base import NOTHING, Chosen, Drafter, Drawn, Offer, Outcome, Proposal, Tree, View
from forerun.errors import EngineError, OptionError
from forerun.sampling.arrays import Array, like, namespace, on_host, top_ids
from forerun.sampling.laws import Row, Sampler, laws, log_softmax
from forerun.sampling.streams import Role
from forerun.sampling.tree import walk, without
from forerun.sampling.verify import block_rule, draw, race

_INNER_DRAFTS = 4  # the inner drafter is asked for no more at once
_GAMMA = 0.2  # of AdaEDL

Shape = Callable[[int], Sequence[int]]  # a number of drafts -> the parent of each, depth by depth


class LMDrafter:
    """Drafts by a `Session`; q is the model's law after the very transforms that the target's law goes through.

    `stop_below`: a chain ends before a draft whose chance looks lower than this (AdaEDL, Agrawal et al. 2410.18351): of
    the law that it would be drawn from, 1 - sqrt(0.2 · entropy) bounds the chance from below. `shape`: how drafts are
    laid out where a tree may be made; None makes a chain. `draws`: whether candidates of a tree are drawn from q, or
    else the likeliest tokens, for the target to match. `reads_along`: whether it reads what is committed at once, or
    only when it is asked for drafts. All may be set anew before each round.
    """

    def __init__(
        self,
        session: Session,
        *,
        vocab_size: int,
        name: str = "lm",
        inner: Drafter | None = None,
        max_drafts: int = 64,
    ) -> None:
        """`vocab_size`: the target's V. The two share one tokenizer; padded rows are cut off."""
        if session.vocab_size < vocab_size:
            raise OptionError(
                f"the draft model knows {session.vocab_size} tokens, the target {vocab_size}; "
                "take a draft model with the target's tokenizer"
            )
        self.name = name
        self.session = session
        self.inner = inner
        self.max_drafts = max_drafts
        self.num_top = inner.num_top if inner else 0
        self.stop_below = 0.0
        self.shape: Shape | None = None
        self.draws = True
        self.reads_along = True
        self._vocab_size = vocab_size
        self._handles: dict[int, int] = {}
        self._fed: dict[int, list[int]] = {}  # the tokens in each sequence's cache

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        proposals: list[Proposal] = [NOTHING] * len(views)
        chains, trees = list[_Chain](), list[_Tree]()
        room = self.session.room()
        for i, (view, budget) in enumerate(zip(views, budgets, strict=True)):
            parents = self._shape(view, min(budget, self.max_drafts))
            # the last draft is never fed, so the context must hold len(tokens) + depth - 1 rows
            depth = min(max(depths(parents), default=-1) + 1, self.session.max_len - len(view.tokens) + 1)
            fed = len(self._fed.get(view.seq, ()))
            depth = min(depth, room + fed - len(view.tokens) + 1)
            if depth <= 0:
                continue
            room -= max(0, len(view.tokens) + depth - 1 - fed)
            if parents == list(range(-1, len(parents) - 1)):
                chains.append(_Chain(i, view, depth))
            else:
                trees.append(_Tree(i, view, parents, depth, draws=self.draws))
        active = chains
        while active:
            self._lengthen(active)
            active = [chain for chain in active if len(chain.tokens) < chain.depth]
        self._grow(trees)
        drafts: list[_Chain | _Tree] = [*chains, *trees]
        for draft in drafts:
            proposals[draft.index] = draft.proposal()
        return proposals

    def _shape(self, view: View, budget: int) -> list[int]:
        if self.shape is not None and view.branches and self.session.can_branch and budget > 0:
            return list(self.shape(budget))
        return list(range(-1, budget - 1))

    def _lengthen(self, chains: "Sequence[_Chain]") -> None:
        """Run one pass: it adds one draft to each chain, and as many more as the inner drafter guessed right."""
        guesses = self._ask_inner(chains)
        feeds, rows = [], list[Row]()
        for chain, guess in zip(chains, guesses, strict=True):
            handle, pending = self._pending(chain)
            tokens = [*pending, *guess.tokens]
            self._fed[chain.view.seq] += tokens
            feeds.append(Feed(handle, tokens, num_logits=len(guess.tokens) + 1))
            rows += chain.rows(guess.tokens)
        logits_RV = on_host(self.session.extend(feeds).logits[:, : self._vocab_size])
        q_RV, lawless = _laws(logits_RV, rows)
        choices = self._choose(q_RV, chains, guesses)
        first = 0
        for chain, guess in zip(chains, guesses, strict=True):
            end = first + len(guess.tokens) + 1
            if isinstance(guess, Drawn):
                drafted = chain.judge(q_RV[first:end], guess)
            else:
                path = walk(guess.tokens, None, choices[first:end])
                drafted = choices[first : first + len(path) + 1]
            for row, token in enumerate(drafted, first):
                if row in lawless or self._looks_bad(chain, q_RV[row], logits_RV[row]):
                    chain.depth = len(chain.tokens)
                    break
                chain.tokens.append(token)
                chain.q.append(q_RV[row])
            first = end

    def _ask_inner(self, chains: "Sequence[_Chain]") -> list[Proposal]:
        if self.inner is None:
            return [NOTHING] * len(chains)
        budgets = [min(chain.depth - len(chain.tokens) - 1, _INNER_DRAFTS) for chain in chains]
        return self.inner.propose([chain.inner_view() for chain in chains], [max(0, budget) for budget in budgets])

    def _pending(self, chain: "_Chain") -> tuple[int, list[int]]:
        """Return the handle of a chain's sequence and what its cache lacks of the text and its drafts."""
        seq = chain.view.seq
        if not chain.tokens:
            handle = self._rewound(seq, chain.view.tokens)
            return handle, list(chain.view.tokens[len(self._fed[seq]) :])
        handle, length = self._handles[seq], len(chain.view.tokens) + len(chain.tokens) - 1
        if length < len(self._fed[seq]):
            self.session.keep(handle, length)
            del self._fed[seq][length:]
        return handle, chain.tokens[-1:]

    def _choose(self, q_RV: Array, chains: "Sequence[_Chain]", guesses: Sequence[Proposal]) -> list[int]:
        """Draw a token of each row: by the DRAFT uniforms, or with the target's own noise in coupled mode."""
        uniforms = list[float]()
        for chain, guess in zip(chains, guesses, strict=True):
            uniforms += chain.uniforms[len(chain.tokens) :][: len(guess.tokens) + 1]
        tokens: list[int] = draw(q_RV, like(uniforms, q_RV, namespace(q_RV).float64)).tolist()
        row = 0
        for chain, guess in zip(chains, guesses, strict=True):
            for i in range(len(guess.tokens) + 1):
                if chain.view.verify == "coupled":
                    place = len(chain.view.tokens) + len(chain.tokens) + i
                    tokens[row] = int(race(q_RV[row : row + 1], [(chain.view.sampler.stream, place)])[0])
                row += 1
        return tokens

    def _looks_bad(self, chain: "_Chain", q_V: Array, logits_V: Array) -> bool:
        """Whether a draft is not worth while by the shape of its law. Nothing of the draft itself is looked at."""
        if not self.stop_below:
            return False
        xp = namespace(q_V)
        log_V = log_softmax(logits_V[None])[0] if chain.view.sampler.is_greedy else xp.log(xp.clip(q_V, 1e-30, None))
        entropy = -float(xp.sum(xp.exp(log_V) * log_V))
        return 1.0 - math.sqrt(_GAMMA * max(entropy, 0.0)) < self.stop_below

    def _grow(self, trees: "Sequence[_Tree]") -> None:
        """Draft trees, a pass for each depth, which reads the tree so far anew."""
        depth = 0
        while trees := [tree for tree in trees if tree.wants(depth)]:
            feeds, rows = [], list[Row]()
            for tree in trees:
                seq = tree.view.seq
                if depth == 0:
                    handle = self._rewound(seq, tree.view.tokens)
                    pending = list(tree.view.tokens[len(self._fed[seq]) :])
                    self._fed[seq] += pending
                    feeds.append(Feed(handle, pending, num_logits=1))
                else:
                    feeds.append(Feed(self._handles[seq], tree.tokens, len(tree.nodes_at(depth - 1)), tree.parents_now))
                rows += tree.rows(depth)
            logits_RV = on_host(self.session.extend(feeds).logits[:, : self._vocab_size])
            q_RV, lawless = _laws(logits_RV, rows)
            row = 0
            for tree in trees:
                if depth:
                    self.session.keep(self._handles[tree.view.seq], len(self._fed[tree.view.seq]))
                for node in tree.nodes_at(depth - 1):
                    if row not in lawless:
                        tree.branch(node, q_RV[row])
                    row += 1
            depth += 1

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep up with prompts while the target reads them; after a round the next proposal catches up."""
        if self.inner is not None:
            self.inner.observe(outcomes)
        if not self.reads_along:
            return
        feeds, room = [], self.session.room()
        for seq, tokens, *_ in outcomes:
            handle = self._rewound(seq, tokens)
            pending = tokens[self.session.length(handle) : len(tokens) - 1]
            if 1 < len(pending) <= room and len(tokens) - 1 <= self.session.max_len:
                room -= len(pending)
                self._fed[seq] += pending
                feeds.append(Feed(handle, pending))
        if feeds:
            self.session.extend(feeds)

    def _rewound(self, seq: int, tokens: Sequence[int]) -> int:
        """Return the handle of `seq`, its cache cut back to what agrees with `tokens`, the last one left to feed."""
        if seq not in self._handles:
            self._handles[seq], self._fed[seq] = self.session.open(), []
        fed = self._fed[seq]
        length = min(len(fed), len(tokens) - 1)
        if fed[:length] != list(tokens[:length]):
            length = next(i for i in range(length) if fed[i] != tokens[i])
        if length < len(fed):
            self.session.keep(self._handles[seq], length)
            del fed[length:]
        return self._handles[seq]

    def fork(self, seq: int, child: int) -> None:
        if self.inner is not None:
            self.inner.fork(seq, child)
        if seq in self._handles:
            self._handles[child] = self.session.fork(self._handles[seq], len(self._fed[seq]))
            self._fed[child] = list(self._fed[seq])

    def release(self, seq: int) -> None:
        if self.inner is not None:
            self.inner.release(seq)
        if seq in self._handles:
            self.session.release(self._handles.pop(seq))
            del self._fed[seq]

    def forget(self) -> None:
        if self.inner is not None:
            self.inner.forget()


class _Chain:
    """One sequence's chain while it grows."""

    def __init__(self, index: int, view: View, depth: int) -> None:
        self.index = index
        self.view = view
        self.depth = depth
        self.uniforms = view.sampler.stream.uniforms(len(view.tokens), Role.DRAFT, depth)
        self.tokens: list[int] = []
        self.q: list[Array] = []

    def rows(self, guessed: Sequence[int]) -> list[Row]:
        path = (*self.view.path, *self.tokens)
        return [Row(self.view.sampler, (*path, *guessed[:i])) for i in range(len(guessed) + 1)]

    def inner_view(self) -> View:
        """What the inner drafter may look at: the text with the drafts so far, and draws of its own."""
        view = self.view
        sampler = view.sampler if view.verify == "coupled" else view.sampler.within(len(view.tokens))
        tokens = [*view.tokens, *self.tokens]
        return View(view.seq, tokens, sampler, view.verify, ahead=view.ahead + len(self.tokens))

    def judge(self, q_LV: Array, guess: Drawn) -> list[int]:
        """Return drafts from the model's law out of drafts from the inner one's: (L, V) are the model's rows."""
        xp, position = namespace(q_LV), len(self.view.tokens) + len(self.tokens)
        stream, count = self.view.sampler.within(len(self.view.tokens)).stream, len(guess.tokens)
        inner_LV = xp.concat([like(guess.q_KV, q_LV), xp.zeros_like(q_LV[:1])])
        verdict = block_rule(
            q_LV[None],
            inner_LV[None],
            like([list(guess.tokens)], q_LV, xp.int64),
            like([count], q_LV, xp.int64),
            like([stream.uniforms(position, Role.ACCEPT, count)], q_LV, xp.float64),
        )
        kept = int(verdict.num_accepted_B[0])
        u_B = like(stream.uniforms(position, Role.RESAMPLE, 1), q_LV, xp.float64)
        return [*guess.tokens[:kept], int(draw(verdict.law_BV, u_B)[0])]

    def proposal(self) -> Proposal:
        if not self.tokens:
            return NOTHING
        if self.view.sampler.is_greedy or self.view.verify == "coupled":
            return Chosen(self.tokens)  # greedy laws are point masses; coupled drafts need no law
        return Drawn(self.tokens, namespace(self.q[0]).stack(self.q))


class _Tree:
    """One sequence's tree while it grows, in the order of its depths. A node is a draft, -1 the text."""

    def __init__(self, index: int, view: View, shape: Sequence[int], max_depth: int, *, draws: bool) -> None:
        self.index = index
        self.view = view
        self.tokens: list[int] = []
        self.parents_now: list[int] = []
        self._shape = shape  # planned node -> its planned parent
        self._planned: dict[int, int] = {-1: -1}  # node -> the planned one in its place
        self._max_depth = max_depth
        self._levels: list[list[int]] = [[-1]]
        self._uniforms = view.sampler.stream.uniforms(len(view.tokens), Role.DRAFT, len(shape))
        self._is_drawn = draws and not view.sampler.is_greedy and view.verify != "coupled"
        self._ranking = _softened(view.sampler) if view.sampler.is_greedy else view.sampler
        self._keys: list[tuple[int, int]] = []
        self._offers: list[Offer] = []
        self._q: list[Array] = []

    def wants(self, depth: int) -> bool:
        """Whether there is a planned draft after the nodes at `depth` - 1."""
        nodes = {self._planned[node] for node in self.nodes_at(depth - 1)}
        return depth < self._max_depth and any(parent in nodes for parent in self._shape)

    def nodes_at(self, depth: int) -> list[int]:
        return self._levels[depth + 1] if depth + 1 < len(self._levels) else []

    def rows(self, depth: int) -> list[Row]:
        return [Row(self._ranking, (*self.view.path, *self._path(node))) for node in self.nodes_at(depth - 1)]

    def _path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self._path(self.parents_now[node]), self.tokens[node]]

    def branch(self, node: int, q_V: Array) -> None:
        """Draft the planned children of a node: drawn without replacement from q, or its likeliest tokens."""
        planned = [i for i, parent in enumerate(self._shape) if parent == self._planned[node]]
        if not planned:
            return
        depth = len(self._path(node))
        if depth + 2 > len(self._levels):
            self._levels.append([])
        if not self._is_drawn:
            score_V = q_V / _noise(self.view, depth, q_V) if self.view.verify == "coupled" else q_V
            for rank, token in enumerate(top_ids(score_V[None], min(len(planned), q_V.shape[-1]))[0].tolist()):
                if float(score_V[token]) > 0:
                    self._add(node, planned[rank], token, depth)
                    self._keys.append((rank, min(8, int(-math.log2(max(float(q_V[token]), 1e-9))))))
            return
        left_V = q_V
        for place in planned:
            if not float(left_V.sum()) > 0:
                break
            u_B = like([self._uniforms[place]], q_V, namespace(q_V).float64)
            token = int(draw(left_V[None], u_B)[0])
            left_V = without(left_V, token)
            self._offers.append(Offer(len(self.tokens), len(self._q)))
            self._add(node, place, token, depth)
        self._q.append(q_V)

    def _add(self, node: int, place: int, token: int, depth: int) -> None:
        self._levels[depth + 1].append(len(self.tokens))
        self._planned[len(self.tokens)] = place
        self.tokens.append(token)
        self.parents_now.append(node)

    def proposal(self) -> Proposal:
        if not self.tokens:
            return NOTHING
        if not self._is_drawn:
            return Chosen(self.tokens, self.parents_now, self._keys)
        return Tree(self.tokens, self.parents_now, self._offers, namespace(self._q[0]).stack(self._q))


def _softened(sampler: Sampler) -> Sampler:
    """Return a greedy request's settings at temperature 1, for the order of the tokens after the first."""
    soft = sampler.within(0)
    soft.params = replace(sampler.params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    return soft


def _noise(view: View, depth: int, like_V: Array) -> Array:
    """The target's own noise for the token `depth` places after the text."""
    return view.sampler.stream.exponentials(len(view.tokens) + depth, like_V.shape[-1], like_V)


def _laws(logits_RV: Array, rows: Sequence[Row]) -> tuple[Array, set[int]]:
    """Return q of each row, and which rows have none: where the target gets there, it says why. Theirs is a stopgap."""
    try:
        return laws(logits_RV, rows), set()
    except EngineError:
        xp, lawless = namespace(logits_RV), set[int]()
        q_RV = xp.zeros_like(logits_RV, dtype=xp.float32)
        q_RV[:, 0] = 1.0
        for r, row in enumerate(rows):
            try:
                q_RV[r : r + 1] = laws(logits_RV[r : r + 1], [row])
            except EngineError:
                lawless.add(r)
        return q_RV, lawless
