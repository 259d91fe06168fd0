"""What "auto" means for devices and number types, from what this machine has."""

import platform

import torch

from forerun.backends.torch.linear import has_onednn
from forerun.errors import OptionError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(requested: str) -> str:
    """Return a device that exists: "auto" is CUDA if there is one, else the CPU. Raises OptionError."""
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(requested)
    except RuntimeError:
        raise OptionError(f"device {requested!r} isn't one; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"device {requested!r} isn't supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device {requested!r} asked for, but torch sees {torch.cuda.device_count()} CUDA devices")
    return requested


def resolve_dtype(requested: str, device: str) -> str:
    """Return "fp32", "bf16" or "fp16" for weights on `device`, itself resolved. Raises OptionError.

    "auto" is bf16 where the processor computes in it, else fp16 on CUDA and fp32 on a CPU.
    """
    on_cuda = torch.device(device).type == "cuda"
    if requested == "auto":
        if on_cuda:
            return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        return "bf16" if _cpu_computes_bf16() else "fp32"
    if requested not in DTYPES:
        raise OptionError(f"dtype {requested!r} isn't one of the torch backend's; use auto, {', '.join(DTYPES)}")
    if requested == "fp16" and not on_cuda:
        raise OptionError("dtype 'fp16' isn't supported on a CPU, where it is slow and overflows; use bf16 or fp32")
    return requested


def _cpu_computes_bf16() -> bool:
    """Whether products of bf16 numbers are instructions of this processor (AVX512-BF16, AMX, Arm BF16)."""
    if not has_onednn() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True  # there oneDNN's answer is about the instructions; on x86 it counts emulation in
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
