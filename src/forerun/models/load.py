"""From the name of a model to a `Checkpoint`.

A name is an alias, a folder in Hugging Face format, a `.gguf` file, a hub id `org/name`, or a GGUF file in a hub
repository, `org/name:file.gguf` or `org/name/file.gguf`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config import return_free_memory
from forerun.errors import CorruptModelError, ModelError, UnsupportedModelError
from forerun.models import gguf_file, safetensors_file
from forerun.models.families import FAMILIES, config_from_gguf, config_from_hf, hf_biases
from forerun.models.files import Progress, no_progress
from forerun.models.gguf_tokenizer import load_gguf_tokenizer
from forerun.models.hub import parse_hub_name
from forerun.models.layout import gguf_biases, gguf_sources, hf_sources
from forerun.models.store import ALIASES, default_cache_dir, fetch
from forerun.models.tensorfile import StoredTensor
from forerun.models.tokenizer import Tokenizer, load_hf_tokenizer, read_json
from forerun.models.weights import Checkpoint


@dataclass(frozen=True)
class ForeignFolder:
    """A folder in Hugging Face format whose net is left to another library."""

    name: str
    path: Path
    tokenizer: Tokenizer
    config: Mapping[str, Any]  # config.json
    source_kind: str = "safetensors"


def load_foreign(
    name: str, *, cache_dir: Path | None = None, offline: bool = False, progress: Progress | None = None
) -> ForeignFolder:
    """Return the folder called `name`, of any family, fetched first if need be. See `load_checkpoint`."""
    path = _find_model(name, cache_dir or default_cache_dir(), offline=offline, progress=progress or no_progress)
    if not path.is_dir():
        raise UnsupportedModelError(f"{path} is a GGUF file; transformers runs folders in Hugging Face format")
    _refuse_adapter(path)
    raw = read_json(path / "config.json")
    if not raw:
        raise ModelError(_no_config(name, path))
    return ForeignFolder(name, path, load_hf_tokenizer(path, raw), raw)


def load_checkpoint(
    name: str, *, cache_dir: Path | None = None, offline: bool = False, progress: Progress | None = None
) -> Checkpoint:
    """Return the model called `name`, fetched first if it isn't on this machine.

    `cache_dir` is `default_cache_dir()` unless given; with `offline` nothing is fetched; `progress(label, done, total)`
    is told how far fetching and reading are. Raises ModelError or DownloadError.
    """
    cache_dir, progress = cache_dir or default_cache_dir(), progress or no_progress
    path = _find_model(name, cache_dir, offline=offline, progress=progress)
    progress(f"reading {name}", 0, None)
    checkpoint = _load_folder(name, path) if path.is_dir() else _load_gguf(name, path, cache_dir)
    return_free_memory()
    return checkpoint


def _find_model(name: str, cache_dir: Path, *, offline: bool, progress: Progress) -> Path:
    """Return the folder or GGUF file that `name` stands for, fetched first if need be."""
    try:
        path = Path(name).expanduser()
        if name and name not in ALIASES and (path.is_dir() or path.is_file()):
            return path
    except (OSError, RuntimeError) as error:  # a folder that can't be entered, a name that is too long, no such home
        raise ModelError(f"can't look for {name:.200}: {error}") from error
    return fetch(name, cache_dir, offline=offline, progress=progress)


def _load_folder(name: str, folder: Path) -> Checkpoint:
    _refuse_adapter(folder)
    raw = read_json(folder / "config.json")
    if not raw:
        raise ModelError(_no_config(name, folder))
    config = config_from_hf(raw)
    tensors = safetensors_file.read_folder(folder)
    text = raw.get("text_config")
    biases = hf_biases({**text, "model_type": raw["model_type"]} if isinstance(text, Mapping) else raw)
    return Checkpoint(
        name=name,
        path=folder,
        source_kind="safetensors",
        config=config,
        tokenizer=load_hf_tokenizer(folder, raw),
        tensors=tensors,
        sources=hf_sources(config, biases, tensors),
    )


def _refuse_adapter(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModelError(f"{folder} is an adapter, not a model: merge it into its base model and save that")


def _no_config(name: str, folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files:
        return f"{folder} has no config.json but GGUF files: name one of them, such as {folder / files[0]}"
    gguf = f"; if {name} holds GGUF files, name one of them: {name}:FILE.gguf" if parse_hub_name(name) else ""
    return f"{folder} has no config.json: expected a folder in Hugging Face format{gguf}"


def _load_gguf(name: str, path: Path, cache_dir: Path) -> Checkpoint:
    file = gguf_file.read_file(path)
    embed = file.tensors.get("token_embd.weight")
    config = config_from_gguf(
        file.metadata,
        vocab_size=embed.shape[0] if embed else 1,
        tied_head="output.weight" not in file.tensors,
        factors=_rope_factors(path, file.tensors.get("rope_freqs.weight")),
    )
    biases = gguf_biases(file.tensors)
    if FAMILIES[config.family].qkv_bias:
        biases = tuple(dict.fromkeys(("q_bias", "k_bias", "v_bias", *biases)))
    return Checkpoint(
        name=name,
        path=path,
        source_kind="gguf",
        config=config,
        tokenizer=load_gguf_tokenizer(file, cache_dir),
        tensors=file.tensors,
        sources=gguf_sources(config, biases),
    )


def _rope_factors(path: Path, stored: StoredTensor | None) -> tuple[float, ...]:
    if stored is None:
        return ()
    if stored.kind != "F32" or len(stored.shape) != 1:
        raise CorruptModelError(
            f"{path}: rope_freqs.weight is {stored.kind} of shape {stored.shape}, expected F32 (n,)"
        )
    return tuple(stored.raw().data.tolist())
