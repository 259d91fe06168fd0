"""From a checkpoint and settings to a `Session`: the one place that knows which backends there are."""

from forerun.backends.base import Session
from forerun.config import BACKEND_DTYPES, BACKENDS, check_backend
from forerun.errors import OptionError
from forerun.models.weights import Checkpoint


def choose_backend(backend: str, dtype: str, device: str) -> str:
    """Return cpu or torch: the cpu backend wherever it can do what is asked for."""
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


def open_session(
    checkpoint: Checkpoint,
    *,
    dtype: str,
    device: str,
    threads: int | None,
    cache_tokens: int | None = None,
    backend: str = "auto",
) -> Session:
    """Load a model's weights. What is "auto" is chosen here; the session's own attributes say what it became."""
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


def _has_cuda() -> bool:
    """Return whether torch is installed and sees a CUDA device; without an NVIDIA driver torch isn't even imported."""
    from ctypes.util import find_library
    from importlib.util import find_spec

    if find_spec("torch") is None or not (find_library("cuda") or find_library("nvcuda")):
        return False
    from forerun.backends.torch import resolve_device

    return resolve_device("auto") == "cuda"
