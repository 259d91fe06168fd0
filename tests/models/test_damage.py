"""Files cut short or changed: one error of ours, quickly, whatever the damage; never a large allocation."""

import json
import random
import resource
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forerun.errors import CorruptModelError, ForerunError, ModelError, UnsupportedModelError
from forerun.models import gguf_file, safetensors_file
from forerun.models.load import load_checkpoint


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Let an allocation that follows a damaged length fail instead of filling the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def load(path: Path, cache_dir: Path) -> None:
    """Load all of a model, or end in an error of ours."""
    try:
        checkpoint = load_checkpoint(str(path), cache_dir=cache_dir)
    except ForerunError:
        return
    for name in checkpoint.names():
        checkpoint.tensor(name).to_float32()


def header_len(path: Path) -> int:
    """Where the tensors of a GGUF file begin."""
    return min(tensor.offset for tensor in gguf_file.read_file(path).tensors.values())


def test_a_gguf_cut_anywhere_is_refused(llama_gguf: Path, tmp_path: Path, cache_dir: Path) -> None:
    whole, path = llama_gguf.read_bytes(), tmp_path / "cut.gguf"
    rng = random.Random(0)
    inside = [rng.randrange(header_len(llama_gguf)) for _ in range(150)]
    for length in [0, 1, 3, 4, 7, 8, 15, 16, 23, 24, 25, *inside, header_len(llama_gguf), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptModelError, match=r"cut\.gguf"):
            load_checkpoint(str(path), cache_dir=cache_dir)


def test_a_gguf_with_changed_header_bytes_loads_or_is_refused(
    llama_gguf: Path, tmp_path: Path, cache_dir: Path
) -> None:
    whole, path = llama_gguf.read_bytes(), tmp_path / "changed.gguf"
    rng, size = random.Random(1), header_len(llama_gguf)
    for trial in range(250):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(size if trial % 2 else 1200)] = rng.randrange(256)
        path.write_bytes(data)
        load(path, cache_dir)


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 2**40, 2**32])
@pytest.mark.parametrize("offset", [8, 16, 24])
def test_absurd_counts_are_refused_before_anything_is_allocated(
    offset: int, value: int, llama_gguf: Path, tmp_path: Path, cache_dir: Path
) -> None:
    data = bytearray(llama_gguf.read_bytes())
    data[offset : offset + 8] = struct.pack("<Q", value)
    (tmp_path / "huge.gguf").write_bytes(data)
    with pytest.raises(CorruptModelError):
        load_checkpoint(str(tmp_path / "huge.gguf"), cache_dir=cache_dir)


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 2**40])
def test_absurd_array_lengths_are_refused(value: int, llama_gguf: Path, tmp_path: Path, cache_dir: Path) -> None:
    whole = llama_gguf.read_bytes()
    for key in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type", b"tokenizer.ggml.merges"):
        data, begin = bytearray(whole), whole.index(key) + len(key) + 8
        data[begin : begin + 8] = struct.pack("<Q", value)
        (tmp_path / "huge.gguf").write_bytes(data)
        with pytest.raises(CorruptModelError):
            load_checkpoint(str(tmp_path / "huge.gguf"), cache_dir=cache_dir)


@pytest.mark.parametrize(
    ("magic", "error", "named"),
    [
        (b"GGML\x03\0\0\0", CorruptModelError, "no GGUF file"),
        (b"PK\x03\x04\x03\0\0\0", CorruptModelError, "no GGUF file"),
        (b"GGUF\x01\0\0\0", UnsupportedModelError, "version 1"),
        (b"GGUF\0\0\0\x03", UnsupportedModelError, "big-endian"),
    ],
)
def test_other_formats_are_told_by_their_first_bytes(
    magic: bytes, error: type[Exception], named: str, llama_gguf: Path, tmp_path: Path, cache_dir: Path
) -> None:
    (tmp_path / "other.gguf").write_bytes(magic + llama_gguf.read_bytes()[8:])
    with pytest.raises(error, match=named):
        load_checkpoint(str(tmp_path / "other.gguf"), cache_dir=cache_dir)


def test_an_unknown_kind_of_tensor_is_refused_by_number(llama_gguf: Path, tmp_path: Path, cache_dir: Path) -> None:
    data = bytearray(llama_gguf.read_bytes())
    name = b"blk.1.ffn_down.weight"
    kind_at = data.index(name) + len(name) + 4 + 16
    data[kind_at : kind_at + 4] = struct.pack("<I", 77)
    (tmp_path / "kind.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ffn_down\.weight is of kind number 77"):
        load_checkpoint(str(tmp_path / "kind.gguf"), cache_dir=cache_dir)


def test_overlapping_tensors_of_a_gguf_are_refused(llama_gguf: Path, tmp_path: Path, cache_dir: Path) -> None:
    data = bytearray(llama_gguf.read_bytes())
    name = b"blk.1.ffn_down.weight"
    offset_at = data.index(name) + len(name) + 4 + 16 + 4
    data[offset_at : offset_at + 8] = struct.pack("<Q", 0)
    (tmp_path / "overlap.gguf").write_bytes(data)
    with pytest.raises(CorruptModelError, match="overlaps"):
        load_checkpoint(str(tmp_path / "overlap.gguf"), cache_dir=cache_dir)


# safetensors


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def test_safetensors_cut_anywhere_are_refused(folder: Path, cache_dir: Path) -> None:
    path = folder / "model.safetensors"
    whole, rng = path.read_bytes(), random.Random(2)
    for length in [0, 1, 7, 8, 9, *(rng.randrange(len(whole)) for _ in range(60)), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptModelError, match=r"model\.safetensors"):
            load_checkpoint(str(folder), cache_dir=cache_dir)


def test_safetensors_with_changed_header_bytes_load_or_are_refused(folder: Path, cache_dir: Path) -> None:
    path = folder / "model.safetensors"
    whole, rng = path.read_bytes(), random.Random(3)
    size = 8 + int.from_bytes(whole[:8], "little")
    for trial in range(200):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(size if trial % 8 else 8)] = rng.randrange(256)
        path.write_bytes(data)
        load(folder, cache_dir)


def with_header(folder: Path, header: object) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"x": 3},
        {"x": {}},
        {"x": {**ENTRY, "shape": [2, -2]}},
        {"x": {**ENTRY, "shape": [2, 2.0]}},
        {"x": {**ENTRY, "shape": [2**40, 2**40]}},
        {"x": {**ENTRY, "shape": 4}},
        {"x": {**ENTRY, "data_offsets": [0, 15]}},
        {"x": {**ENTRY, "data_offsets": [16, 0]}},
        {"x": {**ENTRY, "data_offsets": [64, 80]}},
        {"x": {**ENTRY, "data_offsets": [0]}},
        {"x": {**ENTRY, "dtype": 4}},
        {"x": ENTRY, "y": {**ENTRY, "data_offsets": [8, 24]}},
        {"x": {**ENTRY, "dtype": "I64", "data_offsets": [16, 0]}},
    ],
)
def test_impossible_entries_of_a_safetensors_header_are_refused(header: object, folder: Path) -> None:
    with_header(folder, header)
    with pytest.raises(CorruptModelError, match=r"model\.safetensors"):
        safetensors_file.read_file(folder / "model.safetensors")


def test_a_deeply_nested_header_is_refused(folder: Path) -> None:
    text = b"[" * 100_000
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CorruptModelError):
        safetensors_file.read_file(folder / "model.safetensors")


def test_odd_offsets_are_copied_to_aligned_memory(folder: Path) -> None:
    header = {"x": {**ENTRY, "data_offsets": [1, 17]}}
    with_header(folder, header)
    tensor = safetensors_file.read_file(folder / "model.safetensors")["x"].raw()
    assert tensor.data.flags.aligned
    np.testing.assert_array_equal(tensor.data, np.zeros((2, 2)))


# Folders


def test_a_shard_that_the_index_names_is_missed_by_name(folder: Path, cache_dir: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        load_checkpoint(str(folder), cache_dir=cache_dir)


@pytest.mark.parametrize(
    "content", ["{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"x": "../x"}}', '{"weight_map": {"x": null}}']
)
def test_a_damaged_index_is_refused(content: str, folder: Path, cache_dir: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError):
        load_checkpoint(str(folder), cache_dir=cache_dir)


def test_a_tensor_of_the_index_that_no_shard_has_is_named(folder: Path, cache_dir: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "ghost": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptModelError, match="ghost"):
        load_checkpoint(str(folder), cache_dir=cache_dir)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"3", b'{"model_type": "llama"', b"[" * 100_000])
def test_a_damaged_config_is_refused(content: bytes, folder: Path, cache_dir: Path) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CorruptModelError, match=r"config\.json"):
        load_checkpoint(str(folder), cache_dir=cache_dir)


def test_weights_as_pickle_are_refused(folder: Path, cache_dir: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin"):
        load_checkpoint(str(folder), cache_dir=cache_dir)


def test_a_folder_without_weights_says_what_was_looked_for(folder: Path, cache_dir: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"expected model\.safetensors"):
        load_checkpoint(str(folder), cache_dir=cache_dir)
