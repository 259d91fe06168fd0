"""A GGUF file in other blocks is the same model: same metadata, same rows, only rounded."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from forerun.bench.requantise import write_gguf_like
from forerun.models.gguf_file import StringArray, read_file
from forerun.models.load import load_checkpoint
from forerun.models.weights import Checkpoint

pytest.importorskip("torch")

from tests.families import tiny_model, write_gguf  # needs torch


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    write_gguf("llama", tiny_model("llama"), tmp_path / "m.gguf")
    return load_checkpoint(str(tmp_path / "m.gguf"), cache_dir=tmp_path)


@pytest.mark.parametrize(("kind", "embed", "tolerance"), [("Q4_0", "Q8_0", 0.15), ("Q8_0", "Q8_0", 0.01)])
def test_matrices_get_the_blocks_and_all_else_is_copied(
    checkpoint: Checkpoint, tmp_path: Path, kind: str, embed: str, tolerance: float
) -> None:
    path = tmp_path / "new folder" / "r.gguf"
    write_gguf_like(checkpoint, path, kind)
    assert [file.name for file in path.parent.iterdir()] == ["r.gguf"]
    old, new = read_file(checkpoint.path), read_file(path)
    assert list(old.tensors) == list(new.tensors)
    for name, stored in old.tensors.items():
        before, after = stored.raw().to_float32(), new.tensors[name].raw().to_float32()
        matrix = before.ndim == 2 and before.shape[1] % 32 == 0
        assert new.tensors[name].kind == (
            (embed if name in ("token_embd.weight", "output.weight") else kind) if matrix else stored.kind
        )
        assert np.abs(after - before).max() <= tolerance * np.abs(before).max()
    assert any(tensor.kind == kind for tensor in new.tensors.values())
    for key, value in old.metadata.items():
        if key != "general.file_type":
            assert _plain(new.metadata[key]) == _plain(value), key
    again = load_checkpoint(str(path), cache_dir=tmp_path)
    assert again.config == checkpoint.config
    assert again.tokenizer.token_bytes == checkpoint.tokenizer.token_bytes


def test_heads_that_have_blocks_keep_them_beside_q4_0(tmp_path: Path) -> None:
    write_gguf("llama", tiny_model("llama"), tmp_path / "m.gguf", quant="Q4_1")
    write_gguf_like(load_checkpoint(str(tmp_path / "m.gguf"), cache_dir=tmp_path), tmp_path / "r.gguf", "Q4_0")
    kinds = {name: tensor.kind for name, tensor in read_file(tmp_path / "r.gguf").tensors.items()}
    assert kinds["token_embd.weight"] == "Q4_1"
    assert kinds["blk.0.attn_q.weight"] == "Q4_0"


def test_a_write_that_fails_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.quants, "quantize", full)
    with pytest.raises(OSError, match="No space left"):
        write_gguf_like(checkpoint, tmp_path / "x" / "r.gguf", "Q4_0")
    assert list((tmp_path / "x").iterdir()) == []


def _plain(value: object) -> object:
    if isinstance(value, StringArray):
        return value.decode()
    return value.tolist() if isinstance(value, np.ndarray) else value
