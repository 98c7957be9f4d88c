"""Write `tests/golden/arithmetic.json`: `python -m tests.support.record_arithmetic`, on the recordings' kind of CPU.

Another CPU is refused: where an operation that is recorded rounds differently, new ones may too.
"""

import json
import sys
from collections.abc import Callable

import pytest
import torch

from dsv4cli.kernels.indexer import ref as indexer_ref
from tests.support.arithmetic import FILE, Operations, checksum
from tests.support.golden_data import (
    BLOCK_PROMPTS,
    NETS,
    case_of,
    golden,
    official_sums,
    remember_weights,
    run_case,
    run_recorded_blocks,
    topk_entries,
)


def operations_of(run: Callable[[], object]) -> list[str]:
    """Return the signatures of the rounded operations that `run` computes with the official code's sums."""
    with pytest.MonkeyPatch.context() as patch, Operations() as operations:
        remember_weights(patch)
        official_sums(patch)
        patch.setattr(indexer_ref, "top_entries", topk_entries)
        run()
    return sorted(operations.signatures)


def main() -> None:
    torch.set_num_threads(1)
    known = dict(json.loads(FILE.read_text())["operations"]) if FILE.exists() else {}
    if any(checksum(signature) != crc for signature, crc in known.items()):
        sys.exit("this machine rounds differently from the CPU of the recordings: use an AMD CPU with AVX-512")
    cases = {}
    for name in NETS:
        net = golden(name)
        for prompt, steps in net.cases:
            cases[case_of(name, prompt)] = operations_of(lambda n=net, p=prompt, s=steps: run_case(n, p, s))
        for prompt in BLOCK_PROMPTS:
            cases[case_of(name, prompt, "blocks")] = operations_of(lambda n=net, p=prompt: run_recorded_blocks(n, p))
    signatures = sorted({signature for case in cases.values() for signature in case})
    numbers = {signature: number for number, signature in enumerate(signatures)}
    operations = ",\n".join(json.dumps([signature, checksum(signature)]) for signature in signatures)
    listed = ",\n".join(f"{json.dumps(case)}: {[numbers[one] for one in used]}" for case, used in cases.items())
    FILE.write_text(f'{{"operations": [\n{operations}\n],\n"cases": {{\n{listed}\n}}}}\n')


if __name__ == "__main__":
    main()
