"""A model on disk: its configuration, its tokenizer and its weights by canonical name."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from forerun.errors import CorruptModelError, ModelError, UnsupportedModelError
from forerun.models.config import DecoderConfig
from forerun.models.layout import Source, is_harmless
from forerun.models.tensorfile import RawTensor, StoredTensor, release_pages
from forerun.models.tokenizer import Tokenizer

__all__ = ["Checkpoint", "RawTensor"]

_PLAIN_KINDS = ("F32", "F16", "BF16")
_SAMPLED_TENSORS, _SAMPLED_BYTES = 16, 1024  # of the fingerprint: enough to tell two fine-tunes apart


class Checkpoint:
    """A loaded model: nothing of it is copied until `tensor` asks for it.

    Raises ModelError at construction when a weight is missing, has another shape than the configuration says, or
    when the file holds weights that no part of the net uses.
    """

    def __init__(
        self,
        *,
        name: str,
        path: Path,
        source_kind: Literal["safetensors", "gguf"],
        config: DecoderConfig,
        tokenizer: Tokenizer,
        tensors: Mapping[str, StoredTensor],
        sources: Mapping[str, Source],
    ) -> None:
        self.name = name
        self.path = path
        self.source_kind = source_kind
        self.config = config
        self.tokenizer = tokenizer
        self._tensors = tensors
        self._sources = dict(sources)
        _check_weights(path, config, source_kind, tensors, self._sources)
        used = {source.name for source in self._sources.values()}
        self.kinds = dict(Counter(tensors[name].kind for name in sorted(used)))  # kind -> number of tensors
        self._buffers = list({id(tensor.buffer): tensor.buffer for tensor in tensors.values()}.values())
        self.nbytes = sum(tensors[name].nbytes for name in used)
        self.fingerprint = _fingerprint(config, {name: tensors[name] for name in used})

    def __repr__(self) -> str:
        return f"Checkpoint({self.name!r}, {self.config.family}, {self.nbytes} bytes, {self.kinds})"

    def names(self) -> list[str]:
        """Return the canonical names of all weights."""
        return list(self._sources)

    def tensor(self, name: str) -> RawTensor:
        """Return the weight with canonical name `name`. Raises KeyError if the net has none."""
        source = self._sources[name]
        tensor = self._tensors[source.name].raw()
        if source.last:
            tensor = tensor.rows(source.first, source.last)
        if source.interleaved_heads:
            tensor = tensor.take_rows(_half_order(tensor.shape[0], source.interleaved_heads))
        if source.plus_one:
            tensor = RawTensor(tensor.to_float32() + np.float32(1.0), "F32", tensor.shape)
        return tensor

    def release_pages(self) -> None:
        """Let go of the memory in which the mapped files lie; what is read again comes back from the disk's cache.

        Backends call it between tensors, so that a model is never in memory twice.
        """
        for buffer in self._buffers:
            release_pages(buffer)


def _half_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Return the rows of Q or K in Hugging Face's order: in each head the even rows, then the odd ones."""
    order: np.ndarray = np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2)
    return order.reshape(-1)


def _check_weights(
    path: Path,
    config: DecoderConfig,
    source_kind: str,
    tensors: Mapping[str, StoredTensor],
    sources: Mapping[str, Source],
) -> None:
    for source in sources.values():
        stored = tensors.get(source.name)
        if stored is None:
            raise CorruptModelError(f"{path} lacks tensor {source.name}, which a {config.family} model needs")
        if stored.shape != source.stored:
            raise CorruptModelError(
                f"{path}: tensor {source.name} has shape {stored.shape}, its configuration says {source.stored}"
            )
        plain = source_kind == "safetensors" or len(stored.shape) == 1
        if plain and stored.kind not in _PLAIN_KINDS:
            raise UnsupportedModelError(
                f"{path}: tensor {source.name} is of kind {stored.kind}, forerun reads {', '.join(_PLAIN_KINDS)} there"
            )
    used = {source.name for source in sources.values()}
    extra = sorted(name for name in tensors if name not in used and not is_harmless(name, config))
    if extra:
        raise ModelError(
            f"{path} has {len(extra)} tensors that a {config.family} model doesn't use, "
            f"such as {extra[0]}: it is another architecture, which forerun doesn't run"
        )


def _fingerprint(config: DecoderConfig, tensors: Mapping[str, StoredTensor]) -> str:
    """Return 16 hex digits that depend on the configuration, the sizes and a sample of the values, not on the path."""
    digest = hashlib.sha256(repr(config).encode())
    names = sorted(tensors)
    for name in names:
        digest.update(f"{name} {tensors[name].kind} {tensors[name].shape}".encode())
    for name in names[:: max(1, len(names) // _SAMPLED_TENSORS)]:
        tensor = tensors[name]
        middle = tensor.offset + max(0, tensor.nbytes // 2 - _SAMPLED_BYTES)
        digest.update(tensor.buffer[middle : min(middle + _SAMPLED_BYTES, tensor.offset + tensor.nbytes)].tobytes())
    return digest.hexdigest()[:16]
