"""The GGUF models of a hub repository by their headers: types, bytes and the memory that each needs; no torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsv4cli.engine.checkpoint.gguf.files import GgufModel
from dsv4cli.engine.checkpoint.gguf.loading import loaded_table
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity, identify_model
from dsv4cli.engine.checkpoint.gguf.variants import Variant
from dsv4cli.engine.checkpoint.headers import TensorInfo
from dsv4cli.engine.checkpoint.layouts import runnable
from dsv4cli.engine.inspection.fit.machine import Device
from dsv4cli.engine.inspection.fit.share import SharedModel
from dsv4cli.engine.inspection.sources import RemoteSource
from dsv4cli.errors import Dsv4Error

SCHEMA = "dsv4.variants/1"
# tokens of context for which memory is counted, as the default of --fit
CONTEXT = 8192
# a GPU that holds any model: what is needed does not depend on its memory
LARGE_GPU = Device("cuda:0", "GPU", 1 << 50, 1 << 50)


@dataclass(frozen=True)
class VariantReport:
    """A GGUF model of a repository.

    Attributes:
        nbytes: size of its files.
        experts, others: bytes by tensor type in routed experts and in all other tensors.
        drafter: whether it has a drafter that dsv4 uses.
        needed: bytes of memory to run it whole on one GPU, None if dsv4 does not run it.
        problem: why dsv4 does not run it.
    """

    name: str
    files: tuple[str, ...]
    nbytes: int
    experts: Mapping[str, int]
    others: Mapping[str, int]
    drafter: bool = False
    needed: int | None = None
    problem: Dsv4Error | None = None


def inspect_variants(source: RemoteSource) -> list[VariantReport]:
    """Return every GGUF model of a repository, smallest first.

    The headers are fetched. Raises HubError if the hub does not serve them.
    """
    from dsv4cli.engine.hub.gguf import read_models

    variants = source.variants
    found = read_models(source.listing, variants, source.policy, _examine)
    reports = [_report(source, variant, one) for variant, one in zip(variants, found, strict=True)]
    return sorted(reports, key=lambda report: report.nbytes)


@dataclass(frozen=True)
class _Examined:
    """The facts about a model in its headers; the fields are those of VariantReport."""

    experts: Mapping[str, int]
    others: Mapping[str, int]
    drafter: bool
    needed: int | None
    problem: Dsv4Error | None


def _examine(model: GgufModel) -> _Examined:
    tensors = model.checkpoint.tensors.values()
    experts = _by_type(info for info in tensors if "_exps." in info.name)
    others = _by_type(info for info in tensors if "_exps." not in info.name)
    try:
        identity = runnable(identify_model(model))
    except Dsv4Error as error:
        return _Examined(experts, others, False, None, error)
    return _Examined(experts, others, identity.config.drafter != "none", _needed(identity), None)


def _by_type(tensors: Any) -> dict[str, int]:
    """Return the bytes of tensors by type, the largest first."""
    sums: Counter[str] = Counter()
    for info in tensors:
        assert isinstance(info, TensorInfo)
        sums[info.dtype] += info.nbytes
    return dict(sums.most_common())


def _needed(identity: GgufIdentity) -> int:
    """Return the bytes of GPU memory for all weights and one sequence."""
    table = loaded_table(identity)
    return SharedModel(identity.config, identity.formats, 0, table).share((LARGE_GPU,), CONTEXT, 1).needed


def _report(source: RemoteSource, variant: Variant, found: "_Examined | Dsv4Error") -> VariantReport:
    files = source.listing.by_name
    nbytes = sum(files[name].size for name in variant.files if name in files)
    if isinstance(found, Dsv4Error):
        return VariantReport(variant.name, variant.files, nbytes, {}, {}, problem=found)
    return VariantReport(variant.name, variant.files, nbytes, **vars(found))


def variants_document(source: RemoteSource, reports: list[VariantReport]) -> dict[str, Any]:
    """Return the models as a JSON document of schema SCHEMA; all sizes are in bytes."""
    return {
        "schema": SCHEMA,
        "model": source.name,
        "repository": source.listing.repository,
        "commit": source.listing.commit,
        "context": CONTEXT,
        "variants": [
            asdict(report)
            | {
                "files": [*report.files],
                "problem": report.problem and {"message": report.problem.message, "remedy": report.problem.remedy},
            }
            for report in reports
        ],
    }
