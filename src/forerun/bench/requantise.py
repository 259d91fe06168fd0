"""The GGUF file of a model in other blocks, so that an engine can be raced at the kind where its kernels are best."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

from forerun.models.gguf_file import read_file
from forerun.models.tensorfile import RawTensor
from forerun.models.weights import Checkpoint

KINDS = ("Q4_0", "Q8_0")
_BLOCK = 32  # values in a block of either kind
_HEADS = ("token_embd.weight", "output.weight")  # in finer blocks than the rest, as quantised files have them


def write_gguf_like(checkpoint: Checkpoint, path: Path, kind: str) -> None:
    """Write the GGUF file of `checkpoint` to `path` with its matrices in blocks of `kind`, whole or not at all.

    Tensors are those of the file, rows in its order, and all metadata is copied, the tokenizer too. With Q4_0,
    embedding and head keep the blocks they have, or become Q8_0 if they have none. Raises OSError.
    """
    assert checkpoint.source_kind == "gguf", checkpoint.source_kind
    assert kind in KINDS, kind
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    try:
        _write(checkpoint.path, Path(name), kind)
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _write(source: Path, path: Path, kind: str) -> None:
    import gguf  # here, for it takes a while to load

    reader = gguf.GGUFReader(source)
    fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
    architecture = next(field.contents() for field in fields if field.name == gguf.Keys.General.ARCHITECTURE)
    writer = gguf.GGUFWriter(path, architecture)
    for field in fields:
        value = field.contents()
        if field.name == gguf.Keys.General.FILE_TYPE:
            value = int(gguf.LlamaFileType[f"MOSTLY_{kind}"])
        elif field.name == gguf.Keys.General.ARCHITECTURE:
            continue  # the writer's own
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(field.name, value, field.types[0], sub_type=field.types[-1] if is_array else None)
    for name, stored in read_file(source).tensors.items():
        tensor = stored.raw()
        wanted = _kind_of(name, tensor, kind)
        data = tensor.data
        if wanted != tensor.kind:
            data = gguf.quants.quantize(tensor.to_float32(), gguf.GGMLQuantizationType[wanted])
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=gguf.GGMLQuantizationType[wanted])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind_of(name: str, tensor: RawTensor, kind: str) -> str:
    if len(tensor.shape) != 2 or tensor.shape[1] % _BLOCK:
        return tensor.kind
    if kind == "Q4_0" and name in _HEADS:
        return "Q8_0" if tensor.kind in ("F32", "F16", "BF16") else tensor.kind
    return kind
