"""The settings of a run: frozen, checked, resolved once, so that every "auto" becomes a value that can be printed."""

import os
import platform
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from forerun.errors import OptionError
from forerun.types import VERIFY_RULES, Verify

Dtype = Literal["auto", "fp32", "bf16", "fp16", "q8", "q4"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
BACKENDS = ("auto", "cpu", "torch", "transformers")
BACKEND_DTYPES = {"cpu": ("auto", "bf16", "q8", "q4"), "torch": ("auto", "fp32", "bf16", "fp16")}
BACKEND_DTYPES["transformers"] = BACKEND_DTYPES["torch"]


@dataclass(frozen=True)
class Config:
    """What to run, and how. `resolved` has no "auto" left."""

    target: str
    drafter: str = "auto"
    k: int | Literal["auto"] = "auto"
    verify: Verify = "block"
    dtype: Dtype = "auto"
    device: str = "auto"
    backend: str = "auto"  # cpu: our own kernels; torch; transformers: that library, for any family
    drafter_device: str | None = None  # None: the target's
    threads: int | None = None  # None: the cores that this process may use
    cache_dir: Path | None = None  # None: the user's cache folder
    offline: bool = False
    max_running: int = 64  # sequences in one round
    prefill_rows: int = 512  # rows of prompts in one round
    cache_tokens: int | None = None  # positions of the target's cache over all sequences; None: by memory

    def __post_init__(self) -> None:
        if self.k != "auto" and not (isinstance(self.k, int) and 0 <= self.k <= 64):
            raise OptionError(f"k is {self.k!r}; expected auto or a whole number from 0 to 64")
        if self.verify not in VERIFY_RULES:
            raise OptionError(f"verify is {self.verify!r}; expected one of {', '.join(VERIFY_RULES)}")
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype is {self.dtype!r}; expected one of {', '.join(DTYPES)}")
        if self.backend not in BACKENDS:
            raise OptionError(f"backend is {self.backend!r}; expected one of {', '.join(BACKENDS)}")
        check_backend(self.backend, self.dtype, self.device)
        for name in ("threads", "max_running", "prefill_rows", "cache_tokens"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise OptionError(f"{name} is {value!r}; expected a whole number, 1 or more")

    def as_dict(self) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def check_backend(backend: str, dtype: str, device: str) -> None:
    """Raise OptionError if that backend can't have it: before anything is loaded, so before "auto" is resolved."""
    dtypes = BACKEND_DTYPES.get(backend, DTYPES)
    if dtype not in dtypes:
        other = next(name for name, has in BACKEND_DTYPES.items() if dtype in has)
        raise OptionError(
            f"dtype is {dtype!r}; backend {backend} has {', '.join(dtypes)}, --backend {other} has {dtype}"
        )
    if device not in ("auto", "cpu") and (backend == "cpu" or dtype not in BACKEND_DTYPES["torch"]):
        why = "backend cpu" if backend == "cpu" else f"dtype {dtype}"
        raise OptionError(f"device is {device!r}; {why} runs on the cpu only")


def total_memory() -> int:
    """Return how many bytes of memory this machine has."""
    if sys.platform == "win32":
        import ctypes

        status = (ctypes.c_uint64 * 8)()  # MEMORYSTATUSEX: its length and the load, then the physical total
        ctypes.cast(status, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(status)
        ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
        return int(status[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def return_free_memory() -> None:
    """Give back to the system what loading has freed; glibc alone keeps it, 25 MB after a tokenizer."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def processor_name() -> str:
    """Return the model name of the processor, as far as the system says it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
