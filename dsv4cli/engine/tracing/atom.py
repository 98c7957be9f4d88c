"""Reads the files of ATOM's dump: `layer{LL}_{Class}_rank{R}.pt`, one module's output each. Nothing is unpickled.

Source: ATOM, atom/utils/debug_helper/dump.py. Other engines can write the same files (docs/guides/trace.md).
"""

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError

import torch

from dsv4cli.engine.tracing.manifest import TraceManifest
from dsv4cli.engine.tracing.stages import BY_NAME, STREAMS, in_order
from dsv4cli.errors import UsageError

FILE = re.compile(r"layer(\d{1,6})_(\w+?)_rank(\d{1,6})(?:_call(\d{1,6}))?\.pt", re.ASCII)
# ATOM's class -> our stage; a block's output is the next layer's input streams
CLASSES = {
    "Block": STREAMS,
    "DeepseekV4Attention": "attn.output",
    "DeepseekV4AttentionMLA": "attn.output",
    "DeepseekV4MoE": "ffn.output",
    "MoE": "ffn.output",
    "FusedMoE": "ffn.output",
}
GLOB = "layer*_*_rank*.pt"


class AtomFolder:
    """A folder of ATOM's dump files, read as a recording of another recording's tokens.

    Only rank 0 is read: after the all-reduce, these outputs are the same on every rank.
    """

    def __init__(self, folder: Path, like: TraceManifest) -> None:
        """Index the files of a folder.

        Args:
            like: supplies what the files lack: tokens, layers and numerics.

        Raises:
            UsageError: no file is of a known class.
        """
        self.name, self.folder = str(folder), folder
        self._files: dict[tuple[int, str], list[Path]] = defaultdict(list)
        found = [(match, path) for path in folder.glob(GLOB) if (match := FILE.fullmatch(path.name))]
        # sort by class and call number, as an integer: from call 1000 on, it has more digits
        for match, path in sorted(found, key=lambda one: (one[0][2], int(one[0][4] or -1))):
            if match[2] in CLASSES and int(match[3]) == 0:
                stage = CLASSES[match[2]]
                self._files[int(match[1]) + (stage == STREAMS), stage].append(path)
        if not self._files:
            raise UsageError(f"{folder} has no file of a known class", f"dump at least one of {', '.join(CLASSES)}")
        self.manifest = replace(like, model=f"ATOM, {folder}", weights=None, ranks=1, fed=False, how={})
        self._known: tuple[tuple[int, str], torch.Tensor] | None = None

    def layers(self) -> list[int]:
        """Return the layers that have stages."""
        return sorted({layer for layer, _ in self._files})

    def stages(self, layer: int) -> list[str]:
        """Return the stages of a layer, in order."""
        return in_order([stage for own, stage in self._files if own == layer])

    def rows(self, layer: int, stage: str, first: int, end: int) -> torch.Tensor:
        """Return rows of a stage, on the CPU. Raises UsageError if the files are of other tokens."""
        if self._known is None or self._known[0] != (layer, stage):
            self._known = (layer, stage), self._read(layer, stage)
        return self._known[1][first:end]

    def _read(self, layer: int, stage: str) -> torch.Tensor:
        """Return all rows, from the last calls that have as many rows as there are tokens.

        Earlier calls are warm-up.
        """
        manifest, files = self.manifest, self._files[layer, stage]
        tokens, parts, count = manifest.rows(BY_NAME[stage].per, layer), list[torch.Tensor](), 0
        shape = (manifest.streams, manifest.hidden) if stage == STREAMS else (manifest.hidden,)
        for path in reversed(files):
            if count < tokens:
                parts.insert(0, _load(path, shape))
                count += len(parts[0])
        if count != tokens:
            raise UsageError(
                f"{files[-1]} and earlier calls have {count} rows, but the text has {tokens} tokens",
                "dump the same tokens, without the warm-up: ATOM_FWD_DUMP_ONE_SHOT=0",
            )
        return torch.cat(parts)


def _load(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a file's rows [T, *shape]. Raises UsageError if it has no such tensor."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)["hidden"]
        rows: torch.Tensor = found.reshape(-1, *shape)
        return rows
    except (UnpicklingError, RuntimeError, KeyError, TypeError, AttributeError, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"{path} has no rows of shape {' x '.join(map(str, shape))}: {reason}",
            'dump the modules again, each as {"hidden": tensor}',
        ) from None
