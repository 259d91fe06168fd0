"""The fast path on CPUs: block-quantised weights and our own C++ kernels. Neither torch nor transformers is needed."""

from forerun.backends.cpu.session import CpuSession

__all__ = ["CpuSession"]
