"""The middle of a round: propose, extend, verify. Nothing here changes a text or a random state.

R  rows whose logits are wanted, over all sequences that write      V  vocabulary
B  sequences that one rule judges together                          L = K + 1 rows of the longest of them
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from forerun.backends.base import Feed, Session
from forerun.drafters.base import NOTHING, Drafter, Drawn, Proposal
from forerun.engine.sequence import Work
from forerun.errors import EngineError
from forerun.sampling import verify
from forerun.sampling.arrays import Array, like, namespace, on_host, top_values
from forerun.sampling.laws import Row, laws, log_softmax
from forerun.sampling.streams import Role
from forerun.types import TokenLogprob

Span = Callable[[str], AbstractContextManager[None]]  # names a stretch of a round, for those who measure it


class Judgement(NamedTuple):
    """The verdict on one sequence."""

    num_accepted: int
    token: int  # the bonus or resampled one
    p_target: list[float]  # of the accepted drafts and of `token`
    p_draft: list[float | None]
    logprobs: list[TokenLogprob] | None


class Failure(NamedTuple):
    """The first of a sequence's rows that has no law."""

    depth: int  # so many drafts lead to it
    error: EngineError


def propose(plan: Sequence[Work], drafter: Drafter | None) -> list[Proposal]:
    """Ask the drafter for those who may have drafts."""
    proposals: list[Proposal] = [NOTHING] * len(plan)
    asked = [i for i, work in enumerate(plan) if work.k > 0]
    if drafter is None or not asked:
        return proposals
    try:
        answers = drafter.propose([plan[i].sequence.view() for i in asked], [plan[i].k for i in asked])
    except EngineError:  # some sequence's own constraints failed; `judge` will find out whose
        return proposals
    for i, proposal in zip(asked, answers, strict=True):
        assert len(proposal.tokens) <= plan[i].k
        proposals[i] = proposal
    return proposals


def extend(plan: Sequence[Work], proposals: Sequence[Proposal], session: Session) -> Array:
    """Feed pending tokens and drafts of all sequences in one pass; return logits (R, V) of those that write."""
    feeds = []
    for work, proposal in zip(plan, proposals, strict=True):
        sequence = work.sequence
        pending = sequence.tokens[sequence.num_cached : sequence.num_cached + work.num_tokens]
        num_logits = len(proposal.tokens) + 1 if work.writes else 0
        feeds.append(Feed(sequence.handle, [*pending, *proposal.tokens], num_logits))
    return on_host(session.extend(feeds).logits)


def judge(
    writers: Sequence[Work], proposals: Sequence[Proposal], logits_RV: Array, span: Span
) -> list[Judgement | EngineError]:
    """Verify all proposals: one group for each rule. An error of one sequence is returned in its place.

    A draft that the target forbids may lead to a row where nothing is allowed, or where a processor fails. That is an
    error only of a text that gets there.
    """
    starts, num_rows = [], 0
    for proposal in proposals:
        starts.append(num_rows)
        num_rows += len(proposal.tokens) + 1
    assert logits_RV.shape[0] == num_rows
    with span("sampling"):
        p_RV, failures = _laws(writers, proposals, starts, logits_RV)
        judgements: dict[int, Judgement] = {}
        groups: dict[str, list[int]] = {}
        for i, (work, proposal) in enumerate(zip(writers, proposals, strict=True)):
            groups.setdefault(_rule(work, proposal), []).append(i)
        for rule, members in groups.items():
            _judge_group(rule, members, writers, proposals, starts, p_RV, logits_RV, judgements)
    return [
        judgements[i] if i not in failures else _until(failures[i], judgements[i], proposal)
        for i, proposal in enumerate(proposals)
    ]


def _until(failure: Failure, judgement: Judgement, proposal: Proposal) -> Judgement | EngineError:
    """Return the verdict as far as laws could be made: past that, the next round meets the error at its first row."""
    depth = failure.depth
    if judgement.num_accepted < depth:
        return judgement
    if depth == 0:
        return failure.error
    logprobs = None if judgement.logprobs is None else judgement.logprobs[:depth]
    return Judgement(
        depth - 1, proposal.tokens[depth - 1], judgement.p_target[:depth], judgement.p_draft[:depth], logprobs
    )


def _rule(work: Work, proposal: Proposal) -> str:
    """The only rule that is exact for this pair."""
    if work.sequence.verify == "coupled":
        return "coupled"
    if isinstance(proposal, Drawn) and proposal.tokens:
        return str(work.sequence.verify)
    return "point" if proposal.tokens else "plain"


def _laws(
    writers: Sequence[Work], proposals: Sequence[Proposal], starts: Sequence[int], logits_RV: Array
) -> tuple[Array, dict[int, Failure]]:
    """Return p of all rows, and which sequence fails at which row; from there on its laws are a stopgap.

    Laws of a stopgap depend on the prefix alone as real ones do, so what stands before them stands by the right law.
    """
    rows = [
        Row(work.sequence.sampler, tuple(proposal.tokens[:depth]))
        for work, proposal in zip(writers, proposals, strict=True)
        for depth in range(len(proposal.tokens) + 1)
    ]
    try:
        return laws(logits_RV, rows), {}
    except EngineError:
        xp, failures = namespace(logits_RV), {}
        p_RV = xp.zeros_like(logits_RV, dtype=xp.float32)
        p_RV[:, 0] = 1.0
        for i, (start, proposal) in enumerate(zip(starts, proposals, strict=True)):
            for depth in range(len(proposal.tokens) + 1):
                row = slice(start + depth, start + depth + 1)
                try:
                    p_RV[row] = laws(logits_RV[row], rows[row])
                except EngineError as error:
                    failures[i] = Failure(depth, error)
                    break
        return p_RV, failures


def _judge_group(
    rule: str,
    members: Sequence[int],
    writers: Sequence[Work],
    proposals: Sequence[Proposal],
    starts: Sequence[int],
    p_RV: Array,
    logits_RV: Array,
    judgements: dict[int, Judgement],
) -> None:
    xp = namespace(p_RV)
    sequences = [writers[i].sequence for i in members]
    drafts = [list(proposals[i].tokens) for i in members]
    num_drafts = [len(tokens) for tokens in drafts]
    depth = max(num_drafts)
    p_BLV = _gather(p_RV, [starts[i] for i in members], num_drafts)
    drafts_BK = like([tokens + [0] * (depth - len(tokens)) for tokens in drafts], p_RV, xp.int64).reshape(
        len(members), depth
    )
    num_drafts_B = like(num_drafts, p_RV, xp.int64)
    q_BLV = None
    if rule == "coupled":
        noise = [
            sequence.sampler.stream.exponentials(len(sequence.tokens) + i, p_RV.shape[-1], p_RV)
            for sequence in sequences
            for i in range(depth + 1)
        ]
        noise_BLV = xp.stack(noise).reshape(p_BLV.shape)
        verdict = verify.coupled_rule(p_BLV, drafts_BK, num_drafts_B, noise_BLV)
    else:
        u_BK = like(
            [s.sampler.stream.uniforms(len(s.tokens), Role.ACCEPT, depth) for s in sequences], p_RV, xp.float64
        ).reshape(len(members), depth)
        if rule in ("block", "token"):
            q_BLV = _stack_q([proposals[i] for i in members], p_BLV)
            chain_rule = verify.block_rule if rule == "block" else verify.token_rule
            verdict = chain_rule(p_BLV, q_BLV, drafts_BK, num_drafts_B, u_BK)
        else:
            verdict = verify.point_rule(p_BLV, drafts_BK, num_drafts_B, u_BK)
    u_B = like([s.sampler.stream.uniforms(len(s.tokens), Role.RESAMPLE, 1)[0] for s in sequences], p_RV, xp.float64)
    tokens_B = verify.draw(verdict.law_BV, u_B)
    emitted = [
        [*tokens[:n], token]
        for tokens, n, token in zip(drafts, verdict.num_accepted_B.tolist(), tokens_B.tolist(), strict=True)
    ]
    masses = _masses(p_BLV, emitted)
    draft_masses: list[list[float | None]] = [[None] * len(tokens) for tokens in emitted]
    if rule == "point":
        draft_masses = [
            [1.0 if i < count and token == tokens[i] else (0.0 if i < count else None) for i, token in enumerate(out)]
            for out, tokens, count in zip(emitted, drafts, num_drafts, strict=True)
        ]
    elif q_BLV is not None:
        draft_masses = [
            [mass if i < count else None for i, mass in enumerate(row)]
            for row, count in zip(_masses(q_BLV, emitted), num_drafts, strict=True)
        ]
    for i, sequence, tokens, p_target, p_draft in zip(members, sequences, emitted, masses, draft_masses, strict=True):
        logprobs = None
        if sequence.params.logprobs is not None:
            logprobs = _logprobs(logits_RV[starts[i] : starts[i] + len(tokens)], tokens, sequence.params.logprobs)
        judgements[i] = Judgement(len(tokens) - 1, tokens[-1], p_target, p_draft, logprobs)


def _gather(p_RV: Array, starts: Sequence[int], num_drafts: Sequence[int]) -> Array:
    """Return the rows of each sequence side by side, (B, L, V); a view where they already lie so."""
    length = max(num_drafts) + 1
    first, count = starts[0], len(starts)
    if list(starts) == list(range(first, first + count * length, length)) and min(num_drafts) + 1 == length:
        return p_RV[first : first + count * length].reshape(count, length, -1)
    rows = [[start + min(i, n) for i in range(length)] for start, n in zip(starts, num_drafts, strict=True)]
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
