"""The few array operations that the array API lacks, for numpy and torch alike. torch is never imported from here."""

from typing import Any

import array_api_compat
import array_api_compat.numpy as numpy_api
import numpy as np

from forerun.sampling import kernels

Array = Any
_COMPILED_TOP = 64  # ids; for many more a partial sort is faster


def namespace(x: Array) -> Any:
    """Return the array API namespace of `x` (numpy's or torch's)."""
    if isinstance(x, np.ndarray):  # the usual case, without the checks
        return numpy_api
    return array_api_compat.array_namespace(x)


def like(values: Any, x: Array, dtype: Any = None) -> Array:
    """Return `values` (a list, a numpy array or an array of either kind) as an array of the kind and device of `x`."""
    if array_api_compat.is_torch_array(values):
        if isinstance(x, np.ndarray):
            values = values.detach().cpu().numpy()
    else:
        values = np.asarray(values)  # torch reads a numpy array much faster than a list of lists
    if isinstance(x, np.ndarray):
        return values if dtype is None else values.astype(dtype, copy=False)
    return namespace(x).asarray(values, dtype=dtype, device=array_api_compat.device(x))


def on_host(x: Array) -> Array:
    """Return a torch tensor of the CPU as a float32 numpy array, where the compiled twins can work; others as they are.

    Memory is shared where the type is right already.
    """
    if array_api_compat.is_torch_array(x) and array_api_compat.device(x).type == "cpu":
        return x.float().numpy()
    return x


def top_values(x_RV: Array, k: int) -> Array:
    """Return the k largest values of each row, largest first: (R, k)."""
    if array_api_compat.is_torch_array(x_RV):
        return x_RV.topk(k, dim=-1).values
    if k < x_RV.shape[-1]:
        x_RV = np.partition(x_RV, x_RV.shape[-1] - k, axis=-1)[:, -k:]
    return -np.sort(-x_RV, axis=-1)


def top_ids(x_RV: Array, k: int) -> np.ndarray:
    """Return the ids of the k largest values of each row, largest first, on the host: (R, k)."""
    if array_api_compat.is_torch_array(x_RV):
        ids: np.ndarray = x_RV.topk(k, dim=-1).indices.cpu().numpy()
        return ids
    if kernels.usable(x_RV) and 0 < k <= min(x_RV.shape[-1], _COMPILED_TOP):
        return kernels.top_ids(x_RV, k)
    ids_RK = np.argpartition(x_RV, x_RV.shape[-1] - k, axis=-1)[:, -k:] if k < x_RV.shape[-1] else None
    if ids_RK is None:
        return np.argsort(-x_RV, axis=-1, kind="stable")
    order_RK = np.argsort(-np.take_along_axis(x_RV, ids_RK, axis=-1), axis=-1, kind="stable")
    return np.take_along_axis(ids_RK, order_RK, axis=-1)


def one_hot(ids_R: Array, vocab_size: int, x: Array) -> Array:
    """Return rows with a single 1 at `ids_R`, of the kind, device and float32 type of `x`'s namespace: (R, V)."""
    xp = namespace(x)
    rows_RV = xp.zeros((ids_R.shape[0], vocab_size), dtype=xp.float32, device=array_api_compat.device(x))
    rows_RV[xp.arange(ids_R.shape[0], device=array_api_compat.device(x)), ids_R] = 1.0
    return rows_RV
