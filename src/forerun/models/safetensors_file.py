"""Reading safetensors files: an 8-byte length, a JSON header, then the tensors.

Read here instead of with the safetensors package because numpy has no bfloat16 and the blocks stay mapped.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import CorruptModelError, ModelError, UnsupportedModelError
from forerun.models.tensorfile import StoredTensor, check_extents, map_file

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER = 100_000_000  # bytes; more can't be names and shapes
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a Hugging Face folder, one file or the shards that its index names."""
    index = folder / _INDEX
    if index.is_file():
        return _read_shards(folder, index)
    if (folder / _SINGLE).is_file():
        return read_file(folder / _SINGLE)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth", ".pt"))
    if others:
        raise UnsupportedModelError(
            f"{folder} has its weights as pickle ({others[0]}), which can run code when read; "
            "forerun reads safetensors: save the model again with safe_serialization=True"
        )
    raise ModelError(f"{folder} has no weights: expected {_SINGLE} or {_INDEX}")


def _read_shards(folder: Path, index: Path) -> dict[str, StoredTensor]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptModelError(f"{index} is not a valid index of shards; fetch the file again") from error
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(names.values())):
        path = folder / shard
        if Path(shard).name != shard:
            raise CorruptModelError(f"{index} names a shard outside the folder: {shard}")
        if not path.is_file():
            raise ModelError(f"{path} is missing; {_INDEX} names it: fetch the shard")
        tensors.update(read_file(path))
    missing = sorted(names.keys() - tensors.keys())
    if missing:
        raise CorruptModelError(f"{folder}: tensor {missing[0]} is in {_INDEX} but in none of the shards")
    return tensors


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file."""
    buffer = map_file(path)
    header, start = _read_header(path, buffer)
    tensors = {name: _parse_entry(path, buffer, start, name, entry) for name, entry in header.items()}
    check_extents(path, tensors.items())
    return tensors


def _read_header(path: Path, buffer: np.ndarray) -> tuple[dict[str, Any], int]:
    if buffer.size < 8:
        raise CorruptModelError(f"{path} is truncated: {buffer.size} bytes, a safetensors header needs 8")
    length = int.from_bytes(buffer[:8].tobytes(), "little")
    if length > min(buffer.size - 8, _MAX_HEADER):
        raise CorruptModelError(
            f"{path} is truncated or no safetensors file: its header wants {length} bytes, "
            f"{buffer.size - 8} follow; fetch the file again"
        )
    try:
        header = json.loads(buffer[8 : 8 + length].tobytes())
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"{path} has a damaged safetensors header; fetch the file again") from error
    if not isinstance(header, dict):
        raise CorruptModelError(f"{path} has a damaged safetensors header: expected an object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _parse_entry(path: Path, buffer: np.ndarray, start: int, name: str, entry: Any) -> StoredTensor:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        valid = all(type(size) is int and size >= 0 for size in (*shape, begin, end)) and begin <= end
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid or not isinstance(kind, str):
        raise CorruptModelError(f"{path} has a damaged entry for tensor {name}; fetch the file again")
    if kind in _ITEM_BYTES and math.prod(shape) * _ITEM_BYTES[kind] != end - begin:
        raise CorruptModelError(f"{path}: tensor {name} of shape {shape}, {kind} can't have {end - begin} bytes")
    return StoredTensor(buffer, start + begin, end - begin, kind, shape)
