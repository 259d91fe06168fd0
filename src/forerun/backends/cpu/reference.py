"""The numpy twin of the compiled module: the same functions, the same pass, for machines without a compiler.

It is the reference that the kernels are tested against. Slow: weights are unpacked to float32, and every step is a
few numpy calls. Activations are rounded to int8 per row and block of 32 just as the kernels do.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forerun.backends.cpu.packing import BLOCK, TILE, Kind, Matrix

PAGE = 64  # positions


def instruction_sets() -> list[str]:
    return ["numpy"]


def pack(
    kind: int,
    source: np.ndarray,
    row_map: np.ndarray,
    inputs: int,
    quants: np.ndarray,
    scales: np.ndarray,
    minima: np.ndarray,
    _threads: int = 1,
) -> None:
    """Write rows of GGUF blocks (or of bf16) into the tiles of native/kernels.h. See `native/pack.h`."""
    tiles = -(-len(row_map) // TILE)
    rows = np.zeros((tiles * TILE, source.shape[1]), dtype=np.uint8)
    used = np.flatnonzero(row_map >= 0)
    rows[used] = source[row_map[used]]
    if kind == Kind.BF16:
        quants.view(np.uint16).reshape(tiles, inputs, TILE)[:] = (
            rows.view(np.uint16).reshape(tiles, TILE, inputs).swapaxes(1, 2)
        )
        return
    blocks = rows.reshape(tiles, TILE, inputs // BLOCK, -1).swapaxes(1, 2)  # (tiles, blocks, lane, bytes)
    scales[:] = np.ascontiguousarray(blocks[..., :2]).view(np.uint16).reshape(-1)
    if kind == Kind.Q8_0:
        groups = (blocks[..., 2:] ^ 0x80).reshape(*blocks.shape[:3], 8, 4)
        quants.reshape(tiles, -1, 8, TILE, 4)[:] = groups.swapaxes(2, 3)
        return
    if kind == Kind.Q4_1:
        minima[:] = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16).reshape(-1)
    both = blocks[..., 4 if kind == Kind.Q4_1 else 2 :]
    nibbles = np.concatenate([both & 15, both >> 4], axis=-1).reshape(*blocks.shape[:3], 8, 4).swapaxes(2, 3)
    quants.reshape(tiles, -1, 4, TILE, 4)[:] = nibbles[:, :, :4] | (nibbles[:, :, 4:] << 4)


def quantise(kind: int, rows: np.ndarray, blocks: np.ndarray, _threads: int = 1) -> None:
    """Quantise float rows to blocks of Q4_1 or Q8_0, to nearest: simpler than the compiled twin, which searches."""
    x = rows.reshape(-1, BLOCK)
    out = blocks.reshape(len(x), -1)
    if kind == Kind.Q8_0:
        scale = (np.abs(x).max(axis=1) / 127).astype(np.float16)
        out[:, :2] = scale[:, None].view(np.uint8)
        out[:, 2:] = _divided(x, scale).clip(-127, 127).astype(np.int8).view(np.uint8)
        return
    low = x.min(axis=1).astype(np.float16)
    scale = ((x.max(axis=1) - x.min(axis=1)) / 15).astype(np.float16)
    quants = _divided(x - low[:, None].astype(np.float32), scale).clip(0, 15).astype(np.uint8)
    out[:, :2], out[:, 2:4] = scale[:, None].view(np.uint8), low[:, None].view(np.uint8)
    out[:, 4:] = quants[:, :16] | (quants[:, 16:] << 4)


def _divided(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    scale_1 = scale[:, None].astype(np.float32)
    quants: np.ndarray = np.rint(np.divide(x, scale_1, out=np.zeros_like(x), where=scale_1 > 0))
    return quants


class Model:
    """A decoder stack with a cache of pages. See native/decoder.h."""

    def __init__(
        self,
        instruction_set: str,
        config: dict[str, Any],
        layers: Sequence[dict[str, Any]],
        embed: Matrix,
        head: Matrix,
        norm: np.ndarray,
        threads: int,
    ) -> None:
        self._config = config
        self._layers = layers
        self._embed, self._head, self._norm = embed, head, norm
        self._values: dict[int, np.ndarray] = {}
        self._padded_dim = -(-config["head_dim"] // TILE) * TILE
        self._pages: dict[int, np.ndarray] = {}
        self._next = 0
        shape = (len(layers), 2, config["num_kv_heads"], PAGE, self._padded_dim)
        self._page_shape = shape
        self.page_bytes = int(np.prod(shape)) * 2

    def new_page(self) -> int:
        self._next += 1
        self._pages[self._next] = np.zeros(self._page_shape, dtype=np.float16)
        return self._next

    def free_page(self, page: int) -> None:
        del self._pages[page]

    def copy_page(self, source: int, target: int) -> None:
        self._pages[target][:] = self._pages[source]

    def move_slot(self, pages: np.ndarray, source: int, target: int) -> None:
        moved = self._pages[int(pages[source // PAGE])][:, :, :, source % PAGE]
        self._pages[int(pages[target // PAGE])][:, :, :, target % PAGE] = moved

    def run(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        cosines: Sequence[np.ndarray],
        sines: Sequence[np.ndarray],
        feeds: np.ndarray,
        pages: np.ndarray,
        trees: np.ndarray,
        wanted: np.ndarray,
        logits: np.ndarray,
        tap_layers: np.ndarray,
        taps: np.ndarray,
    ) -> None:
        config, hidden = self._config, self._config["hidden"]
        x = self._dense(self._embed)[tokens][:, :hidden] * np.float32(config["embed_scale"])
        for index, layer in enumerate(self._layers):
            normed = _rms_norm(x, layer["attn_norm"], config["norm_eps"])
            q = self._heads(self._multiply(normed, layer["q"], layer.get("q_bias")), layer.get("q_norm"))
            k = self._heads(self._multiply(normed, layer["k"], layer.get("k_bias")), layer.get("k_norm"))
            v = self._heads(self._multiply(normed, layer["v"], layer.get("v_bias")), None)
            if layer["rope"] >= 0:
                q = _rotate(q, cosines[layer["rope"]], sines[layer["rope"]])
                k = _rotate(k, cosines[layer["rope"]], sines[layer["rope"]])
            attended = self._attend(index, layer["window"], q, k, v, positions, feeds, pages, trees)
            branch = self._multiply(attended.reshape(len(x), -1), layer["o"], layer.get("o_bias"))
            x = x + self._post(branch, layer.get("post_attn_norm"))
            normed = _rms_norm(x, layer["mlp_norm"], config["norm_eps"])
            gate = self._multiply(normed, layer["gate"], layer.get("gate_bias"))
            up = self._multiply(normed, layer["up"], layer.get("up_bias"))
            branch = self._multiply(_activate(gate, config["activation"]) * up, layer["down"], layer.get("down_bias"))
            x = x + self._post(branch, layer.get("post_mlp_norm"))
            for tap, tapped in zip(tap_layers, taps, strict=True):
                if tap == index:
                    tapped[:] = x
        if len(wanted):
            normed = _rms_norm(x[wanted], self._norm, config["norm_eps"])
            logits[:] = _capped(self._multiply(normed, self._head, None), config["logit_softcap"])

    def _dense(self, matrix: Matrix) -> np.ndarray:
        if id(matrix) not in self._values:
            self._values[id(matrix)] = matrix.to_float32()
        return self._values[id(matrix)]

    def _multiply(self, x: np.ndarray, matrix: Matrix, bias: np.ndarray | None) -> np.ndarray:
        padded = np.zeros((len(x), matrix.inputs), dtype=np.float32)
        padded[:, : x.shape[1]] = x
        if matrix.kind != Kind.BF16:
            blocks = padded.reshape(len(x), -1, BLOCK)
            most = np.abs(blocks).max(axis=-1, keepdims=True)
            inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
            padded = (np.rint(blocks * inverse) * (most / np.float32(127))).reshape(len(x), -1)
        out: np.ndarray = padded @ self._dense(matrix).T
        return out if bias is None else out + bias[: out.shape[1]]

    def _heads(self, x: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
        """Cut into heads, (rows, heads, padded dim), and norm each."""
        heads = x.reshape(len(x), -1, self._padded_dim)
        if norm is not None:
            dim = self._config["head_dim"]
            heads[..., :dim] = _rms_norm(heads[..., :dim], norm, self._config["norm_eps"])
        return heads

    def _post(self, branch: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
        return branch if norm is None else _rms_norm(branch, norm, self._config["norm_eps"])

    def _attend(
        self,
        index: int,
        window: int,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        positions: np.ndarray,
        feeds: np.ndarray,
        pages: np.ndarray,
        trees: np.ndarray,
    ) -> np.ndarray:
        out = np.zeros_like(q)
        group = q.shape[1] // k.shape[1]
        for first, count, cached, is_tree in feeds:
            num_pages = -(-(cached + count) // PAGE)
            own, pages = pages[:num_pages], pages[num_pages:]
            rows = slice(first, first + count)
            for i in range(count):
                slot = cached + i
                page = self._pages[int(own[slot // PAGE])]
                page[index, 0, :, slot % PAGE] = np.clip(k[first + i], -65504, 65504)
                page[index, 1, :, slot % PAGE] = np.clip(v[first + i], -65504, 65504)
            cache = [self._pages[int(page)][index] for page in own]
            both = np.concatenate(cache, axis=2)[:, :, : cached + count].astype(np.float32)
            keys, values = np.repeat(both[0], group, axis=0), np.repeat(both[1], group, axis=0)  # (heads, slots, dim)
            scores = np.einsum("rhd,hsd->hrs", q[rows], keys) * np.float32(self._config["attention_scale"])
            scores = _capped(scores, self._config["attention_softcap"])
            sees = np.ones((count, cached + count), dtype=bool)
            if is_tree:
                sees[:, cached:], trees = trees[: count * count].reshape(count, count), trees[count * count :]
            else:
                sees[:, cached:] = np.tri(count)
            if window:
                sees &= positions[rows, None] - np.append(np.arange(cached), positions[rows]) < window
            scores[:, ~sees] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[rows] = np.einsum("hrs,hsd->rhd", weights, values)
        return out


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    normed: np.ndarray = x / np.sqrt(mean + np.float32(eps)) * weight
    return normed


def _rotate(heads: np.ndarray, cosines: np.ndarray, sines: np.ndarray) -> np.ndarray:
    half = cosines.shape[-1]
    cosine, sine = cosines[:, None], sines[:, None]
    a, b = heads[..., :half], heads[..., half : 2 * half]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, heads[..., 2 * half :]], axis=-1)


def _activate(x: np.ndarray, activation: int) -> np.ndarray:
    u = x if activation == 0 else np.float32(2 * 0.7978845608028654) * (x + np.float32(0.044715) * x**3)
    result: np.ndarray = x / (1 + np.exp(-u))
    return result


def _capped(x: np.ndarray, cap: float) -> np.ndarray:
    return np.tanh(x / np.float32(cap)) * np.float32(cap) if cap else x
