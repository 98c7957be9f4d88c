"""Contents of files by their headers: tensors and bytes by dtype, and by family for a known model; no torch."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dsv4cli.engine.checkpoint.headers import TensorInfo
from dsv4cli.engine.checkpoint.layout import TensorSpec


@dataclass(frozen=True)
class Contents:
    """Numbers of tensors and bytes. The mappings are from dtype or family ('' for none) to bytes, largest first."""

    tensors: int
    nbytes: int
    by_dtype: Mapping[str, int]
    by_family: Mapping[str, int]


def add_up(infos: Collection[TensorInfo], table: Mapping[str, TensorSpec]) -> Contents:
    """Sum up headers. table: the known tensors by their stored names."""
    dtypes: Counter[str] = Counter()
    families: Counter[str] = Counter()
    for info in infos:
        dtypes[info.dtype] += info.nbytes
        families[table[info.name].family if info.name in table else ""] += info.nbytes
    return Contents(len(infos), dtypes.total(), dict(dtypes.most_common()), dict(families.most_common()))
