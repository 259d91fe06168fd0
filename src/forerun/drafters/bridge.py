"""A draft model with another tokenizer, as a session that speaks the target's.

Its law is taken over the tokens that both vocabularies have and nothing else (token-level intersection, Timor et al.
2502.05202): their logits are put in the places of the target's ids, all others get none. What is drafted is drawn from
exactly that law, so verification stays exact. The context reaches the model as text: it reads what its own tokenizer
makes of it, so that its law is a function of the text alone.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import array_api_compat
import numpy as np

from forerun.backends.base import Feed, Scores, Session
from forerun.errors import OptionError
from forerun.models.tokenizer import Tokenizer
from forerun.sampling.arrays import Array, like, namespace, on_host

_NEVER = -1e30  # a logit of no mass; finite, so that 0 · log 0 is 0
_LINES_KEPT = 4096
_MOST_TOKENS_FOR_ONE = 4  # of the draft model, as a rule, for one token of the target


class Translation:
    """From the target's ids to the draft model's, and which ids are the same token."""

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target, self._draft = target, draft
        self._bytes = target.token_bytes
        self._specials = _same_specials(target, draft)
        self._byte_ids = {data: token for token, data in enumerate(draft.token_bytes) if len(data) == 1}
        self._adds_space = any(draft.token_bytes[token].startswith(b" ") for token in draft.encode("a")[:1])
        self._encode_line = lru_cache(_LINES_KEPT)(self._encoded)
        target_ids, draft_ids = list[int](), list[int]()
        own = _spellings(draft)
        for data, token in _spellings(target).items():
            if data in own:
                target_ids.append(token)
                draft_ids.append(own[data])
        target_ids += self._specials
        draft_ids += self._specials.values()
        self.target_ids = np.asarray(target_ids, np.int64)  # one token with its two names
        self.draft_ids = np.asarray(draft_ids, np.int64)

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft model's ids of a text in the target's: what its own tokenizer makes of it.

        Special tokens become those of the same name or role, or are spelled out. A character that isn't whole at the
        end of the text is given byte by byte where the tokenizer has bytes. Lines are encoded one by one.
        """
        bos, specials, bytes_of = self._draft.bos_id, self._target.special_ids, self._bytes.__getitem__
        ids = [bos] if self._draft.add_bos and bos is not None else []
        text, start = b"", 0
        for place in [i for i, token in enumerate(tokens) if token in specials]:
            text += b"".join(map(bytes_of, tokens[start:place]))
            start = place + 1
            same = self._specials.get(tokens[place])
            if same is None:
                text += self._target.spelling(tokens[place]).encode()
                continue
            ids += self._ids_of(text)
            text = b""
            if not (same == bos and ids == [bos]):
                ids.append(same)
        ids += self._ids_of(text + b"".join(map(bytes_of, tokens[start:])))
        return ids or [bos or 0]

    def _ids_of(self, text: bytes) -> Iterator[int]:
        if not text:
            return
        whole = len(text) - _unfinished(text)
        lines = [text[:whole]] if self._adds_space else _lines(text[:whole])
        for line in lines:
            yield from self._encode_line(line)
        for byte in text[whole:]:
            token = self._byte_ids.get(bytes([byte]))
            if token is not None:
                yield token

    def _encoded(self, line: bytes) -> tuple[int, ...]:
        return tuple(self._draft.encode(line.decode("utf-8", errors="replace")))


def _spellings(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Return the token of each string of bytes; of several the one that the tokenizer itself would take, if any."""
    found: dict[bytes, int] = {}
    for token, data in enumerate(tokenizer.token_bytes):
        if not data or token in tokenizer.special_ids:
            continue
        if data in found:
            with_text = tokenizer.encode(data.decode("utf-8", errors="replace"))
            if with_text != [token]:
                continue
        found[data] = token
    return found


def _same_specials(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Return the special tokens that the two share: by name, else by what they are for."""
    named = {draft.spelling(token): token for token in draft.special_ids}
    same = {
        token: named[target.spelling(token)] for token in sorted(target.special_ids) if target.spelling(token) in named
    }
    roles = [(target.bos_id, draft.bos_id), *zip(target.eos_ids[:1], draft.eos_ids[:1], strict=False)]
    for mine, yours in roles:
        if mine is not None and yours is not None and mine not in same and yours not in same.values():
            same[mine] = yours
    return same


def _unfinished(text: bytes) -> int:
    """Return how many bytes at the end begin a character of UTF-8 that isn't whole."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if length > back else 0
        if byte < 0x80:
            break
    return 0


def _lines(text: bytes) -> Iterator[bytes]:
    """Cut a text before each line that begins with something else than space: no tokenizer joins across it."""
    start = 0
    at = text.find(b"\n")
    while at >= 0:
        if at + 1 < len(text) and not text[at + 1 : at + 2].isspace():
            yield text[start : at + 1]
            start = at + 1
        at = text.find(b"\n", at + 1)
    if start < len(text):
        yield text[start:]


class BridgeSession:
    """A draft model's session in the target's ids: a `Session` of chains whose rows are those of the text so far.

    A text that outgrows the model's context is read from a later place on.
    """

    can_branch = False

    def __init__(self, model: Session, translation: Translation, vocab_size: int) -> None:
        """`vocab_size`: the target's V. Raises OptionError if the two have no token in common."""
        self.model = model
        self.vocab_size = vocab_size
        self.max_len = 1 << 30
        self.num_layers = model.num_layers
        exist = (translation.target_ids < vocab_size) & (translation.draft_ids < model.vocab_size)
        if not exist.any():
            raise OptionError("the draft model and the target have no token in common; take another draft model")
        self._target_ids, self._draft_ids = translation.target_ids[exist], translation.draft_ids[exist]
        self._translation = translation
        self._texts: dict[int, list[int]] = {}  # in the target's ids
        self._read: dict[int, list[int]] = {}  # what the model has cached, in its own

    @property
    def num_shared(self) -> int:
        """How many tokens can be drafted."""
        return len(self._target_ids)

    def open(self) -> int:
        seq = self.model.open()
        self._texts[seq], self._read[seq] = [], []
        return seq

    def length(self, seq: int) -> int:
        return len(self._texts[seq])

    def extend(self, feeds: Sequence[Feed], *, taps: Sequence[int] = ()) -> Scores:
        """One pass for the last rows of all feeds, and one more for each row before it that is wanted."""
        assert not taps
        most = max((feed.num_logits for feed in feeds), default=0)
        rows: dict[tuple[int, int], Any] = {}
        for back in range(max(most, 1) - 1, -1, -1):
            passing = [feed for feed in feeds if back < max(feed.num_logits, 1)]
            own = []
            for feed in passing:
                assert feed.parents is None
                end = len(feed.tokens) - back
                own.append(self._feed(feed.seq, [*self._texts[feed.seq], *feed.tokens[:end]], feed.num_logits > 0))
            own_RV = on_host(self.model.extend(own).logits)
            shared_RM = own_RV[:, like(self._draft_ids, own_RV)]
            for i, feed in enumerate(feed for feed in passing if feed.num_logits):
                rows[feed.seq, back] = shared_RM[i]
        for feed in feeds:
            self._texts[feed.seq] += feed.tokens
        ordered = [rows[feed.seq, back] for feed in feeds for back in range(feed.num_logits - 1, -1, -1)]
        return Scores(self._spread(ordered))

    def _feed(self, seq: int, text: Sequence[int], wanted: bool) -> Feed:
        """Return what the model must read, so that its cache is that of `text`; at least one token."""
        ids = self._translation(text)
        read, limit = self._read[seq], self.model.max_len
        if len(ids) > limit:  # steps, so that what is read stays so for a while
            step = max(1, limit // 4)
            ids = ids[-(-(len(ids) - limit) // step) * step :]
        same = next((i for i, (a, b) in enumerate(zip(ids, read, strict=False)) if a != b), min(len(ids), len(read)))
        same = min(same, len(ids) - 1)
        if same < len(read):
            self.model.keep(seq, same)
        self._read[seq] = ids
        return Feed(seq, ids[same:], int(wanted))

    def _spread(self, rows: Sequence[Array]) -> Array:
        """Put the logits of shared tokens in the places of the target's ids: (R, V)."""
        if not rows:
            return np.empty((0, self.vocab_size), np.float32)
        xp = namespace(rows[0])
        shared_RM = xp.stack(list(rows))
        logits_RV = xp.full(
            (len(rows), self.vocab_size), _NEVER, dtype=shared_RM.dtype, device=array_api_compat.device(shared_RM)
        )
        logits_RV[:, like(self._target_ids, shared_RM)] = shared_RM
        return logits_RV

    def keep(self, seq: int, length: int, path: Sequence[int] = ()) -> None:
        """The model's own cache is cut back when it reads on."""
        assert not path
        assert 0 <= length <= len(self._texts[seq])
        del self._texts[seq][length:]

    def fork(self, seq: int, length: int) -> int:
        child = self.model.fork(seq, len(self._read[seq]))
        self._texts[child], self._read[child] = self._texts[seq][:length], list(self._read[seq])
        return child

    def release(self, seq: int) -> None:
        self.model.release(seq)
        del self._texts[seq], self._read[seq]

    def subset(self, layers: Sequence[int]) -> "BridgeSession":
        return BridgeSession(self.model.subset(layers), self._translation, self.vocab_size)

    def room(self) -> int:
        return self.model.room() // _MOST_TOKENS_FOR_ONE
