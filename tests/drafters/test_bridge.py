"""A draft model with another tokenizer: its law over the shared tokens, its own reading of the text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from forerun.backends.base import Feed
from forerun.backends.toy import ToySession
from forerun.drafters.base import Chosen, Drawn, View
from forerun.drafters.bridge import BridgeSession, Translation
from forerun.drafters.lm import LMDrafter
from forerun.errors import OptionError
from forerun.models.tokenizer import Tokenizer, TokenizerSettings
from forerun.sampling.laws import Sampler
from forerun.types import SamplingParams
from tests.models.test_tokenizer import sentencepiece_backend

ALL_BYTES = sorted(ByteLevel.alphabet())


def byte_level(
    merges: list[str], *, seed: int | None = None, specials: tuple[str, ...] = ("<eos>",), bos: bool = False,
    base: list[str] = ALL_BYTES,
) -> Tokenizer:  # fmt: skip
    """A tokenizer over bytes with merges such as "th e", its ids shuffled by `seed`, special tokens last."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokens = [*base, *("".join(pair) for pair in pairs)]
    if seed is not None:
        tokens = [str(token) for token in np.random.default_rng(seed).permutation(tokens)]
    backend = Backend(BPE({token: i for i, token in enumerate(tokens)}, pairs))  # type: ignore[arg-type]
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(name, special=True) for name in specials])
    eos_id = backend.token_to_id(specials[0])
    return Tokenizer(backend, TokenizerSettings(eos_id if bos else None, (eos_id,), bos))


WORDS = ["t h", "th e", "Ġ a", "Ġ th", "Ġth e", "i n", "in g", "Ã ©", "a n", "an d"]
TARGET = byte_level(WORDS, specials=("<eos>", "<|user|>", "<|only|>"))
SHUFFLED = byte_level(WORDS, seed=1, specials=("</s>", "<|user|>"))
OTHER = byte_level(
    ["h e", "t he", "Ġ the", "i n", "n d", "a nd", "Ã ©"], seed=2, specials=("</s>", "<|user|>"), bos=True
)


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[bytes]:
    return [tokenizer.spelling(i).encode() if i in tokenizer.special_ids else tokenizer.token_bytes[i] for i in ids]


def test_a_text_is_read_as_the_draft_models_tokenizer_would_read_it() -> None:
    read = Translation(TARGET, OTHER)(TARGET.encode("the band and the thing"))
    assert read == [OTHER.bos_id, *OTHER.encode("the band and the thing")]
    assert spelled(OTHER, read)[1:3] == [b"the", b" "]


def test_special_tokens_are_matched_by_name_then_by_role_and_else_spelled_out() -> None:
    user, only, eos = (TARGET.encode(name)[0] for name in ("<|user|>", "<|only|>", "<eos>"))
    read = Translation(TARGET, OTHER)([user, *TARGET.encode("the"), only, eos])
    assert spelled(OTHER, read)[1:] == [b"<|user|>", b"the", *(bytes([c]) for c in b"<|only|>"), b"</s>"]
    translation = Translation(TARGET, OTHER)
    pairs = dict(zip(translation.target_ids.tolist(), translation.draft_ids.tolist(), strict=True))
    assert pairs[user] == OTHER.encode("<|user|>")[0]
    assert pairs[eos] == OTHER.eos_ids[0]
    assert only not in pairs


def test_the_bos_of_the_text_is_not_doubled() -> None:
    start = byte_level(WORDS, specials=("<s>",), bos=True)
    read = Translation(start, OTHER)([start.bos_id or 0, *start.encode("in")])
    assert spelled(OTHER, read) == [b"</s>", b"in"]


def test_half_a_character_is_read_byte_by_byte_and_a_broken_one_replaced() -> None:
    text = "caf\u00e9".encode()
    ids = [TARGET.token_bytes.index(bytes([byte])) for byte in text]
    translation = Translation(TARGET, OTHER)
    assert spelled(OTHER, translation(ids[:-1]))[-1] == b"\xc3"
    assert spelled(OTHER, translation(ids))[-1] == "\u00e9".encode()
    assert OTHER.decode(translation([*ids[:-1], *TARGET.encode("x")])[1:]) == "caf\ufffdx"
    assert OTHER.decode(translation([*ids[-1:], *TARGET.encode("x")])[1:]) == "\ufffdx"
    without_bytes = byte_level([], base=[c for c in ALL_BYTES if ord(c) < 128])
    assert spelled(without_bytes, Translation(TARGET, without_bytes)(ids[:-1])) == [b"c", b"a", b"f"]


def test_bytes_of_sentencepiece_and_of_byte_level_vocabularies_are_the_same_tokens() -> None:
    pieces = Tokenizer(sentencepiece_backend(), TokenizerSettings())
    for target, draft in ((TARGET, pieces), (pieces, TARGET)):
        translation = Translation(target, draft)
        pairs = list(zip(translation.target_ids.tolist(), translation.draft_ids.tolist(), strict=True))
        for mine, yours in pairs:
            assert target.token_bytes[mine] == draft.token_bytes[yours]
        assert len({mine for mine, _ in pairs}) == len({yours for _, yours in pairs}) == len(pairs)
        shared = {target.token_bytes[mine] for mine, _ in pairs}
        assert b"\n" in shared
        assert len(pairs) >= 100


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(alphabet="the and\n\u00e9\u4e2d<|user|>", min_size=1, max_size=40))
def test_lines_read_one_by_one_are_the_text_read_whole(text: str) -> None:
    ids = TARGET.encode(text)
    read = Translation(TARGET, SHUFFLED)(ids)
    assert SHUFFLED.decode([i for i in read if i not in SHUFFLED.special_ids]) == TARGET.decode(ids)
    if TARGET.special_ids.isdisjoint(ids):
        assert read == SHUFFLED.encode(text)


def table(tokenizer: Tokenizer, seed: int = 3) -> np.ndarray:
    size = tokenizer.vocab_size
    return np.random.default_rng(seed).normal(scale=2.0, size=(size, size)).astype(np.float32)


def ask(drafter: LMDrafter, text: list[int], **params: object) -> Drawn | Chosen:
    sampler = Sampler(SamplingParams(**params), text[:1], (0,), seed=5)  # type: ignore[arg-type]
    sampler.advance(text[1:])
    (proposal,) = drafter.propose([View(0, text, sampler, "block")], [5])
    assert isinstance(proposal, Drawn | Chosen)
    return proposal


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3}]
)
def test_with_shuffled_ids_a_model_drafts_what_it_drafts_with_the_targets(params: dict[str, float]) -> None:
    """The same model, its rows and columns in another order: every token is shared, so q is the same."""
    target = byte_level(WORDS)
    draft = byte_level(WORDS, seed=7)
    logits = table(target)
    place = [
        draft.encode("<eos>")[0] if i == target.eos_ids[0] else draft._tokens.index(token)
        for i, token in enumerate(target._tokens)
    ]
    shuffled = np.empty_like(logits)
    shuffled[np.ix_(place, place)] = logits
    bridge = BridgeSession(ToySession(shuffled), Translation(target, draft), target.vocab_size)
    assert bridge.num_shared == target.vocab_size
    text = target.encode("the thing and the")
    straight = ask(LMDrafter(ToySession(logits), vocab_size=target.vocab_size), text, **params)
    # drafts of its own may be read as longer tokens later, so only the first row must be the same whatever is drawn
    over = ask(LMDrafter(bridge, vocab_size=target.vocab_size), text, **params)
    assert over.tokens[0] == straight.tokens[0]
    if isinstance(straight, Drawn) and isinstance(over, Drawn):
        np.testing.assert_allclose(over.q_KV[0], straight.q_KV[0], rtol=1e-5, atol=1e-7)
        for row in over.q_KV:
            assert row.sum() == pytest.approx(1.0, abs=1e-5)


def test_tokens_that_are_not_shared_have_no_mass() -> None:
    draft = OTHER
    translation = Translation(TARGET, draft)
    bridge = BridgeSession(ToySession(table(draft)), translation, TARGET.vocab_size)
    assert 256 < bridge.num_shared < TARGET.vocab_size
    proposal = ask(LMDrafter(bridge, vocab_size=TARGET.vocab_size), TARGET.encode("the"), temperature=1.0)
    assert isinstance(proposal, Drawn)
    shared = set(translation.target_ids.tolist())
    others = [token for token in range(TARGET.vocab_size) if token not in shared]
    assert others
    assert (np.asarray(proposal.q_KV)[:, others] == 0).all()
    assert set(proposal.tokens) <= shared


def test_each_row_is_that_of_its_text_whatever_was_read_before() -> None:
    """Many sequences in a pass, rows before the last, texts cut back and forked, against a session for each text."""
    translation, logits = Translation(TARGET, OTHER), table(OTHER)

    def alone(text: list[int]) -> np.ndarray:
        ids = translation(text)
        session = ToySession(logits)
        return np.asarray(session.extend([Feed(session.open(), ids, 1)]).logits)[0][translation.draft_ids]

    bridge = BridgeSession(ToySession(logits), translation, TARGET.vocab_size)
    texts = [TARGET.encode(text) for text in ("the band", "caf\u00e9 and the t", "<|user|>in the")]
    seqs = [bridge.open() for _ in texts]
    scores = bridge.extend([Feed(seq, text, n) for seq, text, n in zip(seqs, texts, (1, 3, 0), strict=True)])
    expected = [alone(texts[0]), *(alone(texts[1][: len(texts[1]) - back]) for back in (2, 1, 0))]
    np.testing.assert_array_equal(scores.logits[:, translation.target_ids], np.stack(expected))
    bridge.keep(seqs[1], 3)
    child = bridge.fork(seqs[1], 2)
    more = TARGET.encode("ing the")
    scores = bridge.extend([Feed(seqs[2], more, 1), Feed(child, more, 1), Feed(seqs[1], more, 2)])
    expected = [
        alone([*texts[2], *more]), alone([*texts[1][:2], *more]), alone([*texts[1][:3], *more[:-1]]),
        alone([*texts[1][:3], *more]),
    ]  # fmt: skip
    np.testing.assert_array_equal(scores.logits[:, translation.target_ids], np.stack(expected))
    assert [bridge.length(seq) for seq in (*seqs, child)] == [
        8 if False else len(texts[0]),
        3 + len(more),
        len(texts[2]) + len(more),
        2 + len(more),
    ]
    for seq in (*seqs, child):
        bridge.release(seq)
    assert bridge.model.room() == ToySession(logits).room()


def test_a_text_that_outgrows_the_draft_models_context_is_read_from_later_on() -> None:
    logits = table(OTHER)
    bridge = BridgeSession(ToySession(logits, max_len=16), Translation(TARGET, OTHER), TARGET.vocab_size)
    drafter = LMDrafter(bridge, vocab_size=TARGET.vocab_size)
    text = TARGET.encode("the band and the thing in the band and the thing")
    assert len(text) > 20
    for end in range(1, len(text)):
        assert ask(drafter, text[:end], temperature=1.0).tokens


def test_models_without_a_common_token_are_refused() -> None:
    target = byte_level([], base=["a", "b"], specials=("<eos>",))
    draft = byte_level([], base=["c", "d"], specials=("<eos>",))
    translation = Translation(target, draft)
    assert translation.target_ids.tolist() == [2]  # the end
    with pytest.raises(OptionError, match="no token in common"):
        BridgeSession(ToySession.random(2, order=1), translation, 2)
