"""From the tensors of a checkpoint to the matrices that the kernels read (native/kernels.h has the layout).

Which kind a tensor becomes:

    in the file                    auto     q8       q4       bf16
    Q4_0, Q4_1                     as is    as is    as is    BF16
    Q8_0                           as is    as is    Q4_1     BF16
    Q4_K                           Q4_1     Q4_1     Q4_1     BF16     (scales rounded to fp16, quants as they are)
    Q5_*, Q6_K, other quantised    Q8_0     Q8_0     Q4_1     BF16
    F32, F16, BF16                 BF16     Q8_0     Q4_1     BF16
"""

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from forerun.models.tensorfile import RawTensor

TILE, BLOCK = 16, 32
_ALIGN = 64  # bytes
_HUGE_PAGE, _CHUNK = 1 << 21, 1 << 25  # bytes
_ROWS = 4096  # of a tensor are packed at a time: what was read before can go
_FLOATS = ("F32", "F16", "BF16")


class Kind(IntEnum):
    """Kinds of packed matrices, as in native/kernels.h."""

    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2
    BF16 = 3


@dataclass
class Matrix:
    """A packed matrix: (outputs, inputs), inputs padded to whole blocks."""

    kind: Kind
    outputs: int
    inputs: int
    quants: np.ndarray  # uint8
    scales: np.ndarray  # uint16, the bits of fp16; empty for BF16
    minima: np.ndarray  # uint16, the bits of fp16; Q4_1 only

    @property
    def nbytes(self) -> int:
        return self.quants.nbytes + self.scales.nbytes + self.minima.nbytes

    def tiles(self, which: slice) -> list[np.ndarray]:
        """Return the parts of quants, scales and minima that belong to these tiles."""
        count = -(-self.outputs // TILE)
        return [part.reshape(count, -1)[which].reshape(-1) for part in (self.quants, self.scales, self.minima)]

    def to_float32(self) -> np.ndarray:
        """Return the values that the kernels compute with: (outputs, inputs)."""
        tiles = -(-self.outputs // TILE)
        values: np.ndarray
        if self.kind is Kind.BF16:
            bits = self.quants.view(np.uint16).reshape(tiles, self.inputs, TILE).astype(np.uint32) << 16
            values = bits.view(np.float32).swapaxes(1, 2)
            return values.reshape(tiles * TILE, -1)[: self.outputs]
        blocks = self.inputs // BLOCK
        if self.kind is Kind.Q8_0:
            quants = self.quants.reshape(tiles, blocks, 8, TILE, 4).astype(np.float32) - 128
        else:
            both = self.quants.reshape(tiles, blocks, 4, TILE, 4)
            quants = np.concatenate([both & 15, both >> 4], axis=2).astype(np.float32)
            if self.kind is Kind.Q4_0:
                quants -= 8
        values = quants.transpose(0, 3, 1, 2, 4).reshape(tiles, TILE, blocks, BLOCK)
        values *= _cells(self.scales, tiles, blocks)
        if self.kind is Kind.Q4_1:
            values += _cells(self.minima, tiles, blocks)
        return values.reshape(tiles * TILE, -1)[: self.outputs]


def _cells(halves: np.ndarray, tiles: int, blocks: int) -> np.ndarray:
    cells: np.ndarray = halves.view(np.float16).astype(np.float32).reshape(tiles, blocks, TILE, 1).swapaxes(1, 2)
    return cells


def choose_kind(stored: str, dtype: str) -> Kind:
    """Return what a tensor of the kind `stored` becomes under `dtype` (auto, q8, q4 or bf16)."""
    if dtype == "bf16" or (dtype == "auto" and stored in _FLOATS):
        return Kind.BF16
    if stored in ("Q4_0", "Q4_1"):
        return Kind[stored]
    if stored == "Q4_K" or dtype == "q4":
        return Kind.Q4_1
    return Kind.Q8_0


def pack_matrix(
    native: Any,
    tensor: RawTensor,
    kind: Kind,
    *,
    row_map: np.ndarray,
    column_map: np.ndarray,
    arena: "Arena | None" = None,
    num_threads: int = 1,
    release: Callable[[], None] = lambda: None,
) -> Matrix:
    """Pack a tensor (out, in). Output o is its row `row_map[o]`, input i its column `column_map[i]`; -1: zeros.

    `native` is the compiled module or its numpy twin. `release` lets go of the pages that the tensor was read from.
    """
    num_inputs = -(-len(column_map) // BLOCK) * BLOCK
    whole = len(column_map) == num_inputs and np.array_equal(column_map, np.arange(tensor.shape[1]))
    matrix = _empty(arena or Arena(), kind, len(row_map), num_inputs)
    for begin in range(0, len(row_map), _ROWS):
        rows = row_map[begin : begin + _ROWS].astype(np.int64)
        used = rows[rows >= 0]
        first, end = (int(used.min()), int(used.max()) + 1) if len(used) else (0, 0)
        part = tensor.rows(first, end)
        if whole and tensor.kind == kind.name:
            blocks = np.ascontiguousarray(part.data).view(np.uint8).reshape(end - first, -1)
        elif whole and tensor.kind == "Q4_K" and kind is Kind.Q4_1:
            blocks = q4_k_to_q4_1(part.data)
        else:
            blocks = _encode(native, _columns(part.to_float32(), column_map, num_inputs), kind, num_threads)
        places = np.where(rows >= 0, rows - first, -1)
        tiles = slice(begin // TILE, -(-(begin + len(rows)) // TILE))
        native.pack(int(kind), blocks, places, num_inputs, *matrix.tiles(tiles), num_threads)
        release()
    return matrix


def _columns(values: np.ndarray, column_map: np.ndarray, num_inputs: int) -> np.ndarray:
    padded = np.zeros((len(values), num_inputs), dtype=np.float32)
    used = np.flatnonzero(column_map >= 0)
    padded[:, used] = values[:, column_map[used]]
    return padded


def _encode(native: Any, values: np.ndarray, kind: Kind, num_threads: int) -> np.ndarray:
    """Return rows of GGUF blocks, or of bf16 rounded to nearest even, as bytes."""
    if kind is Kind.BF16:
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.astype(np.uint16).view(np.uint8).reshape(len(values), -1)
    block_bytes = 34 if kind is Kind.Q8_0 else 20
    blocks = np.empty((len(values), values.shape[1] // BLOCK * block_bytes), dtype=np.uint8)
    native.quantise(int(kind), values, blocks, num_threads)
    return blocks


def q4_k_to_q4_1(data: np.ndarray) -> np.ndarray:
    """Turn rows of Q4_K super-blocks (256 inputs, 144 bytes) into rows of Q4_1 blocks: the same quants, each block's
    scale and minimum multiplied out and rounded to fp16.
    """
    blocks = np.ascontiguousarray(data).reshape(-1, 144)
    halves = blocks[:, :4].copy().view(np.float16).astype(np.float32)  # d, dmin
    packed, quants = blocks[:, 4:16], blocks[:, 16:].reshape(-1, 4, 32)
    low, high, top = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (top & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([high & 63, (top >> 4) | (high >> 6 << 4)], axis=1)
    out = np.empty((len(blocks), 8, 20), dtype=np.uint8)
    out[:, :, 0:2] = (halves[:, :1] * scales).astype(np.float16)[..., None].view(np.uint8)
    out[:, :, 2:4] = (-halves[:, 1:] * minima).astype(np.float16)[..., None].view(np.uint8)
    nibbles = np.stack([quants & 15, quants >> 4], axis=2).reshape(-1, 8, 32)  # block 2i: low, block 2i + 1: high
    out[:, :, 4:] = nibbles[..., :16] | (nibbles[..., 16:] << 4)
    return out.reshape(len(data), -1)


def _empty(arena: "Arena", kind: Kind, outputs: int, inputs: int) -> Matrix:
    def halves(count: int) -> np.ndarray:
        return arena.take(2 * count).view(np.uint16)

    tiles, blocks = -(-outputs // TILE), inputs // BLOCK
    cells = tiles * blocks * TILE
    if kind is Kind.BF16:
        return Matrix(kind, outputs, inputs, arena.take(tiles * TILE * inputs * 2), halves(0), halves(0))
    quant_bytes = cells * (BLOCK if kind is Kind.Q8_0 else BLOCK // 2)
    minima = halves(cells if kind is Kind.Q4_1 else 0)
    return Matrix(kind, outputs, inputs, arena.take(quant_bytes), halves(cells), minima)


class Arena:
    """Memory for packed weights in huge pages where the system has them: a pass walks through all of it, and with
    pages of 4 KiB a good part of its time would go into looking them up.
    """

    def __init__(self) -> None:
        self._chunk = np.empty(0, dtype=np.uint8)
        self._used = 0

    def take(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` bytes, aligned to cache lines. uint8"""
        if self._used + nbytes > len(self._chunk):
            self._chunk = _huge(max(nbytes, _CHUNK))
            self._used = 0
        start = self._used
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        return self._chunk[start : start + nbytes]


def _huge(nbytes: int) -> np.ndarray:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        raw = np.empty(nbytes + _HUGE_PAGE, dtype=np.uint8)
    else:
        memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(memory, dtype=np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    return raw[start : start + nbytes]
