"""Our lean decoder on torch: fp32, bf16 and fp16 weights, CPU and CUDA, all families of `DecoderConfig`."""

from forerun.backends.torch.device import resolve_device, resolve_dtype
from forerun.backends.torch.session import TorchSession

__all__ = ["TorchSession", "resolve_device", "resolve_dtype"]
