"""Text to token ids and back, chat templates, end tokens: one `Tokenizer` whatever file it came from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun.errors import CorruptModelError, ModelError, RequestError, UnsupportedModelError
from forerun.models.chat_template import Message, render

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class TokenizerSettings(NamedTuple):
    """What a tokenizer knows beyond its vocabulary."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # every token that ends a text or a turn
    add_bos: bool = False  # the model was trained on texts that begin with BOS
    chat_templates: Mapping[str, str] = {}  # "default", perhaps "tool_use"
    named_tokens: Mapping[str, str] = {}  # bos_token, eos_token, … for templates


class Tokenizer:
    """The tokenizer of a model; immutable."""

    def __init__(self, backend: "Backend", settings: TokenizerSettings) -> None:
        self._backend = backend
        self._settings = settings
        self.bos_id = settings.bos_id
        self.eos_ids = settings.eos_ids
        self.add_bos = settings.add_bos and settings.bos_id is not None
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _tokens(self) -> list[str | None]:
        """The token of each id as the vocabulary spells it; None for an id without a token."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            tokens[token_id] = token
        return tokens

    def spelling(self, token_id: int) -> str:
        """Return how an added token is written, special ones too."""
        return self._added[token_id]

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included."""
        return len(self._tokens)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, in jinja2."""
        return self._settings.chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`, with BOS in front if `add_special_tokens` and the model wants one.

        Raises RequestError for text that is no Unicode.
        """
        try:
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        except TypeError as error:  # what the library makes of half a surrogate pair
            raise RequestError("the text is not valid Unicode: it has half a surrogate pair") from error
        return self._with_bos(ids) if add_special_tokens else ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a plain prompt: with BOS if the model wants one, never twice."""
        return self.encode(text, add_special_tokens=True)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self.add_bos or ids[:1] == [self.bos_id]:
            return ids
        assert self.bos_id is not None
        return [self.bos_id, *ids]

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt of a conversation; `kwargs` are further names that the template may use.

        Raises RequestError if there is no template or it refuses the messages.
        """
        templates = self._settings.chat_templates
        template = templates.get("tool_use") if tools else None
        template = template or templates.get("default")
        if template is None:
            raise RequestError("the model has no chat template: give a plain prompt instead of messages (--raw)")
        variables = {
            **self._settings.named_tokens,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **kwargs,
        }
        return render(template, messages, variables)

    def encode_chat(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """Return the ids of a conversation. The template places BOS; none is added."""
        return self.encode(self.apply_chat_template(messages, **kwargs))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """By id, the bytes that a token adds to running text; b"" for special tokens and ids without a token."""
        convert = _byte_level_bytes if self._is_byte_level else _sentencepiece_bytes
        table = [b"" if token is None else convert(token) for token in self._tokens]
        for token_id, content in self._added.items():
            text = content if self._is_byte_level else content.replace("\u2581", " ")
            table[token_id] = b"" if token_id in self.special_ids else text.encode()
        return table

    @cached_property
    def _is_byte_level(self) -> bool:
        parts = (self._backend.decoder, self._backend.pre_tokenizer)
        return any(part is not None and b'"ByteLevel"' in part.__getstate__() for part in parts)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        table = self.token_bytes
        return b"".join(table[token_id] for token_id in ids).decode("utf-8", errors="replace")

    @cached_property
    def fingerprint(self) -> str:
        """A name of the vocabulary: two tokenizers that give each token the same id have the same."""
        tokens = "\n".join(str(token) for token in self._tokens)
        return hashlib.sha256(tokens.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def same_vocabulary(self, other: "Tokenizer") -> str | None:
        """Return None if both give each token the same id, else a sentence that says how they differ."""
        ours, theirs = self._tokens, other._tokens
        for token_id, (mine, yours) in enumerate(zip(ours, theirs, strict=False)):
            if mine != yours:
                return f"token {token_id} is {mine!r} in one vocabulary and {yours!r} in the other"
        if len(ours) != len(theirs):
            return f"one vocabulary has {len(ours)} tokens, the other {len(theirs)}"
        return None


def _byte_table() -> dict[int, int]:
    """Return the map from the printable characters of byte-level BPE to the bytes that they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}


_BYTES = _byte_table()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # a token that is not spelled in bytes
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`, {} if there is no such file. Raises CorruptModelError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"{path} is not valid JSON; fetch the file again") from error
    if not isinstance(value, dict):
        raise CorruptModelError(f"{path} holds no JSON object; fetch the file again")
    return value


def load_hf_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder whose config.json holds `config`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(_missing_tokenizer(folder))
    backend = backend_from_text(_read_text(path), path)
    settings = read_json(folder / "tokenizer_config.json")
    _add_missing_tokens(backend, settings.get("added_tokens_decoder"))
    named = _named_tokens({**read_json(folder / "special_tokens_map.json"), **settings})
    bos_id = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    eos_sources = (read_json(folder / "generation_config.json"), config)
    eos_ids: list[int | None] = [eos_id for source in eos_sources for eos_id in _id_list(source.get("eos_token_id"))]
    if "eos_token" in named:
        eos_ids.append(backend.token_to_id(named["eos_token"]))
    add_bos = settings.get("add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    unique = tuple(dict.fromkeys(eos_id for eos_id in eos_ids if eos_id is not None))
    return Tokenizer(backend, TokenizerSettings(bos_id, unique, add_bos, _hf_templates(folder, settings), named))


def backend_from_text(text: str, path: Path) -> "Backend":
    """Return the tokenizer that a tokenizer.json's text describes; `path` is named in errors."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise CorruptModelError(f"{path} is no tokenizer that the tokenizers library reads: {error}") from error
    kind = type(backend.model).__name__
    if kind not in ("BPE", "Unigram"):
        raise UnsupportedModelError(f"{path} is a {kind} tokenizer; forerun runs BPE and Unigram")
    if getattr(backend.model, "end_of_word_suffix", None) or getattr(backend.model, "continuing_subword_prefix", None):
        raise UnsupportedModelError(f"{path} marks the parts of words with affixes, which forerun doesn't run")
    backend.no_truncation()
    backend.no_padding()
    return backend


def _missing_tokenizer(folder: Path) -> str:
    if (folder / "tokenizer.model").is_file():
        return (
            f"{folder} has a tokenizer.model but no tokenizer.json: load it once with transformers' AutoTokenizer "
            "and save_pretrained it there, or take a GGUF"
        )
    return f"{folder} has no tokenizer.json"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorruptModelError(f"{path} is not UTF-8; fetch the file again") from error
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror or error}") from error


def _add_missing_tokens(backend: "Backend", entries: Any) -> None:
    """Add the tokens that only tokenizer_config.json lists, at the ids that it gives."""
    from tokenizers import AddedToken

    if not isinstance(entries, Mapping):
        return
    for key, entry in sorted(entries.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else -1):
        if key.isdecimal() and isinstance(entry, Mapping) and int(key) == backend.get_vocab_size():
            flags = {flag: bool(entry.get(flag)) for flag in ("lstrip", "rstrip", "normalized", "special")}
            backend.add_tokens([AddedToken(str(entry.get("content")), **flags)])


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            named[key] = text
    return named


def _id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _hf_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    given = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    templates = {"default": given} if isinstance(given, str) else {}
    if isinstance(given, list):
        pairs = [entry for entry in given if isinstance(entry, Mapping)]
        templates = {str(entry.get("name")): str(entry.get("template")) for entry in pairs}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates
