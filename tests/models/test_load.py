"""Names of models on this machine, adapters, the demo model, what loading must not import."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.errors import ModelError, UnsupportedModelError
from forerun.models.load import load_checkpoint
from forerun.models.store import ALIASES, default_cache_dir, list_models


def test_a_folder_with_only_gguf_files_says_which_to_name(llama_gguf: Path, tmp_path: Path, cache_dir: Path) -> None:
    shutil.copy(llama_gguf, tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=r"name one of them, such as .*tiny\.gguf"):
        load_checkpoint(str(tmp_path), cache_dir=cache_dir)


def test_an_empty_folder_says_what_was_expected(tmp_path: Path, cache_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_checkpoint(str(tmp_path), cache_dir=cache_dir)


def test_an_adapter_is_refused(llama_folder: Path, tmp_path: Path, cache_dir: Path) -> None:
    folder = Path(shutil.copytree(llama_folder, tmp_path / "adapter"))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="adapter"):
        load_checkpoint(str(folder), cache_dir=cache_dir)


def test_code_that_a_known_model_brings_is_not_needed(llama_folder: Path, tmp_path: Path, cache_dir: Path) -> None:
    folder = Path(shutil.copytree(llama_folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "x.Y"}}))
    assert load_checkpoint(str(folder), cache_dir=cache_dir).config.family == "llama"


def test_a_file_that_is_no_gguf_is_refused_whatever_its_name(tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"something else entirely")
    with pytest.raises(ModelError, match="no GGUF file"):
        load_checkpoint(str(tmp_path / "model.bin"), cache_dir=cache_dir)


def test_a_folder_named_like_an_alias_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="offline"):
        load_checkpoint("smollm2-135m", cache_dir=tmp_path / "cache", offline=True)


def test_loading_imports_neither_torch_nor_transformers(llama_folder: Path, llama_gguf: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from forerun.models.load import load_checkpoint\n"
        "assert not {'gguf', 'tokenizers', 'jinja2', 'huggingface_hub'} & sys.modules.keys()\n"
        "for name in sys.argv[2:]:\n"
        "    checkpoint = load_checkpoint(name, cache_dir=Path(sys.argv[1]))\n"
        "    checkpoint.tokenizer.encode_chat([{'role': 'user', 'content': 'hi'}])\n"
        "    for name in checkpoint.names(): checkpoint.tensor(name).to_float32()\n"
        "assert not {'torch', 'transformers', 'huggingface_hub', 'requests'} & sys.modules.keys()\n"
    )
    arguments = [str(tmp_path), str(llama_folder), str(llama_gguf)]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=60)


# The demo model, where it has been fetched before

demo = pytest.mark.skipif(
    not any(entry.name == "smollm2-135m" for entry in list_models(default_cache_dir())),
    reason="the demo model has not been fetched",
)


@demo
def test_the_demo_model_is_what_its_authors_published() -> None:
    checkpoint = load_checkpoint("smollm2-135m", offline=True)
    assert checkpoint.config.num_layers == 30
    assert (checkpoint.config.max_len, checkpoint.config.ropes[0].theta) == (8192, 100000.0)
    assert checkpoint.kinds == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert ALIASES["smollm2-135m"].nbytes > checkpoint.nbytes > 90_000_000
    tokenizer = checkpoint.tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (49152, 1, (2,), False)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@demo
def test_the_demo_tokenizer_splits_digits_one_by_one() -> None:
    tokenizer = load_checkpoint("smollm2-135m", offline=True).tokenizer
    ids = tokenizer.encode("In 2024: \u00b2\u00b3 日本 😀")
    pieces = [tokenizer.token_bytes[token_id] for token_id in ids]
    assert pieces[:7] == [b"In", b" ", b"2", b"0", b"2", b"4", b":"]
    assert b"".join(pieces).decode() == "In 2024: \u00b2\u00b3 日本 😀"
