"""The operations that decoding needs, on NumPy arrays and on PyTorch tensors on any device."""

from collections.abc import Sequence
from functools import cache
from typing import Any

# a NumPy array or a PyTorch tensor; results have the kind and the device of the argument
Array = Any


def floats(x: Array) -> Array:
    """Return integers as fp32."""
    return x.float() if _is_tensor(x) else x.astype("float32")


def signed(x: Array) -> Array:
    """Return bytes as signed integers."""
    if not _is_tensor(x):
        return x.view("int8")
    import torch

    return x.view(torch.int8)


def halves(x: Array) -> Array:
    """Return the fp32 values of fp16 numbers: uint8 [..., 2n] -> fp32 [..., n]."""
    if not _is_tensor(x):
        return _packed(x).view("float16").astype("float32")
    import torch

    return _packed(x).view(torch.float16).float()


def brain_floats(x: Array) -> Array:
    """Return the fp32 values of bf16 numbers: uint8 [..., 2n] -> fp32 [..., n]."""
    if not _is_tensor(x):
        return (_packed(x).view("uint16").astype("uint32") << 16).view("float32")
    import torch

    return _packed(x).view(torch.bfloat16).float()


def words(x: Array, nbytes: int) -> Array:
    """Return little-endian unsigned integers of 2 or 4 bytes: uint8 [..., n * nbytes] -> [..., n]."""
    if not _is_tensor(x):
        return _packed(x).view(f"<u{nbytes}")
    import torch

    mask = (1 << 8 * nbytes) - 1
    return _packed(x).view({2: torch.int16, 4: torch.int32}[nbytes]).long() & mask


def reinterpreted(x: Array, name: str) -> Array:
    """Return the bytes of rows as another dtype: uint8 [..., n] -> [..., n / itemsize]. name: such as "float32"."""
    if not _is_tensor(x):
        return _packed(x).view(name)
    import torch

    return _packed(x).view(getattr(torch, name))


def units(x: Array, size: int) -> Array:
    """Return a view of bytes in units of 1, 2, 4 or 8: uint8 [..., n] -> [..., n / size, parts of a unit].

    NumPy copies units as integers, at any address; of a tensor, the parts are bytes.
    """
    return x.reshape(*x.shape[:-1], -1, size) if _is_tensor(x) else x.view(f"i{size}")[..., None]


def moved(x: Array, dim: int, to: int) -> Array:
    """Return a view with one dimension elsewhere."""
    if _is_tensor(x):
        return x.movedim(dim, to)
    import numpy as np

    return np.moveaxis(x, dim, to)


def empty(x: Array) -> Array:
    """Return a contiguous array of the same shape and dtype, without values."""
    if _is_tensor(x):
        return x.new_empty(x.shape)
    import numpy as np

    return np.empty_like(x, order="C")


def stack(parts: Sequence[Array], dim: int) -> Array:
    """Stack arrays along a new dimension."""
    if _is_tensor(parts[0]):
        import torch

        return torch.stack(tuple(parts), dim)
    import numpy as np

    return np.stack(parts, dim)


def joined(parts: Sequence[Array]) -> Array:
    """Concatenate arrays along the last dimension."""
    if _is_tensor(parts[0]):
        import torch

        return torch.cat(tuple(parts), -1)
    import numpy as np

    return np.concatenate(parts, -1)


def fields(x: Array, bits: int, group: int) -> Array:
    """Unpack codes of `bits` bits: uint8 [..., n] -> [..., n * 8 / bits].

    The first `group` codes are the lowest bits of the first `group` bytes, the next ones are the bits above them.
    """
    mask = (1 << bits) - 1
    groups = x.reshape(*x.shape[:-1], -1, group)
    parts = [groups >> shift & mask if shift else groups & mask for shift in range(0, 8, bits)]
    return stack(parts, -2).reshape(*x.shape[:-1], -1)


def lookup(table: str, index: Array) -> Array:
    """Return the entries of a table: index [...] -> fp32 [..., width]. table: a name in `tables`."""
    from dsv4cli.kernels.ggml import tables

    if not _is_tensor(index):
        import numpy as np

        return np.take(tables.table(table), index, axis=0)
    found = _table_on(table, str(index.device))
    return found.index_select(0, index.reshape(-1).int()).view(*index.shape, found.shape[-1])


@cache
def _table_on(name: str, device: str) -> Array:
    import torch

    from dsv4cli.kernels.ggml import tables

    return torch.from_numpy(tables.table(name).copy()).to(device)


def _is_tensor(x: Array) -> bool:
    return hasattr(x, "is_cuda")


def _packed(x: Array) -> Array:
    """Return a contiguous, aligned array, copied if needed: views with wider dtypes require that."""
    if _is_tensor(x):
        return x.contiguous() if x.storage_offset() % 16 == 0 else x.clone()
    import numpy as np

    return np.ascontiguousarray(x)
