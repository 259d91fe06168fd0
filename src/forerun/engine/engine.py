"""The loop. A round is plan, propose, extend, verify, commit; plain decoding is a round without drafts.

The engine knows tokens only: no clock, no files, no threads, no tokenizer (stop strings are matched on bytes, by the
table it is given). Callers `add` requests, call `step` while there is work, and may `abort` between two steps.
"""

from collections.abc import Sequence as Seq
from contextlib import nullcontext
from itertools import count

from forerun.backends.base import Session
from forerun.drafters.base import NOTHING, Drafter, Outcome, Verified
from forerun.engine.ends import Ends
from forerun.engine.policy import Fixed, Guess, Policy, Report
from forerun.engine.round import Judgement, Span, extend, judge
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Event, Request, Sequence, Work
from forerun.errors import EngineError, RequestError
from forerun.sampling.arrays import Array, top_ids
from forerun.sampling.laws import Sampler
from forerun.types import Source, SpeculationStats, TokenTrace, Verify


class Engine:
    """Many requests, one target, and a policy that says who drafts for it."""

    def __init__(
        self,
        session: Session,
        drafter: Drafter | None = None,
        *,
        token_bytes: Seq[bytes],
        end_ids: Seq[int] = (),
        k: int = 5,
        verify: Verify = "block",
        max_running: int = 64,
        prefill_rows: int = 512,
        policy: Policy | None = None,
        span: Span = lambda _name: nullcontext(),
    ) -> None:
        """`token_bytes[id]` is what a token adds to the text. `k` and `verify` hold where a request says nothing.

        Either one `drafter`, or a `policy` with its own.
        """
        assert drafter is None or policy is None
        self.session = session
        self.policy: Policy = policy or Fixed(drafter)
        self._token_bytes = token_bytes
        self._end_ids = tuple(end_ids)
        self._k = k
        self._verify = verify
        self._span = span
        self._ids = count()
        self._capacity = session.room()
        self._scheduler = Scheduler(capacity=self._capacity, max_running=max_running, prefill_rows=prefill_rows)
        self._parked: dict[int, tuple[int, list[int]]] = {}  # kept sequences: handle, and the tokens in its cache

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def drafters(self) -> Seq[Drafter]:
        return self.policy.drafters

    def add(self, request: Request) -> int:
        """Queue a request and return its id (that of the sequence it resumes, if any).

        Raises RequestError when it can never be served.
        """
        params, prompt = request.params, request.prompt_ids
        limit = self.session.max_len
        if not prompt:
            raise RequestError("the prompt has no tokens; expected at least one")
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; the context holds {limit}, one of them for the answer: shorten"
            )
        for token in (*prompt, *params.logit_bias, *params.stop_token_ids):
            if not 0 <= token < self.session.vocab_size:
                raise RequestError(f"token id {token} doesn't exist; the model has 0 to {self.session.vocab_size - 1}")
        max_len = min(limit, len(prompt) + params.max_tokens) if params.max_tokens else limit
        k = self._k if params.k is None else params.k
        reserved = min(max_len + min(k, self.policy.max_drafts), limit)
        if reserved > self._capacity:
            raise RequestError(
                f"the request may take {reserved} positions; the cache holds {self._capacity}: lower max_tokens"
            )
        end_ids = [*(() if params.ignore_eos else self._end_ids), *params.stop_token_ids]
        resumable = self._parked.keys() - {sequence.id for sequence in self._scheduler.waiting}
        if request.resume is not None and request.resume not in resumable:
            raise RequestError(f"there is no kept sequence {request.resume} to resume")
        sequence = Sequence(
            id=next(self._ids) if request.resume is None else request.resume,
            handle=-1,
            tokens=list(prompt),
            params=params,
            sampler=Sampler(params, prompt, end_ids, seed=request.seed, request=request.stream),
            ends=Ends(
                end_ids=end_ids,
                stops=params.stop,
                token_bytes=self._token_bytes,
                min_tokens=params.min_tokens,
                max_tokens=max_len - len(prompt),
            ),
            k=min(k, self.policy.max_drafts),
            verify=params.verify or self._verify,
            max_len=max_len,
            reserved=reserved,
            keep=request.keep,
            num_prompt=len(prompt),
        )
        self._scheduler.waiting.append(sequence)
        return sequence.id

    def step(self) -> list[Event]:
        """Run one round and return what it did, request by request. Without work it returns nothing."""
        for sequence in self._admit():
            if sequence.id in self._parked:
                self._unpark(sequence)
            else:
                sequence.handle = self.session.open()
        plan = self._scheduler.plan()
        if not plan:
            return []
        writers = [work for work in plan if work.writes]
        with self._span("draft"):
            num_rows = sum(work.num_tokens for work in plan)
            guesses = self.policy.propose(writers, num_rows, branches=self.session.can_branch) if writers else []
        ordered = iter(guesses)
        proposals = [next(ordered).proposal if work.writes else NOTHING for work in plan]
        with self._span("target"):
            logits = extend(plan, proposals, self.session)
        drafts = [guess.proposal for guess in guesses]
        judgements = judge(writers, drafts, logits, self._span) if writers else []
        outcomes = [self._read(work) for work in plan if not work.writes]
        reports: list[Report] = []
        events = []
        end_row = 0
        for work, guess, judgement in zip(writers, guesses, judgements, strict=True):
            rows = slice(end_row, end_row + len(guess.proposal.tokens) + 1)
            end_row = rows.stop
            if isinstance(judgement, EngineError):
                failed = Event(work.sequence.id, (), None, SpeculationStats(), "error", error=str(judgement))
                events.append(self._end(work.sequence, failed))
                continue
            start, verified = work.sequence.num_cached, self._verified(work.sequence, guess, logits[rows])
            events.append(self._commit(work, guess, judgement))
            num_prompt = None if work.sequence.params.isolated else work.sequence.num_prompt
            outcomes.append(Outcome(work.sequence.id, work.sequence.tokens, start, verified, num_prompt))
            reports.append(Report(work.sequence.id, guess, judgement.path))
        if self.drafters:
            with self._span("draft"):
                drafted = {work.sequence.id for work in plan if work.sequence.k > 0}
                self.policy.observe([outcome for outcome in outcomes if outcome.seq in drafted], reports)
        for event, work in zip(events, writers, strict=True):
            if event.finish_reason not in (None, "error"):
                self._end(work.sequence, event)
        return events

    def abort(self, request_id: int) -> Event | None:
        """End a request between two rounds; None if it has ended already."""
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            if sequence.id == request_id:
                return self._end(sequence, Event(request_id, (), None, SpeculationStats(), "aborted"))
        return None

    def release(self, request_id: int) -> None:
        """Forget a kept sequence."""
        handle, _tokens = self._parked.pop(request_id)
        self._forget(request_id, handle)

    def release_kept(self) -> None:
        """Forget all kept sequences that no request waits for."""
        for request_id in list(self._parked):
            if all(sequence.id != request_id for sequence in self._scheduler.waiting):
                self.release(request_id)

    def _admit(self) -> list[Sequence]:
        """Start waiting requests; where kept sequences stand in the way of all, the oldest of them is given up.

        A request whose kept sequence was given up while it waited reads its whole prompt.
        """
        waiting = self._scheduler.waiting
        while True:
            admitted = self._scheduler.admit({kept: len(tokens) for kept, (_handle, tokens) in self._parked.items()})
            if admitted or self._scheduler.running or not waiting:
                return admitted
            self.release(next(kept for kept in self._parked if kept != waiting[0].id))

    def _unpark(self, sequence: Sequence) -> None:
        """Go on with the cache of a kept sequence, as far as its tokens and the prompt agree."""
        handle, cached = self._parked.pop(sequence.id)
        length = _common_prefix(cached, sequence.tokens[:-1])
        self.session.keep(handle, length)
        sequence.handle, sequence.num_cached = handle, length
        if sequence.k == 0:
            self.policy.release(sequence.id)  # it isn't told of this text, and would remember an old one

    def _read(self, work: Work) -> Outcome:
        """Commit a piece of a prompt."""
        sequence = work.sequence
        start = sequence.num_cached
        sequence.num_cached += work.num_tokens
        assert self.session.length(sequence.handle) == sequence.num_cached < len(sequence.tokens)
        return Outcome(sequence.id, sequence.tokens[: sequence.num_cached], start)

    def _verified(self, sequence: Sequence, guess: Guess, logits_RV: Array) -> Verified | None:
        """Return what the target said of each row, where the drafters want to know."""
        num_top = self.policy.num_top(sequence.id) if sequence.k else 0
        if not num_top:
            return None
        top_RN = top_ids(logits_RV, min(num_top, logits_RV.shape[-1]))
        return Verified([sequence.tokens[-1], *guess.proposal.tokens], top_RN)

    def _commit(self, work: Work, guess: Guess, judgement: Judgement) -> Event:
        """Append what stands, up to the first end, and cut the cache back to an absolute length."""
        sequence, proposal, path = work.sequence, guess.proposal, judgement.path
        tokens = [*(proposal.tokens[draft] for draft in path), judgement.token]
        cut = sequence.ends.advance(tokens)
        tokens = tokens[: cut.num_tokens]
        fell = _goes_on(guess, path)
        traces = tuple(
            TokenTrace(
                token_id=token,
                round=sequence.num_rounds,
                source="draft" if i < len(path) else _last_source(len(proposal.tokens), fell),
                position=i,
                p_target=judgement.p_target[i],
                p_draft=judgement.p_draft[i],
            )
            for i, token in enumerate(tokens)
        )
        sequence.num_rounds += 1
        sequence.tokens += tokens
        sequence.sampler.advance(tokens)
        read = sequence.num_cached + work.num_tokens
        sequence.num_cached = len(sequence.tokens) - 1
        if proposal.parents is None:
            self.session.keep(sequence.handle, sequence.num_cached)
        else:
            assert work.num_tokens == 1
            self.session.keep(sequence.handle, read - 1, [0, *(draft + 1 for draft in path[: len(tokens) - 1])])
        assert self.session.length(sequence.handle) == len(sequence.tokens) - 1
        logprobs = None if judgement.logprobs is None else tuple(judgement.logprobs[: len(tokens)])
        stats = _round_stats(len(proposal.tokens), len(path), len(tokens), fell=fell)
        return Event(
            sequence.id, traces, logprobs, stats, cut.finish_reason, guess.drafter, guess.decision, cut.text_end
        )

    def _end(self, sequence: Sequence, event: Event) -> Event:
        self._scheduler.remove(sequence)
        if sequence.id in self._parked:  # it never ran
            if not sequence.keep:
                self.release(sequence.id)
        elif sequence.keep and sequence.handle >= 0 and event.finish_reason != "error":
            self._parked[sequence.id] = (sequence.handle, sequence.tokens[: sequence.num_cached])
        else:
            self._forget(sequence.id, sequence.handle)
        return event

    def _forget(self, sequence_id: int, handle: int) -> None:
        if handle >= 0:
            self.session.release(handle)
        self.policy.release(sequence_id)


def _goes_on(guess: Guess, path: Seq[int]) -> bool:
    """Whether something was drafted after the end of this path."""
    end = path[-1] if path else -1
    parents = guess.proposal.parents
    return end + 1 < len(guess.proposal.tokens) if parents is None else end in parents


def _last_source(num_drafts: int, fell: bool) -> Source:
    if num_drafts == 0:
        return "plain"
    return "resample" if fell else "bonus"


def _round_stats(num_drafts: int, num_accepted: int, num_emitted: int, *, fell: bool) -> SpeculationStats:
    """Positions count as reached up to the first that fell, whatever a stop cut off afterwards.

    In a tree a position is a depth: it is reached where the path gets to a node with candidates.
    """
    reached = num_accepted + fell
    return SpeculationStats(
        rounds=1,
        proposed=num_drafts,
        reached=reached,
        accepted=num_accepted,
        emitted=num_emitted,
        reached_by_position=(1,) * reached,
        accepted_by_position=(1,) * num_accepted + (0,) * (reached - num_accepted),
    )


def _common_prefix(a: Seq[int], b: Seq[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
