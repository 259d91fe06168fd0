"""Who takes part in a round, and with how much. It only decides: the plan is a value."""

from collections import deque
from collections.abc import Mapping

from forerun.engine.sequence import Sequence, Work


class Scheduler:
    """First come, first served. Writers are always in; prompts share a budget of rows, so that they stall nobody."""

    def __init__(self, *, capacity: int, max_running: int, prefill_rows: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._capacity = capacity  # positions of the cache, over all sequences
        self._max_running = max_running
        self._prefill_rows = prefill_rows

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self, parked: Mapping[int, int]) -> list[Sequence]:
        """Move waiting sequences to running, in order, as far as places and the cache allow; return them.

        `parked` tells how many positions each kept sequence holds; one that is resumed goes on with its own.
        """
        admitted = []
        free = self._capacity - sum(parked.values()) - sum(sequence.reserved for sequence in self.running)
        while self.waiting and len(self.running) < self._max_running:
            more = self.waiting[0].reserved - parked.get(self.waiting[0].id, 0)
            if more > free:
                break
            free -= more
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def plan(self) -> list[Work]:
        """Return the next round: a row and K drafts for each writer, pieces of prompts for the others.

        The round that ends a prompt has no drafts, however the prompt was cut, so that neighbours change no draw.
        """
        plan, rows_left = [], self._prefill_rows
        for sequence in self.running:
            if len(sequence.tokens) > sequence.num_prompt:
                room = sequence.max_len - len(sequence.tokens) - 1
                plan.append(Work(sequence, 1, max(0, min(sequence.k, room))))
            elif rows_left > 0:
                num_tokens = min(sequence.num_pending, rows_left)
                rows_left -= num_tokens
                plan.append(Work(sequence, num_tokens, 0))
        return plan

    def remove(self, sequence: Sequence) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
