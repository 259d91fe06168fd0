"""From a checkpoint and settings to a `Session`: the one place that knows which backends there are."""

from importlib.util import find_spec
from typing import Any

from forerun.backends.base import Session
from forerun.config import BACKEND_DTYPES, BACKENDS, check_backend
from forerun.errors import ModelError, OptionError, UnsupportedModelError
from forerun.models.load import ForeignFolder, load_checkpoint, load_foreign
from forerun.models.weights import Checkpoint


def choose_backend(backend: str, dtype: str, device: str) -> str:
    """Return cpu, torch or transformers: the cpu backend wherever it can do what is asked for."""
    if backend not in BACKENDS:
        raise OptionError(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    check_backend(backend, dtype, device)
    if backend != "auto":
        return backend
    if dtype not in BACKEND_DTYPES["torch"]:
        return "cpu"
    if device == "auto" and not _has_cuda():
        device = "cpu"
    return "cpu" if device == "cpu" and dtype in BACKEND_DTYPES["cpu"] else "torch"


def load_model(name: str, *, backend: str, **settings: Any) -> Checkpoint | ForeignFolder:
    """Return the model called `name` for a backend; with "auto" a family that we don't run is left to transformers.

    `settings` are those of `load_checkpoint`. Raises ModelError or DownloadError.
    """
    if backend == "transformers":
        return load_foreign(name, **settings)
    try:
        return load_checkpoint(name, **settings)
    except UnsupportedModelError as error:
        if backend != "auto":
            raise
        try:
            foreign = load_foreign(name, **settings)
        except ModelError:
            raise error from None
        if find_spec("transformers") is None or find_spec("torch") is None:
            raise UnsupportedModelError(f"{error}; pip install 'forerun[torch]' to run it by transformers") from None
        return foreign


def open_session(
    checkpoint: Checkpoint | ForeignFolder,
    *,
    dtype: str,
    device: str,
    threads: int | None,
    cache_tokens: int | None = None,
    backend: str = "auto",
) -> Session:
    """Load a model's weights. What is "auto" is chosen here; the session's own attributes say what it became."""
    if isinstance(checkpoint, ForeignFolder):
        check_backend("transformers", dtype, device)
        return _transformers_session(
            checkpoint, dtype=dtype, device=device, num_threads=threads, cache_tokens=cache_tokens
        )
    if choose_backend(backend, dtype, device) == "cpu":
        from forerun.backends.cpu import CpuSession

        return CpuSession(checkpoint, dtype=dtype, num_threads=threads, cache_tokens=cache_tokens)
    try:
        from forerun.backends.torch import TorchSession
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise OptionError(
            f"dtype {dtype} on device {device} needs torch, which isn't installed; pip install 'forerun[torch]'"
        ) from error
    return TorchSession(checkpoint, dtype=dtype, device=device, num_threads=threads, cache_tokens=cache_tokens)


def _transformers_session(checkpoint: ForeignFolder, **settings: Any) -> Session:
    try:
        from forerun.backends.transformers import TransformersSession
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise OptionError(
            f"backend transformers needs {error.name}, which isn't installed; pip install 'forerun[torch]'"
        ) from error
    return TransformersSession(checkpoint, **settings)


def _has_cuda() -> bool:
    """Return whether torch is installed and sees a CUDA device; without an NVIDIA driver torch isn't even imported."""
    from ctypes.util import find_library

    if find_spec("torch") is None or not (find_library("cuda") or find_library("nvcuda")):
        return False
    from forerun.backends.torch import resolve_device

    return resolve_device("auto") == "cuda"
