"""From a checkpoint and settings to a `Session`: the one place that knows which backends there are."""

from forerun.backends.base import Session
from forerun.errors import OptionError
from forerun.models.weights import Checkpoint


def open_session(
    checkpoint: Checkpoint, *, dtype: str, device: str, threads: int | None, cache_tokens: int | None = None
) -> Session:
    """Load a model's weights. `dtype` and `device` may be "auto"; the session's own attributes say what they became."""
    try:
        from forerun.backends.torch import TorchSession
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise OptionError("this backend needs torch, which isn't installed; pip install 'forerun[torch]'") from error
    return TorchSession(checkpoint, dtype=dtype, device=device, num_threads=threads, cache_tokens=cache_tokens)
