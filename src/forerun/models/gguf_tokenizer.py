"""The tokenizer inside a GGUF file, built with the `tokenizers` library and cached as a tokenizer.json.

A byte-level vocabulary (model "gpt2") is split into words by a pre-tokeniser that the file only names; here is what
the names that we are sure of stand for. A sentencepiece vocabulary (model "llama") has no merges: they follow from
the scores.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forerun.errors import CorruptModelError, UnsupportedModelError
from forerun.models import gguf_file
from forerun.models.files import write_atomically
from forerun.models.gguf_file import GGUFFile, StringArray
from forerun.models.tokenizer import Tokenizer, TokenizerSettings, backend_from_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_FORMAT = b"1"  # raise it when the built tokenizer changes: old cache entries are then not found
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # of tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+<end>|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*<end>"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class PreTokenizer(NamedTuple):
    """How a byte-level vocabulary splits text before the merges."""

    pattern: str | None = None  # None: the pattern of GPT-2
    single_digits: bool = False  # digits are split off one by one before that
    ignore_merges: bool = False  # a word that is a token is taken whole
    nfc: bool = False  # text is put in Unicode's composed form first
    add_bos: bool = False  # where the file doesn't say


_TEKKEN = _CASED.replace("<end>", "") + r"|\p{N}" + _SYMBOLS
_GPT4O = _CASED.replace("<end>", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _SYMBOLS
_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(single_digits=True)
_BPE3 = PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2, "phi-2": _GPT2, "mpt": _GPT2, "olmo": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS,
    "llama-bpe": _BPE3, "llama3": _BPE3, "llama-v3": _BPE3,
    "smaug-bpe": PreTokenizer(_LLAMA3), "dbrx": PreTokenizer(_LLAMA3),
    "qwen2": PreTokenizer(_QWEN2, nfc=True), "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True), "gpt-4o": PreTokenizer(_GPT4O),
}  # fmt: skip

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}  # for templates


def load_gguf_tokenizer(file: GGUFFile, cache_dir: Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file; the built one is kept in `cache_dir`/tokenizers."""
    model = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in _BUILDERS:
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of model {model!r:.80}; forerun reads {', '.join(_BUILDERS)}"
        )
    add_bos_default = _pre_tokenizer(file).add_bos if model == "gpt2" else True
    cached = cached_path(file, cache_dir)
    backend = _read_cached(cached)
    if backend is None:
        backend = _build(file, _BUILDERS[model])
        _write_cached(cached, backend)
    return Tokenizer(backend, _settings(file, backend, add_bos_default))


def _build(file: GGUFFile, builder: Callable[[GGUFFile, list[str], np.ndarray], "Backend"]) -> "Backend":
    tokens = gguf_file.strings(file, "tokenizer.ggml.tokens")
    kinds = _numbers(file, "tokenizer.ggml.token_type", len(tokens))
    size = _without_padding(tokens, kinds)
    try:
        backend = builder(file, tokens[:size], kinds[:size])
    except (UnsupportedModelError, CorruptModelError):
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CorruptModelError(f"{file.path} has a vocabulary that makes no tokenizer: {error}") from error
    _add_tokens(file, backend, tokens[:size], kinds[:size])
    return backend


def _without_padding(tokens: Sequence[str], kinds: np.ndarray) -> int:
    """Return how many tokens there are without the placeholders that pad a list to the size of the head."""
    size = len(tokens)
    while size and kinds[size - 1] == _UNUSED and tokens[size - 1].startswith("[PAD"):
        size -= 1
    return size


def _numbers(file: GGUFFile, key: str, size: int) -> np.ndarray:
    value = file.metadata.get(key)
    if value is None and key.endswith("token_type"):
        return np.full(size, _NORMAL)
    if not isinstance(value, np.ndarray) or value.size != size:
        raise CorruptModelError(f"{file.path}: {key} doesn't have one number for each of {size} tokens")
    return value


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre is None:
        raise UnsupportedModelError(f"{file.path} names no pre-tokeniser (tokenizer.ggml.pre): take a newer conversion")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{file.path} has the pre-tokeniser {pre!r:.80}, which forerun doesn't know; "
            f"it knows {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[pre]


def _build_byte_level(file: GGUFFile, tokens: list[str], _kinds: np.ndarray) -> "Backend":
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    pre = _pre_tokenizer(file)
    merges = [_split_merge(merge) for merge in gguf_file.strings(file, "tokenizer.ggml.merges")]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None)
    steps: list[Any] = [byte_level]
    if pre.pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    if pre.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _split_merge(merge: str) -> tuple[str, str]:
    """Split at the first space that is not the first character."""
    head, _, tail = merge[1:].partition(" ")
    return merge[:1] + head, tail


def _build_sentencepiece(file: GGUFFile, tokens: list[str], kinds: np.ndarray) -> "Backend":
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    scores = _numbers(file, "tokenizer.ggml.scores", file.metadata["tokenizer.ggml.tokens"].num_strings)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = [tokens[index] for index in np.flatnonzero(kinds == _UNKNOWN)]
    backend = Backend(
        models.BPE(
            vocabulary,
            _merges_from_scores(tokens, kinds, scores),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("\u2581"))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges_from_scores(tokens: list[str], kinds: np.ndarray, scores: np.ndarray) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a token, the best scored result first.

    That is how sentencepiece merges: of all adjacent pairs it joins the one whose result has the highest score.
    """
    normal = {tokens[index]: index for index in np.flatnonzero(kinds == _NORMAL).tolist()}
    merges = []
    for token in sorted(normal, key=lambda token: (-scores[normal[token]], normal[token])):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in normal and right in normal]
        merges += sorted(known, key=lambda pair: (normal[pair[0]], normal[pair[1]]))
    return merges


_BUILDERS: dict[str, Callable[[GGUFFile, list[str], np.ndarray], "Backend"]] = {
    "gpt2": _build_byte_level,
    "llama": _build_sentencepiece,
}


def _add_tokens(file: GGUFFile, backend: "Backend", tokens: Sequence[str], kinds: np.ndarray) -> None:
    """Declare the tokens that are matched in the text before anything is split."""
    from tokenizers import AddedToken

    strips = _strips_after_special(file)
    for index in np.flatnonzero(np.isin(kinds, (_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED))).tolist():
        token, special = tokens[index], bool(kinds[index] != _USER_DEFINED)
        spaces = not special and "\u2581" in token  # such a run is found after spaces have become U+2581
        strip = special and strips and token not in ("<unk>", "<s>", "<|endoftext|>")
        backend.add_tokens([AddedToken(token, special=special, normalized=spaces, rstrip=strip)])


def _strips_after_special(file: GGUFFile) -> bool:
    """Phi-3 with its sentencepiece vocabulary was trained without the spaces that follow its special tokens."""
    metadata = file.metadata
    return metadata.get("general.architecture") == "phi3" and metadata["tokenizer.ggml.model"] == "llama"


def _settings(file: GGUFFile, backend: "Backend", add_bos_default: bool) -> TokenizerSettings:
    metadata = file.metadata
    templates = _templates(file)
    ids = {name: _token_id(file, backend, name) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    named = {key: backend.id_to_token(token_id) for key, name in _NAMED.items() if (token_id := ids[name]) is not None}
    template = templates.get("default", "")
    turn_ends = [backend.token_to_id(token) for token in _TURN_ENDS if token in template]
    eos_ids = [ids["eos"], ids["eot"], ids["eom"], *turn_ends]
    return TokenizerSettings(
        bos_id=ids["bos"],
        eos_ids=tuple(dict.fromkeys(token_id for token_id in eos_ids if token_id is not None)),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos_default)),
        chat_templates=templates,
        named_tokens={key: token for key, token in named.items() if token is not None},
    )


def _token_id(file: GGUFFile, backend: "Backend", name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None or (isinstance(value, int) and value in (-1, 0xFFFFFFFF)):
        return None
    if not isinstance(value, int) or not 0 <= value < 1 << 32 or backend.id_to_token(value) is None:
        raise CorruptModelError(f"{file.path}: tokenizer.ggml.{name}_token_id is {value!r:.80}, which is no token")
    return value


def _templates(file: GGUFFile) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {key: value for key, value in file.metadata.items() if key.startswith(prefix) and isinstance(value, str)}
    return {key.removeprefix(prefix).removeprefix(".") or "default": value for key, value in found.items()}


# The cache: a first line with the SHA-256 of the rest, then the tokenizer.json.


def cached_path(file: GGUFFile, cache_dir: Path) -> Path:
    """Return where the built tokenizer of `file` is kept: under a hash of all that it depends on."""
    digest = hashlib.sha256(_FORMAT + str(file.metadata.get("general.architecture")).encode())
    for key in sorted(key for key in file.metadata if key.startswith("tokenizer.ggml.")):
        value = file.metadata[key]
        digest.update(key.encode())
        if isinstance(value, StringArray):
            digest.update(value.buffer)
        else:
            digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return cache_dir / "tokenizers" / f"{digest.hexdigest()[:32]}.json"


def _read_cached(path: Path) -> "Backend | None":
    """Return the cached tokenizer, None if there is none or it is damaged."""
    try:
        digest, _, text = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(text).hexdigest().encode() != digest:
        return None
    try:
        return backend_from_text(text.decode(), path)
    except (CorruptModelError, UnsupportedModelError, UnicodeDecodeError):
        return None


def _write_cached(path: Path, backend: "Backend") -> None:
    """Keep the tokenizer; a cache that can't be written only costs time."""
    text = backend.to_str().encode()
    try:
        write_atomically(path, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    except OSError:
        return
