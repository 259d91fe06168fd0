"""What the numbers were taken on: hardware, versions, memory, and how fast memory can be read."""

import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from forerun.config import available_cores, processor_name
from forerun.sampling.arrays import Array, namespace

_PACKAGES = ("forerun", "numpy", "torch", "transformers", "tokenizers", "gguf", "safetensors", "llama_cpp_python")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
Clock = Callable[[], float]


class Bandwidth(NamedTuple):
    """The best of several reads of a buffer that no cache holds."""

    bytes_per_s: float
    buffer_bytes: int
    method: str


def hardware(device: str) -> dict[str, Any]:
    """Return what can be known of the machine without privileges; None where it doesn't say."""
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "cores_available": available_cores(),
        "memory_bytes": _memory_bytes(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "gpu": _gpu_names() if device.startswith("cuda") else None,
        "os": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of those packages that matter and are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def cpu_flags() -> frozenset[str]:
    """Return the instruction sets that the processor says it has, in the words of the system; none if it's silent."""
    found = _key_values(Path("/proc/cpuinfo"))
    return frozenset(found.get("flags", found.get("Features", "")).split())


def memory() -> dict[str, int | None]:
    """Return this process's resident bytes, now and at their peak. Mapped pages of files count once."""
    status = _key_values(Path("/proc/self/status"))
    if "VmRSS" in status:
        names = {"resident": "VmRSS", "resident_anonymous": "RssAnon", "resident_file": "RssFile", "peak": "VmHWM"}
        return {name: int(status[key].split()[0]) << 10 for name, key in names.items() if key in status}
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"resident": None, "peak": peak if sys.platform == "darwin" else peak << 10}
    return {"resident": None, "peak": None}


def process_age_s() -> float | None:
    """Return how long this process has been running, interpreter start included; None where the system doesn't say."""
    try:
        after_name = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return uptime_s - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Return the size of the largest cache that the first core can use."""
    sizes = []
    for path in folder.glob("index*/size"):
        with suppress(OSError, ValueError, KeyError):
            text = path.read_text(encoding="ascii").strip()
            sizes.append(int(text[:-1]) * _UNITS[text[-1]])
    return max(sizes, default=None)


def read_bandwidth(
    example: Array, *, threads: int, num_bytes: int = 512 << 20, repeats: int = 6, clock: Clock = perf_counter
) -> Bandwidth:
    """Measure how fast memory is read where `example` lives: a sum over float32, by the array library of the model.

    torch sums with its own threads; numpy sums in as many threads as are asked for.
    """
    xp, device = namespace(example), array_api_compat.device(example)
    buffer = xp.ones(num_bytes // 4, dtype=xp.float32, device=device)
    if array_api_compat.is_numpy_array(example):
        with ThreadPoolExecutor(threads) as pool:
            parts = np.array_split(buffer, threads)
            seconds = _best(lambda: sum(pool.map(np.sum, parts)), repeats, clock)
        method = f"numpy sum of float32 in {threads} threads"
    else:
        seconds = _best(lambda: float(xp.sum(buffer)), repeats, clock)  # float() waits for the device
        method = f"torch sum of float32 on {device}"
        method += f" with {threads} threads" if str(device) == "cpu" else ""
    return Bandwidth(num_bytes / seconds, num_bytes, f"{method}, {num_bytes >> 20} MB, best of {repeats}")


def _best(read: Callable[[], object], repeats: int, clock: Clock) -> float:
    read()
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        read()
        best = min(best, clock() - start)
    return best


def _memory_bytes() -> int | None:
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _gpu_names() -> list[str]:
    folder = Path("/proc/driver/nvidia/gpus")
    return [_key_values(path).get("Model", "unknown") for path in sorted(folder.glob("*/information"))]


def _key_values(path: Path) -> dict[str, str]:
    """Return the `key: value` lines of a file; where a key comes twice, the first."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, colon, value = line.partition(":")
            if colon:
                found.setdefault(key.strip(), value.strip())
    return found
