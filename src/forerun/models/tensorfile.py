"""Tensors as they lie in a file: where each begins, how long it is and of what kind. Files are memory-mapped.

Nothing here trusts the file: every offset and length is compared with the file's size before it is used, so a damaged
header ends in a CorruptModelError and never in a large allocation.
"""

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forerun.errors import CorruptModelError, ModelError


class RawTensor(NamedTuple):
    """One weight as stored.

    `data` is float32 or float16 of `shape`, uint16 of `shape` for BF16, and for the quantised kinds of GGUF uint8 of
    (rows, bytes per row): the blocks as they are. It may be a read-only view of a mapped file.
    """

    data: np.ndarray
    kind: str  # F32, F16, BF16 or the GGUF name of a quantised kind, such as Q4_1
    shape: tuple[int, ...]  # (out, in) or (n,)

    def to_float32(self) -> np.ndarray:
        """Return the values as float32 of `shape`."""
        if self.kind in ("F32", "F16"):
            return self.data.astype(np.float32, copy=False)
        if self.kind == "BF16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        values: np.ndarray = dequantize(self.data, GGMLQuantizationType[self.kind])
        return values.reshape(self.shape)

    def rows(self, start: int, stop: int) -> "RawTensor":
        """Return the rows start … stop - 1, a view."""
        return RawTensor(self.data[start:stop], self.kind, (stop - start, *self.shape[1:]))

    def take_rows(self, order: np.ndarray) -> "RawTensor":
        """Return the rows in another order, a copy; blocks stay whole."""
        return RawTensor(self.data[order], self.kind, self.shape)


class StoredTensor(NamedTuple):
    """Where a tensor lies in a mapped file."""

    buffer: np.ndarray  # uint8, the mapped file
    offset: int
    nbytes: int
    kind: str
    shape: tuple[int, ...]

    def raw(self) -> RawTensor:
        """Return the tensor as a view of the file."""
        flat = self.buffer[self.offset : self.offset + self.nbytes]
        dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(self.kind)
        if dtype is None:
            return RawTensor(flat.reshape(self.shape[0], -1), self.kind, self.shape)
        return RawTensor(_aligned(flat, np.dtype(dtype)).reshape(self.shape), self.kind, self.shape)


def _aligned(flat: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """View bytes as `dtype`; copied if they begin at an odd address, which some kernels don't take."""
    view = flat.view(dtype)
    return view if view.flags.aligned else view.copy()


def map_file(path: Path) -> np.ndarray:
    """Return the bytes of `path`, mapped read-only, as a plain uint8 array."""
    try:
        if path.stat().st_size == 0:
            raise CorruptModelError(f"{path} is empty; fetch the file again")
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror or error}") from error


def release_pages(buffer: np.ndarray) -> None:
    """Tell the system that the pages of a mapped file aren't needed now; they come back when they are read again."""
    owner: object = buffer
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)


def check_extents(path: Path, tensors: Iterable[tuple[str, StoredTensor]]) -> None:
    """Raise CorruptModelError if a tensor runs past the end of its file or two of them overlap."""
    end = 0
    for name, tensor in sorted(tensors, key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise CorruptModelError(f"{path} is damaged: tensor {name} overlaps another; fetch the file again")
        end = tensor.offset + tensor.nbytes
        if end > tensor.buffer.size:
            raise CorruptModelError(
                f"{path} is truncated: tensor {name} ends at byte {end}, "
                f"the file has {tensor.buffer.size}; fetch the file again"
            )
