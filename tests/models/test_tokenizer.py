"""Tokenizers of folders: ids, bytes, end tokens, BOS, chat templates."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from forerun.errors import CorruptModelError, ModelError, RequestError, UnsupportedModelError
from forerun.models.tokenizer import Tokenizer, TokenizerSettings, load_hf_tokenizer
from tests.families import CHAT_TEMPLATE, NUM_TOKENS, save_tokenizer, tiny_tokenizer

TEXTS = [
    "",
    "the cat sat on the mat",
    "  two  spaces, a\ttab\r\n\n and lines ",
    "Der Fluß fließt über Ärger.",
    "日本語のテキスト、한국어, العربية, हिन्दी",
    "😀👨‍👩‍👧‍👦🏳️‍🌈 e\u0301 é",
    "def f(x):\n\treturn x ** 2  # 1234567.89",
    "\x00\x7f\ufffd\u2581 underline \u2581",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    write(folder, name, {**(json.loads(path.read_text()) if path.exists() else {}), **changes})


def sentencepiece_backend() -> Backend:
    """A vocabulary as Llama 2's: spaces as U+2581, unknown characters as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "c", "\u2581a"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokens_spell_the_text(text: str, folder: Path) -> None:
    tokenizer = load_hf_tokenizer(folder, {})
    ids = tokenizer.encode(text)
    assert ids == tiny_tokenizer().encode(text).ids
    assert b"".join(tokenizer.token_bytes[token_id] for token_id in ids) == text.encode()
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_tokens_spell_the_text_after_a_space(text: str) -> None:
    tokenizer = Tokenizer(sentencepiece_backend(), TokenizerSettings())
    spelled = tokenizer.decode(tokenizer.encode(text))
    assert spelled == (" " + text if text else "").replace("\u2581", " ")


def test_special_tokens_add_no_bytes_and_other_added_tokens_add_their_text() -> None:
    tokenizer = Tokenizer(sentencepiece_backend(), TokenizerSettings())
    table = tokenizer.token_bytes
    assert [table[token_id] for token_id in sorted(tokenizer.special_ids)] == [b"", b"", b""]
    assert table[-1] == b"<think>"
    assert table[3:6] == [b"\x00", b"\x01", b"\x02"]
    assert len(table) == tokenizer.vocab_size


def test_every_byte_has_its_token(folder: Path) -> None:
    table = load_hf_tokenizer(folder, {}).token_bytes
    assert {piece for piece in table if len(piece) == 1} == {bytes([byte]) for byte in range(256)}


def test_half_a_character_is_decoded_as_a_replacement(folder: Path) -> None:
    tokenizer = load_hf_tokenizer(folder, {})
    ids = tokenizer.encode("é")
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_half_a_surrogate_pair_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        load_hf_tokenizer(folder, {}).encode("a\ud83d")


def test_vocabulary_counts_added_tokens_and_not_the_padding_of_the_net(folder: Path) -> None:
    assert load_hf_tokenizer(folder, {}).vocab_size == NUM_TOKENS


def test_end_tokens_are_gathered_from_all_files(folder: Path) -> None:
    assert load_hf_tokenizer(folder, {}).eos_ids == (2,)
    write(folder, "generation_config.json", {"eos_token_id": [5, 2]})
    assert load_hf_tokenizer(folder, {"eos_token_id": 7}).eos_ids == (5, 2, 7)
    edit(folder, "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert load_hf_tokenizer(folder, {"eos_token_id": None}).eos_ids == (5, 2, 0)


def test_tokens_that_only_the_config_lists_are_added(folder: Path) -> None:
    extra = {str(NUM_TOKENS): {"content": "<extra>", "special": True}, "0": {"content": "<|endoftext|>"}}
    edit(folder, "tokenizer_config.json", added_tokens_decoder=extra)
    tokenizer = load_hf_tokenizer(folder, {})
    assert tokenizer.encode("<extra>") == [NUM_TOKENS]
    assert NUM_TOKENS in tokenizer.special_ids


def test_bos_is_added_once_where_the_config_asks_for_it(folder: Path) -> None:
    plain = load_hf_tokenizer(folder, {})
    assert not plain.add_bos
    assert plain.encode_prompt("the cat") == plain.encode("the cat")
    edit(folder, "tokenizer_config.json", add_bos_token=True)
    tokenizer = load_hf_tokenizer(folder, {})
    assert tokenizer.encode("the cat") == plain.encode("the cat")
    assert tokenizer.encode_prompt("the cat") == [1, *plain.encode("the cat")]
    assert tokenizer.encode_prompt("<|im_start|>the cat") == [1, *plain.encode("the cat")]
    assert tokenizer.encode_prompt("") == [1]


def test_bos_is_added_where_the_post_processor_adds_it(folder: Path) -> None:
    backend = tiny_tokenizer()
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    assert load_hf_tokenizer(folder, {}).encode_prompt("the") == [1, *tiny_tokenizer().encode("the").ids]


def test_vocabularies_are_compared_token_by_token(folder: Path, tmp_path: Path) -> None:
    tokenizer, same = load_hf_tokenizer(folder, {}), load_hf_tokenizer(folder, {})
    assert tokenizer.same_vocabulary(same) is None
    other = tiny_tokenizer()
    other.add_tokens(["<more>"])
    longer = Tokenizer(other, TokenizerSettings())
    assert tokenizer.same_vocabulary(longer) == f"one vocabulary has {NUM_TOKENS} tokens, the other {NUM_TOKENS + 1}"
    difference = tokenizer.same_vocabulary(Tokenizer(sentencepiece_backend(), TokenizerSettings()))
    assert difference is not None
    assert "token 0 is '<|endoftext|>'" in difference


@pytest.mark.parametrize(
    ("content", "error", "named"),
    [
        ("{", CorruptModelError, "no tokenizer"),
        ("[]", CorruptModelError, "no tokenizer"),
        (Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")).to_str(), UnsupportedModelError, "WordPiece"),
        (Backend(models.BPE({"a": 0}, [], end_of_word_suffix="</w>")).to_str(), UnsupportedModelError, "affixes"),
    ],
)
def test_a_tokenizer_that_we_cannot_run_is_refused(
    content: str, error: type[Exception], named: str, folder: Path
) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(error, match=named):
        load_hf_tokenizer(folder, {})


def test_a_folder_with_only_a_sentencepiece_model_is_refused_with_advice(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ModelError, match="save_pretrained"):
        load_hf_tokenizer(folder, {})


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[1]", '"x"'])
def test_a_damaged_side_file_is_named(name: str, content: str, folder: Path) -> None:
    (folder / name).write_text(content)
    with pytest.raises(CorruptModelError, match=name):
        load_hf_tokenizer(folder, {})


# Chat templates

MESSAGES = [{"role": "user", "content": "hi <b>&</b>"}, {"role": "assistant", "content": "the cat"}]


def templated(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return load_hf_tokenizer(folder, {})


def test_chats_are_rendered_with_and_without_the_start_of_an_answer(folder: Path) -> None:
    tokenizer = load_hf_tokenizer(folder, {})
    assert tokenizer.chat_template == CHAT_TEMPLATE
    text = "<|im_start|>user\nhi <b>&</b><|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == text
    assert tokenizer.apply_chat_template(MESSAGES) == text + "<|im_start|>assistant\n"
    assert tokenizer.encode_chat(MESSAGES) == tokenizer.encode(text + "<|im_start|>assistant\n")


def test_a_chat_has_the_bos_of_its_template_alone(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", add_bos_token=True)
    tokenizer = templated(folder, "{{ bos_token }}{{ messages[0]['content'] }}")
    assert tokenizer.encode_chat([{"role": "user", "content": "the"}]) == [1, *tokenizer.encode("the")]


FEATURES = """
{%- for message in messages %}
    {%- if loop.index0 == 1 %}
        {%- break %}
    {%- endif %}
    {%- generation %}
{{ message | tojson }}
    {%- endgeneration %}
{%- endfor %}
{{ tools | tojson(indent=2) }}|{{ extra }}|{{ eos_token }}|{{ documents }}|{{ undefined_name }}
"""


def test_templates_may_use_what_transformers_offers(folder: Path) -> None:
    tokenizer = templated(folder, FEATURES)
    tools = [{"type": "function", "function": {"name": "f", "description": "é < ü"}}]
    ours = tokenizer.apply_chat_template(MESSAGES, tools=tools, extra="more")
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        MESSAGES, tools=tools, extra="more", tokenize=False, add_generation_prompt=True
    )
    assert ours == theirs
    assert "hi <b>&</b>" in ours
    assert "é < ü" in ours


def test_templates_know_the_date(folder: Path) -> None:
    tokenizer = templated(folder, "{{ strftime_now('%Y') }}")
    assert int(tokenizer.apply_chat_template(MESSAGES)) >= 2024


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "fails on these messages"),
        ("{{ messages[9]['content']['x'] }}", "chat template"),
        ("{% if %}", "chat template"),
        ("{{ ''.__class__.__mro__ }}", "chat template"),
        ("{{ messages.append(1) }}", "chat template"),
    ],
)
def test_a_template_that_fails_is_a_mistake_of_the_request(template: str, named: str, folder: Path) -> None:
    with pytest.raises(RequestError, match=named):
        templated(folder, template).apply_chat_template(MESSAGES)


def test_a_model_without_template_says_so(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", chat_template=None)
    tokenizer = load_hf_tokenizer(folder, {})
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.encode_chat(MESSAGES)


def test_templates_are_found_in_each_place(folder: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    edit(folder, "tokenizer_config.json", chat_template=named)
    tokenizer = load_hf_tokenizer(folder, {})
    assert tokenizer.apply_chat_template(MESSAGES) == "D"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}]) == "T"
    edit(folder, "tokenizer_config.json", chat_template=None)
    write(folder, "chat_template.json", {"chat_template": "J"})
    assert load_hf_tokenizer(folder, {}).chat_template == "J"
    (folder / "chat_template.jinja").write_text("F")
    assert load_hf_tokenizer(folder, {}).chat_template == "F"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("A")
    assert load_hf_tokenizer(folder, {}).apply_chat_template(MESSAGES, tools=[{}]) == "A"
    shutil.rmtree(folder / "additional_chat_templates")


def test_a_pre_tokenizer_alone_tells_byte_level_vocabularies() -> None:
    backend = tiny_tokenizer()
    backend.decoder = decoders.Fuse()
    steps = [pre_tokenizers.Split(Regex(r"\s+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer = Tokenizer(backend, TokenizerSettings())
    assert tokenizer.decode(tokenizer.encode("a é b")) == "a é b"
