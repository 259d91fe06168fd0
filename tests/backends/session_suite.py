"""What every `Session` must do, whatever backend it is. Import `SessionSuite`, subclass it, give it a `make`.

The reference is the session itself, fed a whole prefix at once into an empty sequence: caches, batches, rollbacks and
forks must never show in the logits.
"""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from forerun.backends.base import Feed, Session
from forerun.errors import OptionError, RequestError


def as_numpy(array: object) -> np.ndarray:
    """Return a float64 copy of a numpy array or a torch tensor."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float64)
    return array.detach().to("cpu").double().numpy()  # type: ignore[attr-defined, no-any-return]


def fresh_rows(session: Session, tokens: Sequence[int], num_logits: int) -> np.ndarray:
    """Return the last rows of a prefill of `tokens` into a sequence of its own. (num_logits, V)"""
    seq = session.open()
    logits = as_numpy(session.extend([Feed(seq, tokens, num_logits)]).logits)
    session.release(seq)
    return logits


class SessionSuite:
    """Subclass as TestX with `make`, `tolerance` and, where the model is small, `max_tokens`."""

    tolerance = 0.0  # of logits, absolute; 0: to the bit
    tree_tolerance = 0.0  # of the rows of a tree, in which keys lie elsewhere than in a chain
    max_tokens = 40  # of a sequence in these tests

    @pytest.fixture
    def session(self) -> Session:
        raise NotImplementedError("override with a fixture that returns a fresh session")

    def check(self, got: object, expected: np.ndarray, *, tree: bool = False) -> None:
        tolerance = max(self.tolerance, self.tree_tolerance) if tree else self.tolerance
        got_rows = as_numpy(got)
        assert got_rows.shape == expected.shape
        assert np.isfinite(got_rows).all()
        assert np.abs(got_rows - expected).max(initial=0.0) <= tolerance

    def text(self, session: Session, length: int, seed: int = 0) -> list[int]:
        return random.Random(seed).choices(range(session.vocab_size), k=length)

    def test_a_subset_of_all_layers_is_the_model(self, session: Session) -> None:
        every = session.subset(range(session.num_layers))
        tokens = self.text(session, 9)
        seq, other = session.open(), every.open()
        session.extend([Feed(seq, tokens[:6])])
        assert every.length(other) == 0
        self.check(every.extend([Feed(other, tokens, 4)]).logits, fresh_rows(session, tokens, 4))
        assert session.length(seq) == 6

    @pytest.mark.parametrize("bad", [[], [1, 0], [0, 0], [-1], [10_000]])
    def test_a_subset_that_is_none_is_refused(self, session: Session, bad: list[int]) -> None:
        with pytest.raises(OptionError, match="layers"):
            session.subset(bad)

    def test_it_says_its_sizes(self, session: Session) -> None:
        assert session.vocab_size > 1
        assert session.num_layers >= 1
        assert session.max_len >= self.max_tokens
        assert session.room() > 0

    def test_a_new_sequence_is_empty_and_handles_are_distinct(self, session: Session) -> None:
        seqs = [session.open() for _ in range(5)]
        assert len(set(seqs)) == 5
        assert [session.length(seq) for seq in seqs] == [0] * 5

    @pytest.mark.parametrize("num_logits", [0, 1, 3, 11])
    def test_extend_returns_the_last_rows_asked_for(self, session: Session, num_logits: int) -> None:
        tokens = self.text(session, 11)
        every = fresh_rows(session, tokens, 11)
        seq = session.open()
        scores = session.extend([Feed(seq, tokens, num_logits)])
        assert session.length(seq) == 11
        self.check(scores.logits, every[11 - num_logits :])

    def test_a_row_does_not_see_later_tokens(self, session: Session) -> None:
        tokens = self.text(session, 13)
        every = fresh_rows(session, tokens, 13)
        for end in (1, 2, 7, 12):
            self.check(fresh_rows(session, tokens[:end], end), every[:end])

    @pytest.mark.parametrize("pieces", [(1,) * 17, (5, 1, 11), (16, 1), (2, 3, 5, 7)])
    def test_pieces_equal_the_whole(self, session: Session, pieces: tuple[int, ...]) -> None:
        tokens = self.text(session, 17)
        every = fresh_rows(session, tokens, 17)
        seq, start = session.open(), 0
        for piece in pieces:
            logits = session.extend([Feed(seq, tokens[start : start + piece], piece)]).logits
            self.check(logits, every[start : start + piece])
            start += piece

    def test_after_a_rollback_all_is_as_if_never_fed(self, session: Session) -> None:
        tokens, other = self.text(session, 19), self.text(session, 9, seed=1)
        for length in (0, 1, 8, 18, 19):
            seq = session.open()
            session.extend([Feed(seq, tokens)])
            session.keep(seq, length)
            assert session.length(seq) == length
            logits = session.extend([Feed(seq, other, 9)]).logits
            self.check(logits, fresh_rows(session, tokens[:length] + other, 9))

    def test_a_ragged_batch_equals_its_sequences_alone(self, session: Session) -> None:
        lengths, counts = (0, 1, 7, 23, 12), (13, 1, 4, 2, 5)
        texts = [self.text(session, a + b, seed) for seed, (a, b) in enumerate(zip(lengths, counts, strict=True))]
        seqs = [session.open() for _ in texts]
        for seq, length, text in zip(seqs, lengths, texts, strict=True):
            if length:
                session.extend([Feed(seq, text[:length])])
        wanted = (2, 1, 0, 2, 5)
        feeds = [
            Feed(seq, text[length:], rows) for seq, length, text, rows in zip(seqs, lengths, texts, wanted, strict=True)
        ]
        order = [3, 0, 4, 2, 1]
        logits = as_numpy(session.extend([feeds[index] for index in order]).logits)
        expected = [fresh_rows(session, texts[index], wanted[index]) for index in order if wanted[index]]
        self.check(logits, np.concatenate(expected))

    def test_a_fork_and_its_origin_are_independent(self, session: Session) -> None:
        tokens, left, right = self.text(session, 15), self.text(session, 6, 1), self.text(session, 6, 2)
        origin = session.open()
        session.extend([Feed(origin, tokens)])
        branch = session.fork(origin, 9)
        assert (session.length(origin), session.length(branch)) == (15, 9)
        session.keep(origin, 9)
        logits = as_numpy(session.extend([Feed(origin, left, 6), Feed(branch, right, 6)]).logits)
        self.check(logits[:6], fresh_rows(session, tokens[:9] + left, 6))
        self.check(logits[6:], fresh_rows(session, tokens[:9] + right, 6))
        session.release(origin)
        logits = session.extend([Feed(branch, left, 6)]).logits
        self.check(logits, fresh_rows(session, tokens[:9] + right + left, 6))

    def test_an_empty_fork_is_an_empty_sequence(self, session: Session) -> None:
        tokens = self.text(session, 5)
        branch = session.fork(session.open(), 0)
        self.check(session.extend([Feed(branch, tokens, 5)]).logits, fresh_rows(session, tokens, 5))

    def test_room_counts_what_is_cached_and_comes_back(self, session: Session) -> None:
        room = session.room()
        seqs = [session.open() for _ in range(3)]
        session.extend([Feed(seq, self.text(session, 7)) for seq in seqs])
        assert session.room() == room - 21
        session.keep(seqs[0], 2)
        assert session.room() == room - 16
        for seq in seqs:
            session.release(seq)
        assert session.room() == room

    def test_past_the_context_is_refused_before_anything_changes(self, session: Session) -> None:
        if session.max_len > 4096:
            pytest.skip("the context is too long to fill here")
        full, other = session.open(), session.open()
        tokens = self.text(session, session.max_len)
        session.extend([Feed(full, tokens[:-2])])
        with pytest.raises(RequestError):
            session.extend([Feed(other, tokens[:3], 1), Feed(full, tokens[-3:], 1)])
        assert session.length(other) == 0
        assert session.length(full) == session.max_len - 2
        logits = session.extend([Feed(full, tokens[-2:], 1)]).logits
        self.check(logits, fresh_rows(session, tokens, 1))

    def test_taps_are_hidden_states_of_all_rows(self, session: Session) -> None:
        last = session.num_layers - 1
        tokens, other = self.text(session, 6), self.text(session, 3, seed=1)
        alone = [session.extend([Feed(session.open(), text)], taps=[0, last]).taps for text in (tokens, other)]
        scores = session.extend([Feed(session.open(), tokens, 1), Feed(session.open(), other)], taps=[0, last])
        assert set(scores.taps) == {0, last}
        for layer, hidden in scores.taps.items():
            assert len(hidden) == 9
            self.check(hidden, np.concatenate([as_numpy(taps[layer]) for taps in alone]))
        assert scores.logits.shape == (1, session.vocab_size)
        assert session.extend([Feed(session.open(), tokens, 1)]).taps == {}

    @pytest.mark.parametrize("seed", range(4))
    def test_whatever_happens_logits_are_those_of_a_fresh_prefill(self, session: Session, seed: int) -> None:
        """Random joins, leaves, forks, rollbacks and ragged passes, as many sequences as there come."""
        chance = random.Random(seed)
        texts: dict[int, list[int]] = {}
        for _ in range(40):
            action = chance.random()
            if action < 0.2 or not texts:
                texts[session.open()] = []
            elif action < 0.3 and len(texts) > 1:
                seq = chance.choice(list(texts))
                session.release(seq)
                del texts[seq]
            elif action < 0.4:
                seq = chance.choice(list(texts))
                length = chance.randint(0, len(texts[seq]))
                texts[session.fork(seq, length)] = texts[seq][:length]
            elif action < 0.6:
                seq = chance.choice(list(texts))
                texts[seq] = texts[seq][: chance.randint(0, len(texts[seq]))]
                session.keep(seq, len(texts[seq]))
            else:
                self._random_pass(session, chance, texts)
            for seq, text in texts.items():
                assert session.length(seq) == len(text)

    def _random_pass(self, session: Session, chance: random.Random, texts: dict[int, list[int]]) -> None:
        feeds, expected = [], []
        for seq in chance.sample(list(texts), k=chance.randint(1, len(texts))):
            space = self.max_tokens - len(texts[seq])
            if space == 0:
                continue
            count = chance.choice([1, chance.randint(1, min(9, space)), chance.randint(1, space)])
            new = chance.choices(range(session.vocab_size), k=count)
            texts[seq] += new
            feeds.append(Feed(seq, new, chance.randint(0, count)))
        if feeds:
            logits = session.extend(feeds).logits
            expected = [fresh_rows(session, texts[feed.seq], feed.num_logits) for feed in feeds]
            self.check(logits, np.concatenate(expected))

    def test_a_row_of_a_tree_equals_the_end_of_its_path(self, session: Session) -> None:
        if not session.can_branch:
            pytest.skip("this session takes chains only")
        prefix = self.text(session, 11)
        for name, parents in TREES.items():
            tokens = self.text(session, len(parents), seed=len(name))
            paths = tree_paths(parents)
            seq, neighbour, chain = session.open(), session.open(), session.open()
            session.extend([Feed(seq, prefix), Feed(neighbour, prefix[:5])])
            scores = session.extend(
                [
                    Feed(neighbour, prefix[5:8], 2),
                    Feed(seq, tokens, len(parents), parents),
                    Feed(chain, prefix[:4], 1),
                ],
                taps=[0],
            )
            assert session.length(seq) == 11 + len(parents)
            assert len(scores.taps[0]) == 3 + len(parents) + 4
            logits = as_numpy(scores.logits)
            assert len(logits) == 2 + len(parents) + 1
            expected = [fresh_rows(session, prefix + [tokens[i] for i in path], 1) for path in paths]
            self.check(logits[:2], fresh_rows(session, prefix[:8], 2))
            self.check(logits[2:-1], np.concatenate(expected), tree=True)
            self.check(logits[-1:], fresh_rows(session, prefix[:4], 1))
            for open_seq in (seq, neighbour, chain):
                session.release(open_seq)

    def test_after_a_tree_the_kept_path_is_as_if_fed_alone(self, session: Session) -> None:
        if not session.can_branch:
            pytest.skip("this session takes chains only")
        room = session.room()
        prefix, more = self.text(session, 13), self.text(session, 5, seed=3)
        for name, parents in TREES.items():
            tokens = self.text(session, len(parents), seed=len(name))
            for path in [[], *tree_paths(parents)]:
                seq = session.open()
                session.extend([Feed(seq, prefix)])
                session.extend([Feed(seq, tokens, 1, parents)])
                session.keep(seq, 13, path)
                assert session.length(seq) == 13 + len(path)
                branch = session.fork(seq, 13 + len(path))
                text = prefix + [tokens[i] for i in path] + more
                for after in (seq, branch):
                    logits = session.extend([Feed(after, more, 5)]).logits
                    self.check(logits, fresh_rows(session, text, 5), tree=True)
                session.release(seq)
                session.release(branch)
        assert session.room() == room

    def test_a_path_of_a_chain_is_its_beginning(self, session: Session) -> None:
        tokens, more = self.text(session, 9), self.text(session, 3, seed=1)
        seq = session.open()
        session.extend([Feed(seq, tokens[:4])])
        session.extend([Feed(seq, tokens[4:], 2)])
        session.keep(seq, 4, [0, 1, 2])
        assert session.length(seq) == 7
        self.check(session.extend([Feed(seq, more, 3)]).logits, fresh_rows(session, tokens[:7] + more, 3))

    def test_a_tree_may_be_wider_than_the_context_has_positions_left(self, session: Session) -> None:
        if not session.can_branch or session.max_len > 4096:
            pytest.skip("chains only, or too long a context to fill here")
        tokens = self.text(session, session.max_len - 2)
        seq = session.open()
        session.extend([Feed(seq, tokens)])
        with pytest.raises(RequestError):
            session.extend([Feed(seq, [0, 1, 0], 1, [-1, 0, 1])])
        assert session.length(seq) == len(tokens)
        logits = session.extend([Feed(seq, [1, 0, 1, 2], 4, [-1, 0, 0, 0])]).logits
        self.check(logits[3:], fresh_rows(session, [*tokens, 1, 2], 1), tree=True)
        session.keep(seq, len(tokens), [0, 3])
        assert session.length(seq) == session.max_len


TREES = {
    "a chain": [-1, 0, 1, 2, 3],
    "two branches": [-1, 0, 1, 0, 3],
    "three roots, as a pass without a pending token": [-1, -1, -1, 0, 2, 4],
    "bushy, breadth first": [-1, 0, 0, 0, 1, 1, 2, 3, 4, 4, 6, 8],
    "depth first, late branches": [-1, 0, 1, 2, 3, 4, 2, 6, 1, 8, 0, 10, 11],
    "more rows than a page has slots": [-1, *range(20), *([3] * 20), *range(40, 59)],
}


def tree_paths(parents: Sequence[int]) -> list[list[int]]:
    """Return for each row of a tree the rows from the root to it."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), row])
    return paths
