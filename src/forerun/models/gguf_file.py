"""Reading the header of a GGUF file: metadata and where the tensors lie.

The `gguf` package's reader makes an array of each string of the vocabulary, which takes seconds; here long arrays are
walked once and decoded only when asked for. Constants and dequantisation are that package's.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forerun.errors import CorruptModelError, UnsupportedModelError
from forerun.models.tensorfile import StoredTensor, check_extents, map_file

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_STRING = 1 << 26  # bytes of a key, a name or a chat template
_DEQUANTISED = (  # what gguf.quants turns into floats
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0",
    "TQ2_0", "MXFP4", "NVFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS",
)  # fmt: skip


class StringArray(NamedTuple):
    """An array of strings, not yet decoded."""

    buffer: bytes  # from the first string's length to the end of the last string
    num_strings: int

    def decode(self) -> list[str]:
        """Return the strings. Raises UnicodeDecodeError."""
        strings, position = [], 0
        for _ in range(self.num_strings):
            begin = position + 8
            position = begin + int.from_bytes(self.buffer[position:begin], "little")
            strings.append(self.buffer[begin:position].decode("utf-8"))
        return strings


class GGUFFile(NamedTuple):
    """A GGUF file whose header has been read and whose lengths have been checked."""

    path: Path
    metadata: dict[str, Any]  # scalars as Python values, arrays of numbers as numpy, of strings as StringArray
    tensors: dict[str, StoredTensor]


def read_file(path: Path) -> GGUFFile:
    """Read the header of `path`. Raises CorruptModelError or UnsupportedModelError."""
    buffer = map_file(path)
    cursor = _Cursor(path, buffer)
    num_tensors, num_pairs = _read_counts(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        if key in metadata:
            raise cursor.corrupt(f"key {key} appears twice")
        metadata[key] = cursor.value()
    infos = [_read_info(cursor) for _ in range(num_tensors)]
    start = _data_start(cursor, metadata.get("general.alignment", 32))
    tensors = {info.name: _locate(cursor, info, start) for info in infos}
    if len(tensors) != len(infos):
        raise cursor.corrupt("two tensors have one name")
    check_extents(path, tensors.items())
    return GGUFFile(path, metadata, tensors)


class _Cursor:
    """Reads little-endian values and never past the end of the file."""

    def __init__(self, path: Path, buffer: np.ndarray) -> None:
        self.path = path
        self.buffer = buffer
        self.view = memoryview(buffer.data)
        self.position = 0

    def corrupt(self, what: str) -> CorruptModelError:
        return CorruptModelError(f"{self.path} is damaged: {what}; fetch the file again")

    @property
    def remaining(self) -> int:
        return len(self.view) - self.position

    def skip(self, length: int) -> int:
        """Move on by `length` bytes and return where they begin."""
        if length > self.remaining:
            raise CorruptModelError(
                f"{self.path} is truncated or damaged: {length} bytes wanted at byte {self.position}, "
                f"{self.remaining} follow; fetch the file again"
            )
        begin = self.position
        self.position += length
        return begin

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(code, self.view, self.skip(struct.calcsize(code)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        if length > _MAX_STRING:
            raise self.corrupt(f"a text of {length} bytes at byte {self.position}")
        begin = self.skip(length)
        try:
            return bytes(self.view[begin : begin + length]).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"text at byte {begin} is not UTF-8") from error

    def value(self) -> Any:
        kind = self.scalar("<I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self.corrupt(f"value kind {kind} at byte {self.position - 4} is unknown")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> Any:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise self.corrupt(f"array kind {kind} at byte {self.position - 12} is unknown")
        dtype = np.dtype(_SCALARS[kind])
        begin = self.skip(count * dtype.itemsize)
        return np.frombuffer(self.view, dtype, count, begin)

    def _strings(self, count: int) -> StringArray:
        if count * 8 > self.remaining:
            raise self.corrupt(f"an array of {count} strings doesn't fit in the file")
        begin, end, view, size = self.position, self.position, self.view, len(self.view)
        for _ in range(count):
            end += 8 + int.from_bytes(view[end : end + 8], "little")
            if end > size:
                raise self.corrupt(f"an array of strings at byte {begin} runs past the end of the file")
        self.position = end
        return StringArray(bytes(view[begin:end]), count)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    if bytes(cursor.view[:4]) != b"GGUF":
        raise CorruptModelError(f"{cursor.path} is no GGUF file: it begins with {bytes(cursor.view[:4])!r}")
    cursor.skip(4)
    version = cursor.scalar("<I")
    if version in (2 << 24, 3 << 24):
        raise UnsupportedModelError(f"{cursor.path} is a big-endian GGUF file; forerun reads little-endian ones")
    if version not in (2, 3):
        raise UnsupportedModelError(f"{cursor.path} is GGUF version {version}; forerun reads versions 2 and 3")
    num_tensors, num_pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
    if num_tensors * 24 + num_pairs * 13 > cursor.remaining:
        raise cursor.corrupt(f"{num_tensors} tensors and {num_pairs} keys don't fit in the file")
    return num_tensors, num_pairs


class _Info(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _read_info(cursor: _Cursor) -> _Info:
    name = cursor.string()
    num_dims = cursor.scalar("<I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.corrupt(f"tensor {name} has {num_dims} dimensions")
    dims = [cursor.scalar("<Q") for _ in range(num_dims)]
    while len(dims) > 1 and dims[-1] == 1:
        dims.pop()
    return _Info(name, tuple(reversed(dims)), cursor.scalar("<I"), cursor.scalar("<Q"))


def _data_start(cursor: _Cursor, alignment: Any) -> int:
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.corrupt(f"general.alignment is {alignment!r:.80}, expected a power of 2")
    return -(-cursor.position // alignment) * alignment


def _locate(cursor: _Cursor, info: _Info, start: int) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(info.kind)
        block_len, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"{cursor.path}: tensor {info.name} is of kind number {info.kind}, which forerun doesn't know"
        ) from error
    if kind.name not in _DEQUANTISED:
        raise UnsupportedModelError(
            f"{cursor.path}: tensor {info.name} is of kind {kind.name}, which forerun doesn't run"
        )
    if info.shape[-1] % block_len or 0 in info.shape:
        raise cursor.corrupt(f"tensor {info.name} has shape {info.shape}, {kind.name} needs rows of {block_len}")
    nbytes = math.prod(info.shape) // block_len * block_bytes
    return StoredTensor(cursor.buffer, start + info.offset, nbytes, kind.name, info.shape)


def strings(file: GGUFFile, key: str) -> list[str]:
    """Return the array of strings `key`. Raises CorruptModelError if it is missing or something else."""
    value = file.metadata.get(key)
    if not isinstance(value, StringArray):
        raise CorruptModelError(f"{file.path} has no list of strings {key}")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise CorruptModelError(f"{file.path}: {key} is not UTF-8; fetch the file again") from error
