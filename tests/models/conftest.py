"""Saved tiny models, made once, and a cache folder of its own for each test."""

from pathlib import Path

import pytest

from tests.families import save_hf, write_gguf


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in Hugging Face format; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("llama")
    save_hf("llama", folder)
    return folder


@pytest.fixture(scope="session")
def llama_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama as a GGUF file of F32; tests copy it before they change it."""
    from tests.families import tiny_model

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf("llama", tiny_model("llama"), path)
    return path
