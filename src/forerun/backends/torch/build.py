"""From a checkpoint to a Net, tensor by tensor: dequantised, cast, packed; no second copy of the model ever exists."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.backends.torch.embedding import Embedding, PlainEmbedding, RawEmbedding
from forerun.backends.torch.linear import Linear, PackedLinear, linear_type
from forerun.backends.torch.net import LayerWeights, Net
from forerun.backends.torch.rope import RopeTable
from forerun.config import return_free_memory
from forerun.models.config import DecoderConfig
from forerun.models.tensorfile import RawTensor

_CHUNK = 1 << 18  # elements: dequantised at once


class Weights(Protocol):
    """Where weights come from; `forerun.models` has it as Checkpoint."""

    @property
    def config(self) -> DecoderConfig: ...

    def names(self) -> Sequence[str]:
        """Return the canonical names of all weights."""

    def tensor(self, name: str) -> RawTensor:
        """Return one of them as stored."""

    def release_pages(self) -> None:
        """Let go of the memory in which the mapped files lie."""


class BuiltNet(NamedTuple):
    """A net and the bytes of its weights."""

    net: Net
    pass_nbytes: int  # read by a pass over one row: all but the embedding table, unless that is the head's too
    held_nbytes: int  # held in memory


class _Loader:
    """Casts weights and builds matrices; counts the bytes that a pass reads."""

    def __init__(self, weights: Weights, *, dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._dtype, self._device = weights, dtype, device
        self._names = frozenset(weights.names())
        self._linear = linear_type(dtype, device)
        self.packs = self._linear is PackedLinear
        self.nbytes = 0

    def cast(self, raw: RawTensor) -> Tensor:
        """Return a tensor of the session's dtype on its device; large ones are dequantised piece by piece."""
        result = torch.empty(raw.shape, dtype=self._dtype, device=self._device)
        num_rows = max(1, _CHUNK // max(1, result[0].numel()))
        for start in range(0, raw.shape[0], num_rows):
            stop = min(start + num_rows, raw.shape[0])
            values = raw.rows(start, stop).to_float32()
            result[start:stop] = torch.from_numpy(values if values.flags.writeable else values.copy())
        return result

    def vector(self, name: str) -> Tensor | None:
        """Return a norm's weights, or None if the family has no such norm."""
        if name not in self._names:
            return None
        result = self.cast(self._weights.tensor(name))
        self.nbytes += result.nbytes
        return result

    def norm(self, name: str) -> Tensor:
        """Return the weights of a norm that every family has."""
        result = self.vector(name)
        assert result is not None, name
        return result

    def linear(self, *names: str) -> Linear:
        """Return one matrix made of several, one upon the other, with their biases (zero where only some have one)."""
        parts = [self.cast(self._weights.tensor(name)) for name in names]
        biases = [self.vector(f"{name}_bias") for name in names]
        bias = None
        if any(item is not None for item in biases):
            pairs = zip(parts, biases, strict=True)
            bias = torch.cat([part.new_zeros(len(part)) if item is None else item for part, item in pairs])
        return self.linear_from(parts[0] if len(parts) == 1 else torch.cat(parts), bias)

    def linear_from(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        self._weights.release_pages()
        result = self._linear(weight_OI, bias_O)
        self.nbytes += weight_OI.nbytes
        return result


def build_net(weights: Weights, *, vocab_size: int, dtype: torch.dtype, device: torch.device) -> BuiltNet:
    """Build the net with the first `vocab_size` rows of the embedding and of the head."""
    config = weights.config
    loader = _Loader(weights, dtype=dtype, device=device)
    embed, head = _embedding_and_head(weights, loader, vocab_size, dtype)  # the largest first: it sets the peak
    layers = tuple(_layer(loader, config, index) for index in range(config.num_layers))
    net = Net(
        config,
        embed=embed,
        layers=layers,
        norm_D=loader.norm("norm"),
        head=head,
        ropes=tuple(RopeTable(rope, dtype=dtype, device=device) for rope in config.ropes),
    )
    return_free_memory()
    shared = config.tied_head and not loader.packs
    return BuiltNet(net, loader.nbytes, loader.nbytes + (0 if shared else embed.nbytes))


def _embedding_and_head(
    weights: Weights, loader: _Loader, vocab_size: int, dtype: torch.dtype
) -> tuple[Embedding, Linear]:
    config = weights.config
    raw = weights.tensor("embed").rows(0, vocab_size)
    if config.tied_head and not loader.packs:
        table_VD = loader.cast(raw)
        return PlainEmbedding(table_VD, config.embed_scale), loader.linear_from(table_VD)
    embed: Embedding
    if loader.packs and raw.data.nbytes <= vocab_size * config.hidden_size * dtype.itemsize:
        embed = RawEmbedding(raw, config.embed_scale, dtype=dtype)
    else:
        embed = PlainEmbedding(loader.cast(raw), config.embed_scale)
    head = raw if config.tied_head else weights.tensor("head").rows(0, vocab_size)
    return embed, loader.linear_from(loader.cast(head))


def _layer(loader: _Loader, config: DecoderConfig, index: int) -> LayerWeights:
    name = f"layers.{index}."
    qk_norm_HC = None
    if config.qk_norm:
        q_C, k_C = loader.norm(name + "q_norm"), loader.norm(name + "k_norm")
        qk_norm_HC = torch.cat((q_C.expand(config.num_heads, -1), k_C.expand(config.num_kv_heads, -1)))
    return LayerWeights(
        attn_norm_D=loader.norm(name + "attn_norm"),
        qkv=loader.linear(name + "q", name + "k", name + "v"),
        qk_norm_HC=qk_norm_HC,
        o=loader.linear(name + "o"),
        post_attn_norm_D=loader.vector(name + "post_attn_norm"),
        mlp_norm_D=loader.norm(name + "mlp_norm"),
        gate_up=loader.linear(name + "gate", name + "up"),
        down=loader.linear(name + "down"),
        post_mlp_norm_D=loader.vector(name + "post_mlp_norm"),
    )
