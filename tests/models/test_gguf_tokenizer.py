"""Tokenizers out of GGUF files: pre-tokenisers by name, sentencepiece by scores, end tokens, the cache."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from forerun.errors import CorruptModelError, UnsupportedModelError
from forerun.models import gguf_file
from forerun.models.gguf_tokenizer import PRE_TOKENIZERS, load_gguf_tokenizer
from forerun.models.load import load_checkpoint
from forerun.models.tokenizer import Tokenizer
from tests.families import CHAT_TEMPLATE, NUM_TOKENS, tiny_tokenizer
from tests.models.test_tokenizer import TEXTS

Write = Callable[[gguf.GGUFWriter], None]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def header_only(path: Path, write: Write, arch: str = "llama") -> Path:
    """Write a GGUF file of metadata alone."""
    writer = gguf.GGUFWriter(path, arch)
    write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, write: Write, arch: str = "llama") -> Tokenizer:
    return load_gguf_tokenizer(gguf_file.read_file(header_only(path / "t.gguf", write, arch)), path / "cache")


def byte_level(pre: str | None, extra: Write = lambda writer: None) -> Write:
    """Write the bytes, three merges and the control tokens of a chat model."""

    def write(writer: gguf.GGUFWriter) -> None:
        alphabet = sorted(tiny_tokenizer().get_vocab(), key=lambda token: (len(token), token))[:256]
        tokens = [*alphabet, "th", "the", "\u0120the", "<s>", "</s>", "<|eot_id|>", "<user>"]
        kinds = [NORMAL] * 259 + [CONTROL] * 3 + [USER_DEFINED]
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(["t h", "th e", "\u0120 the"])
        writer.add_bos_token_id(259)
        writer.add_eos_token_id(260)
        extra(writer)

    return write


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The words that the pre-tokeniser makes, told by joining the bytes of each."""
    split = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in split]


SPLITS = {
    "gpt-2": ["I", "'ll", " pay", " 12345", ",", "ok", "  ", "\n\n", " DON", "'", "T", " x", "\u00b2\u00bd", "\n"],
    "smollm": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", ",", "ok", "  ", "\n\n", " DON", "'", "T", " x",
               "\u00b2", "\u00bd", "\n"],
    "llama-bpe": ["I", "'ll", " pay", " ", "123", "45", ",ok", "  \n\n", " DON", "'T", " x", "\u00b2\u00bd", "\n"],
    "qwen2": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", ",ok", "  \n\n", " DON", "'T", " x", "\u00b2",
              "\u00bd", "\n"],
    "tekken": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", ",ok", "  \n\n", " DON", "'T", " x", "\u00b2",
               "\u00bd", "\n"],
    "gpt-4o": ["I'll", " pay", " ", "123", "45", ",ok", "  \n\n", " DON'T", " x", "\u00b2\u00bd", "\n"],
}  # fmt: skip


@pytest.mark.parametrize("pre", SPLITS)
def test_pre_tokenisers_split_as_their_models_do(pre: str, tmp_path: Path) -> None:
    words = pieces(load(tmp_path, byte_level(pre)), "I'll pay 12345,ok  \n\n DON'T x\u00b2\u00bd\n")
    if pre in ("gpt-2", "smollm"):  # a run of spaces leaves its last one to the next word
        assert "".join(words) == "I'll pay 12345,ok  \n\n DON'T x\u00b2\u00bd\n"
        words = [word for word in words if word.strip()]
        assert words == [word for word in SPLITS[pre] if word.strip()]
    else:
        assert words == SPLITS[pre]


def test_tekken_splits_where_case_changes(tmp_path: Path) -> None:
    assert pieces(load(tmp_path, byte_level("tekken")), "camelCase HTMLPage") == ["camel", "Case", " HTMLPage"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokens_of_each_pre_tokeniser_spell_the_text(pre: str, text: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level(pre))
    wanted = "e\u0301".join(text.split("e\u0301")) if not PRE_TOKENIZERS[pre].nfc else text.replace("e\u0301", "é")
    assert tokenizer.decode(tokenizer.encode(text)) == wanted


@pytest.mark.parametrize("pre", ["default", "deepseek-llm", "no-such-thing", None])
def test_an_unknown_pre_tokeniser_is_refused_by_name(pre: str | None, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=repr(pre) if pre else "names no pre-tokeniser"):
        load(tmp_path, byte_level(pre))


def test_an_unknown_tokenizer_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        load(tmp_path, lambda writer: writer.add_tokenizer_model("bert"))


def test_merges_apply_within_words_and_added_tokens_before_all(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level("llama-bpe"))
    assert tokenizer.encode("the the<user>the<|eot_id|>") == [257, 258, 262, 257, 261]
    assert tokenizer.decode([257, 258, 262, 261]) == "the the<user>"
    assert tokenizer.special_ids == {259, 260, 261}


def test_bos_follows_the_file_and_else_the_pre_tokeniser(tmp_path: Path) -> None:
    assert load(tmp_path, byte_level("llama-bpe")).encode_prompt("the") == [259, 257]
    assert load(tmp_path, byte_level("qwen2")).encode_prompt("the") == [257]
    assert load(tmp_path, byte_level("llama-bpe", lambda w: w.add_add_bos_token(False))).encode_prompt("the") == [257]
    assert load(tmp_path, byte_level("qwen2", lambda w: w.add_add_bos_token(True))).encode_prompt("the") == [259, 257]


def test_end_tokens_are_eos_eot_and_those_of_the_template(tmp_path: Path) -> None:
    assert load(tmp_path, byte_level("gpt-2")).eos_ids == (260,)
    assert load(tmp_path, byte_level("gpt-2", lambda w: w.add_eot_token_id(261))).eos_ids == (260, 261)
    template = "{{ bos_token }}{{ messages[0]['content'] }}<|eot_id|>{{ eos_token }}"
    tokenizer = load(tmp_path, byte_level("gpt-2", lambda w: w.add_chat_template(template)))
    assert tokenizer.eos_ids == (260, 261)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<s>x<|eot_id|></s>"


def test_named_templates_are_kept(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = load(tmp_path, byte_level("gpt-2", lambda w: w.add_chat_template(templates)))
    assert tokenizer.apply_chat_template([]) == "D"
    assert tokenizer.apply_chat_template([], tools=[{}]) == "T"


@pytest.mark.parametrize("number", [263, 100000])
def test_a_token_id_that_is_no_token_is_refused(number: int, tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="eot_token_id"):
        load(tmp_path, byte_level("gpt-2", lambda writer: writer.add_eot_token_id(number)))


def test_a_merge_of_unknown_tokens_is_refused(tmp_path: Path) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a c"])

    with pytest.raises(CorruptModelError, match="no tokenizer"):
        load(tmp_path, write)


def test_the_tiny_tokenizer_survives_the_format(llama_gguf: Path, cache_dir: Path) -> None:
    tokenizer = load_checkpoint(str(llama_gguf), cache_dir=cache_dir).tokenizer
    assert tokenizer.vocab_size == NUM_TOKENS
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2,), False)
    for text in TEXTS:
        assert tokenizer.encode(text) == tiny_tokenizer().encode(text).ids


# Sentencepiece


@pytest.fixture(scope="module")
def sentencepiece_model() -> Any:
    """A trained sentencepiece model, the reference for what we build from its pieces and scores."""
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = ["the cat sat on the mat", "then the hat ran to another land", "über den Fluß", "a  b   c", "1 2 3 12 123"]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<user>", "\u2581\u2581"],
        split_digits=True,
        minloglevel=2,
        num_threads=1,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_writer(model: Any, *, add_space_prefix: bool = True, scored: bool = True) -> Write:
    def write(writer: gguf.GGUFWriter) -> None:
        ids = range(model.vocab_size())
        user_defined = ("<user>", "\u2581\u2581")
        kinds = [
            UNKNOWN if model.is_unknown(i) else CONTROL if model.is_control(i) else BYTE if model.is_byte(i)
            else USER_DEFINED if model.id_to_piece(i) in user_defined else NORMAL
            for i in ids
        ]  # fmt: skip
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([model.id_to_piece(i) for i in ids])
        if scored:
            writer.add_token_scores([model.get_score(i) for i in ids])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(add_space_prefix)

    return write


@pytest.mark.parametrize(
    "text", ["the cat sat", "another hat", "über", "日本 é 😀", "12 cats\nran", "x\ty", "thethe the"]
)
def test_merges_from_scores_give_the_pieces_of_sentencepiece(
    text: str, sentencepiece_model: Any, tmp_path: Path
) -> None:
    tokenizer = load(tmp_path, sentencepiece_writer(sentencepiece_model))
    assert tokenizer.encode(text) == sentencepiece_model.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == " " + text


def test_runs_of_spaces_are_found_as_user_defined_tokens(sentencepiece_model: Any, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_writer(sentencepiece_model, add_space_prefix=False))
    two = sentencepiece_model.piece_to_id("\u2581\u2581")
    assert two in tokenizer.encode("the  cat")
    assert tokenizer.decode(tokenizer.encode("the  cat<user>  mat")) == "the  cat<user>  mat"


def test_sentencepiece_models_begin_with_bos_unless_the_file_says_no(sentencepiece_model: Any, tmp_path: Path) -> None:
    write = sentencepiece_writer(sentencepiece_model)
    assert load(tmp_path, write).encode_prompt("the")[0] == 1

    def without(writer: gguf.GGUFWriter) -> None:
        write(writer)
        writer.add_add_bos_token(False)

    assert load(tmp_path, without).encode_prompt("the")[0] != 1


def test_phi3_drops_the_spaces_after_its_special_tokens(sentencepiece_model: Any, tmp_path: Path) -> None:
    write = sentencepiece_writer(sentencepiece_model)
    tokenizer = load(tmp_path, write, "phi3")
    assert tokenizer.encode("</s>\n the") == tokenizer.encode("</s>the")
    assert tokenizer.encode("<s>\n the") != tokenizer.encode("<s>the")


def test_a_sentencepiece_vocabulary_without_scores_is_refused(sentencepiece_model: Any, tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="scores"):
        load(tmp_path, sentencepiece_writer(sentencepiece_model, scored=False))


# The cache


def cache_entries(cache_dir: Path) -> list[Path]:
    return sorted((cache_dir / "tokenizers").iterdir())


def test_a_built_tokenizer_is_kept_once(llama_gguf: Path, cache_dir: Path) -> None:
    first = load_checkpoint(str(llama_gguf), cache_dir=cache_dir).tokenizer
    (entry,) = cache_entries(cache_dir)
    stamp = entry.stat().st_mtime_ns
    time.sleep(0.01)
    second = load_checkpoint(str(llama_gguf), cache_dir=cache_dir).tokenizer
    assert cache_entries(cache_dir) == [entry]
    assert entry.stat().st_mtime_ns == stamp
    assert first.same_vocabulary(second) is None
    assert first.encode("the cat\u00e9") == second.encode("the cat\u00e9")
    assert first.special_ids == second.special_ids
    assert first.token_bytes == second.token_bytes


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "other content"])
def test_a_damaged_cache_entry_is_built_again(damage: str, llama_gguf: Path, cache_dir: Path) -> None:
    load_checkpoint(str(llama_gguf), cache_dir=cache_dir)
    (entry,) = cache_entries(cache_dir)
    whole = entry.read_bytes()
    middle = len(whole) // 2
    entry.write_bytes(
        {
            "truncated": whole[:middle],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "emptied": b"",
            "other content": b"x\n{}",
        }[damage]
    )
    tokenizer = load_checkpoint(str(llama_gguf), cache_dir=cache_dir).tokenizer
    assert tokenizer.encode("the cat") == tiny_tokenizer().encode("the cat").ids
    assert cache_entries(cache_dir) == [entry]
    assert entry.read_bytes() == whole


def test_a_cache_that_cannot_be_written_only_costs_time(llama_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert load_checkpoint(str(llama_gguf), cache_dir=tmp_path / "cache").tokenizer.vocab_size == NUM_TOKENS


def test_files_with_other_vocabularies_have_other_entries(tmp_path: Path) -> None:
    load(tmp_path, byte_level("gpt-2"))
    load(tmp_path, byte_level("qwen2"))
    assert len(cache_entries(tmp_path / "cache")) == 2


def test_tokens_that_only_pad_the_list_are_dropped(tmp_path: Path) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "<unused0>", "b", "ab", "[PAD4]", "[PAD5]"])
        writer.add_token_types([NORMAL, UNUSED, NORMAL, NORMAL, UNUSED, UNUSED])
        writer.add_token_merges(["a b"])

    tokenizer = load(tmp_path, write)
    assert tokenizer.vocab_size == 4
    assert tokenizer.token_bytes == [b"a", b"", b"b", b"ab"]
