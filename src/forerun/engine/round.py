"""The middle of a round: extend and judge. Nothing here changes a text or a random state.

R  rows whose logits are wanted, over all sequences that write      V  vocabulary
B  sequences that one rule judges together                          L = K + 1 rows of the longest of them

A sequence has a row for its last token and one for each draft, in their order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from forerun.backends.base import Feed, Session, depths
from forerun.drafters.base import Chosen, Drawn, Proposal, Tree
from forerun.engine.sequence import Work
from forerun.errors import EngineError
from forerun.sampling import verify
from forerun.sampling.arrays import Array, like, namespace, on_host, top_values
from forerun.sampling.choose import choose, race
from forerun.sampling.laws import Row, laws, log_softmax
from forerun.sampling.streams import Role
from forerun.sampling.tree import list_rule, traversal_rule, walk
from forerun.types import TokenLogprob

Span = Callable[[str], AbstractContextManager[None]]  # names a stretch of a round, for those who measure it


class Judgement(NamedTuple):
    """The verdict on one sequence."""

    path: list[int]  # the drafts that stand
    token: int  # the bonus or resampled one
    p_target: list[float]  # of the accepted drafts and of `token`
    p_draft: list[float | None]
    logprobs: list[TokenLogprob] | None = None


class Rows(NamedTuple):
    """The rows of one sequence in this pass, and what leads to each."""

    work: Work
    proposal: Proposal
    first: int  # of R

    @property
    def num_rows(self) -> int:
        return len(self.proposal.tokens) + 1

    def depths(self) -> Sequence[int]:
        """How many drafts lead to each row."""
        parents = self.proposal.parents
        return range(self.num_rows) if parents is None else [0, *(depth + 1 for depth in depths(parents))]

    def laws_of(self) -> list[Row]:
        """Whose law each row has."""
        sampler, proposal = self.work.sequence.sampler, self.proposal
        if not sampler.constraints:
            return [Row(sampler)] * self.num_rows
        paths: list[tuple[int, ...]] = [()]
        for draft, token in enumerate(proposal.tokens):
            parent = draft if proposal.parents is None else proposal.parents[draft] + 1
            paths.append((*paths[parent], token))
        return [Row(sampler, path) for path in paths]


def extend(plan: Sequence[Work], proposals: Sequence[Proposal], session: Session) -> Array:
    """Feed pending tokens and drafts of all sequences in one pass; return logits (R, V) of those that write."""
    feeds = []
    for work, proposal in zip(plan, proposals, strict=True):
        sequence = work.sequence
        pending = sequence.tokens[sequence.num_cached : sequence.num_cached + work.num_tokens]
        num_logits = len(proposal.tokens) + 1 if work.writes else 0
        parents = None
        if proposal.parents is not None:
            before = len(pending)
            parents = [*range(-1, before - 1), *(parent + before for parent in proposal.parents)]
        feeds.append(Feed(sequence.handle, [*pending, *proposal.tokens], num_logits, parents))
    return on_host(session.extend(feeds).logits)


def judge(
    writers: Sequence[Work], proposals: Sequence[Proposal], logits_RV: Array, span: Span
) -> list[Judgement | EngineError]:
    """Verify all proposals, each by the rule for how it was made. An error of one sequence is returned in its place.

    A draft that the target forbids may lead to a row where nothing is allowed, or where a processor fails. That is an
    error only of a text that gets there.
    """
    rows, num_rows = [], 0
    for work, proposal in zip(writers, proposals, strict=True):
        rows.append(Rows(work, proposal, num_rows))
        num_rows += rows[-1].num_rows
    assert logits_RV.shape[0] == num_rows
    groups: dict[str, list[int]] = {}
    for i, item in enumerate(rows):
        groups.setdefault(_rule(item), []).append(i)
    found: dict[int, Judgement | EngineError] = {}
    with span("sampling"):
        for rule, members in groups.items():
            mine = [rows[i] for i in members]
            if rule in ("coupled", "choice"):
                judged = _judge_choices(rule, mine, logits_RV)
            elif rule == "tree":
                judged = [_judge_tree(item, logits_RV) for item in mine]
            else:
                judged = _judge_chains(rule, mine, logits_RV)
            found.update(zip(members, judged, strict=True))
    return [_with_logprobs(rows[i], found[i], logits_RV) for i in range(len(rows))]


def _rule(rows: Rows) -> str:
    """The only rule that is exact for this pair."""
    verify_by = rows.work.sequence.verify
    if verify_by == "coupled":
        return "coupled"
    if isinstance(rows.proposal, Chosen) or not rows.proposal.tokens:
        return "choice"
    return "tree" if isinstance(rows.proposal, Tree) else str(verify_by)


def _judge_choices(rule: str, members: Sequence[Rows], logits_RV: Array) -> list[Judgement | EngineError]:
    """Let the target choose at every row, whatever was drafted, and follow its choices.

    A choice depends on the text before it and on draws keyed by its position, so the text doesn't depend on the drafts.
    """
    mine_RV = _rows_of(logits_RV, members)
    laws_of = [row for rows in members for row in rows.laws_of()]
    if rule == "coupled":
        places = [len(rows.work.sequence.tokens) + depth for rows in members for depth in rows.depths()]
        choices = race(mine_RV, laws_of, places)
    else:
        choices = choose(mine_RV, laws_of, [u for rows in members for u in _choice_uniforms(rows)])
    tokens, masses = choices.tokens_R.tolist(), choices.masses_R.tolist()
    judged: list[Judgement | EngineError] = []
    start = 0
    for rows in members:
        own = tokens[start : start + rows.num_rows]
        path = walk(rows.proposal.tokens, rows.proposal.parents, own)
        at = [0, *(draft + 1 for draft in path)]
        p_target = [masses[start + row] for row in at]
        p_draft: list[float | None] = [None] * len(at)
        if rule == "choice":
            ends = _has_children(rows.proposal, at[-1] - 1)
            p_draft = [*[1.0] * len(path), 0.0 if ends else None]
        errors = {row: choices.errors[start + row] for row in range(rows.num_rows) if start + row in choices.errors}
        judged.append(_until(errors, Judgement(path, own[at[-1]], p_target, p_draft), rows.proposal))
        start += rows.num_rows
    return judged


def _choice_uniforms(rows: Rows) -> list[float]:
    sequence = rows.work.sequence
    if sequence.sampler.is_greedy:
        return [0.0] * rows.num_rows
    length, stream = len(sequence.tokens), sequence.sampler.stream
    drawn: dict[int, float] = {}
    for depth in rows.depths():
        if depth not in drawn:
            drawn[depth] = stream.uniforms(length + depth, Role.CHOICE, 1)[0]
    return [drawn[depth] for depth in rows.depths()]


def _has_children(proposal: Proposal, draft: int) -> bool:
    """Whether something was drafted after this one (-1: after the text)."""
    if proposal.parents is None:
        return draft + 1 < len(proposal.tokens)
    return draft in proposal.parents


def _judge_tree(rows: Rows, logits_RV: Array) -> Judgement | EngineError:
    """Judge sampled candidates: whole paths where the request wants blocks and no two offers are one draft."""
    proposal, sequence = rows.proposal, rows.work.sequence
    assert isinstance(proposal, Tree)
    p_RV, errors = _laws([rows], logits_RV)
    stream, length = sequence.sampler.stream, len(sequence.tokens)
    uniforms = stream.uniforms(length, Role.ACCEPT, max(len(proposal.offers), rows.num_rows))
    q_MV = like(proposal.q_MV, p_RV)
    is_shared = len({offer.draft for offer in proposal.offers}) < len(proposal.offers)
    rule = traversal_rule if sequence.verify == "block" and not is_shared else list_rule
    verdict = rule(
        p_RV, proposal.tokens, proposal.parents, proposal.offers, q_MV, lambda i, chance: uniforms[i] < chance
    )
    xp = namespace(p_RV)
    u_B = like(stream.uniforms(length, Role.RESAMPLE, 1), p_RV, xp.float64)
    token = int(verify.draw(verdict.law_V[None], u_B)[0])
    emitted = [*(proposal.tokens[draft] for draft in verdict.path), token]
    at = [0, *(draft + 1 for draft in verdict.path)]
    p_target = [float(p_RV[row, out]) for row, out in zip(at, emitted, strict=True)]
    p_draft = [_offered_mass(proposal, row - 1, out) for row, out in zip(at, emitted, strict=True)]
    return _until(errors[0], Judgement(verdict.path, token, p_target, p_draft), proposal)


def _offered_mass(tree: Tree, node: int, token: int) -> float | None:
    """The mass of a token under the law of a node's first candidate; None where there is none."""
    first = next((offer for offer in tree.offers if tree.parents[offer.draft] == node), None)
    if first is None:
        return None
    if first.law is None:
        return float(tree.tokens[first.draft] == token)
    return float(tree.q_MV[first.law, token])


def _judge_chains(rule: str, members: Sequence[Rows], logits_RV: Array) -> list[Judgement | EngineError]:
    """Judge chains drawn from q, all together."""
    p_RV, errors = _laws(members, logits_RV)
    xp = namespace(p_RV)
    sequences = [rows.work.sequence for rows in members]
    proposals = [rows.proposal for rows in members]
    drafts = [list(proposal.tokens) for proposal in proposals]
    num_drafts = [len(tokens) for tokens in drafts]
    depth = max(num_drafts)
    p_BLV = _gather(p_RV, num_drafts)
    drafts_BK = like([tokens + [0] * (depth - len(tokens)) for tokens in drafts], p_RV, xp.int64)
    num_drafts_B = like(num_drafts, p_RV, xp.int64)
    u_BK = like([s.sampler.stream.uniforms(len(s.tokens), Role.ACCEPT, depth) for s in sequences], p_RV, xp.float64)
    q_BLV = _stack_q(proposals, p_BLV)
    chain_rule = verify.block_rule if rule == "block" else verify.token_rule
    verdict = chain_rule(p_BLV, q_BLV, drafts_BK, num_drafts_B, u_BK)
    u_B = like([s.sampler.stream.uniforms(len(s.tokens), Role.RESAMPLE, 1)[0] for s in sequences], p_RV, xp.float64)
    tokens_B = verify.draw(verdict.law_BV, u_B).tolist()
    emitted = [
        [*tokens[:n], token] for tokens, n, token in zip(drafts, verdict.num_accepted_B.tolist(), tokens_B, strict=True)
    ]
    p_target, p_draft = _masses(p_BLV, emitted), _masses(q_BLV, emitted)
    judged: list[Judgement | EngineError] = []
    for b, out in enumerate(emitted):
        own: list[float | None] = [mass if i < num_drafts[b] else None for i, mass in enumerate(p_draft[b])]
        judgement = Judgement(list(range(len(out) - 1)), out[-1], p_target[b], own)
        judged.append(_until(errors[b], judgement, proposals[b]))
    return judged


def _rows_of(logits_RV: Array, members: Sequence[Rows]) -> Array:
    """Return the rows of some sequences; a view where they are neighbours."""
    first, end = members[0].first, members[-1].first + members[-1].num_rows
    if sum(rows.num_rows for rows in members) == end - first:
        return logits_RV[first:end]
    return logits_RV[like([rows.first + i for rows in members for i in range(rows.num_rows)], logits_RV)]


def _laws(members: Sequence[Rows], logits_RV: Array) -> tuple[Array, list[dict[int, EngineError]]]:
    """Return p of all rows of some sequences, and each one's rows that have no law: theirs are a stopgap.

    Laws of a stopgap depend on the prefix alone as real ones do, so what stands before them stands by the right law.
    """
    mine_RV = _rows_of(logits_RV, members)
    rows = [row for item in members for row in item.laws_of()]
    try:
        return laws(mine_RV, rows), [{} for _ in members]
    except EngineError:
        xp = namespace(logits_RV)
        p_RV = xp.zeros_like(mine_RV, dtype=xp.float32)
        p_RV[:, 0] = 1.0
        errors, start = [], 0
        for item in members:
            own: dict[int, EngineError] = {}
            for i in range(item.num_rows):
                row = slice(start + i, start + i + 1)
                try:
                    p_RV[row] = laws(mine_RV[row], rows[row])
                except EngineError as error:
                    own[i] = error
            errors.append(own)
            start += item.num_rows
        return p_RV, errors


def _until(errors: dict[int, EngineError], judgement: Judgement, proposal: Proposal) -> Judgement | EngineError:
    """Return the verdict as far as laws could be made: past that, the next round meets the error at its first row."""
    if not errors:
        return judgement
    for depth, row in enumerate([0, *(draft + 1 for draft in judgement.path)]):
        if row in errors:
            if depth == 0:
                return errors[row]
            path = judgement.path[: depth - 1]
            token = proposal.tokens[judgement.path[depth - 1]]
            return Judgement(path, token, judgement.p_target[:depth], judgement.p_draft[:depth])
    return judgement


def _gather(p_RV: Array, num_drafts: Sequence[int]) -> Array:
    """Return the rows of each chain side by side, (B, L, V); a view where they already lie so."""
    length, count = max(num_drafts) + 1, len(num_drafts)
    if min(num_drafts) + 1 == length:
        return p_RV.reshape(count, length, -1)
    rows, start = [], 0
    for n in num_drafts:
        rows.append([start + min(i, n) for i in range(length)])
        start += n + 1
    return p_RV[like(rows, p_RV)]


def _stack_q(proposals: Sequence[Proposal], p_BLV: Array) -> Array:
    """Return q of all proposals, zero from each one's end on: (B, L, V)."""
    q_BLV = namespace(p_BLV).zeros_like(p_BLV)
    for i, proposal in enumerate(proposals):
        assert isinstance(proposal, Drawn)
        q_BLV[i, : len(proposal.tokens)] = like(proposal.q_KV, p_BLV)
    return q_BLV


def _masses(laws_BLV: Array, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the mass of tokens[b][i] in row i of sequence b."""
    b = [i for i, row in enumerate(tokens) for _ in row]
    depth = [j for row in tokens for j in range(len(row))]
    flat = [token for row in tokens for token in row]
    found = iter(laws_BLV[like(b, laws_BLV), like(depth, laws_BLV), like(flat, laws_BLV)].tolist())
    return [[next(found) for _ in row] for row in tokens]


def _with_logprobs(rows: Rows, judgement: Judgement | EngineError, logits_RV: Array) -> Judgement | EngineError:
    num_top = rows.work.sequence.params.logprobs
    if num_top is None or isinstance(judgement, EngineError):
        return judgement
    at = [rows.first, *(rows.first + draft + 1 for draft in judgement.path)]
    tokens = [*(rows.proposal.tokens[draft] for draft in judgement.path), judgement.token]
    return judgement._replace(logprobs=_logprobs(logits_RV[like(at, logits_RV)], tokens, num_top))


def _logprobs(logits_RV: Array, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """The target's log-probabilities of the emitted tokens with the most likely alternatives, ties by lowest id."""
    xp = namespace(logits_RV)
    rows_RV = log_softmax(logits_RV)
    result = []
    for row_V, token in zip(rows_RV, tokens, strict=True):
        top: list[tuple[int, float]] = []
        if num_top:
            least = top_values(row_V[None], min(num_top, row_V.shape[-1]))[0, -1]
            ids = xp.nonzero(row_V >= least)[0]
            top = sorted(zip(ids.tolist(), row_V[ids].tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
        result.append(TokenLogprob(token, float(row_V[token]), tuple(top[:num_top])))
    return result
