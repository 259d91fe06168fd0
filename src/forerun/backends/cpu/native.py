"""The compiled module, or its numpy twin where the package was installed without a compiler."""

import warnings
from functools import cache
from importlib import import_module
from typing import Any


@cache
def load_native() -> Any:
    """Return `forerun._native`; without it the numpy reference of the same pass, with one warning."""
    try:
        return import_module("forerun._native")
    except ImportError:
        from forerun.backends.cpu import reference

        warnings.warn(
            "forerun was installed without its C++ kernels (no compiler was found), so the cpu backend runs on a slow "
            "numpy reference; install a C++17 compiler and reinstall forerun",
            RuntimeWarning,
            stacklevel=2,
        )
        return reference
