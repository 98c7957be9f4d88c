"""How fast `dsv4 convert` is: against a plain table-lookup converter, and against copying its output.

Run: python tests/benchmarks/convert_speed.py [--experts 64] [--rounds 3] [--device cpu] [--folder DIR]

Makes a checkpoint of one layer with the shapes of Flash, then, round by round, each in a process of its own: the plain
converter, `dsv4 convert`, a copy of what that wrote. Every time is until the bytes are synced; the source is in the
page cache. Prints medians, peak memory, and the two ratios that count.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TARGETS = ("bf16", "fp8")


def make_checkpoint(folder: Path, experts: int) -> None:
    """One layer of Flash with some of its experts and no drafter, in one file, as a layer of the release is."""
    from safetensors.torch import save_file

    from dsv4cli.engine.checkpoint.layout import expected_tensors
    from dsv4cli.engine.config.presets import FLASH, shortened
    from dsv4cli.engine.config.read import parse_config
    from dsv4cli.engine.config.storage import Formats
    from dsv4cli.engine.weights.random_weights import random_tensors

    values = shortened(FLASH, 1, experts) | {"compress_ratios": [0], "num_nextn_predict_layers": 0, "vocab_size": 1024}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "deepseek_v4"}))
    specs = expected_tensors(parse_config(values, "benchmark"), Formats()).values()
    tensors = {spec.name: tensor for spec, tensor in random_tensors(specs, 0, experts)}
    save_file(tensors, folder / "model.safetensors")


def plain(source: Path, output: Path, target: str, device: str) -> None:
    """The usual public converter: a file in memory, each code through a table, pairs stacked, scales multiplied."""
    import torch
    from safetensors.torch import load_file, save_file

    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    output.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        tensors = load_file(path)
        result = {}
        for name, tensor in tensors.items():
            if name.endswith(".scale"):
                continue
            scale = tensors.get(name.removesuffix("weight") + "scale")
            if tensor.dtype == torch.int8:
                codes = tensor.view(torch.uint8)
                low, high = table[(codes & 15).long()], table[(codes >> 4).long()]
                values = torch.stack([low, high], dim=-1).flatten(1)
                values = values * scale.float().repeat_interleave(32, dim=1)
                if target == "bf16":
                    result[name] = values.to(torch.bfloat16)
                    continue
                rows, columns = values.shape
                blocks = values.view(rows // 128, 128, columns // 128, 128)
                wide = scale.float().view(rows // 128, 128, columns // 128, 4).amax((1, 3)) / 64
                codes = (blocks / wide[:, None, :, None]).to(torch.float8_e4m3fn)
                result[name] = codes.view(rows, columns)
                result[name.removesuffix("weight") + "scale"] = wide.to(torch.float8_e8m0fnu)
            elif tensor.dtype == torch.float8_e4m3fn and target == "bf16":
                wide = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
                result[name] = (tensor.float() * wide).to(torch.bfloat16)
            else:
                result[name] = tensor
                if scale is not None:
                    result[name.removesuffix("weight") + "scale"] = scale
        save_file(result, output / path.name)
        sync(output / path.name)


def ours(source: Path, output: Path, target: str, device: str) -> None:
    """`dsv4 convert` as a user runs it, but for the comparison afterwards, which the others do not make."""
    from dsv4cli import cli

    sys.argv = ["dsv4", "convert", str(source), str(output), "--to", target, "--verify", "off", "--device", device]
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - to the end of the process
    try:
        cli.main()
    except SystemExit as left:
        if left.code:
            raise


def copy(source: Path, output: Path, target: str, device: str) -> None:
    """The weight files of a folder, one after another."""
    output.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        shutil.copyfile(path, output / path.name)
        sync(output / path.name)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


WAYS = {"plain": plain, "ours": ours, "copy": copy}


def child(way: str, source: str, output: str, target: str, device: str) -> None:
    """Runs one way and prints seconds (imports not counted for the plain one) and peak memory."""
    import torch  # noqa: F401 - its time is start-up, which no large conversion feels
    from safetensors.torch import save_file  # noqa: F401

    import dsv4cli.commands.convert
    import dsv4cli.engine.conversion.convert
    import dsv4cli.engine.conversion.options  # noqa: F401

    before, started = peak_memory(), time.perf_counter()
    WAYS[way](Path(source), Path(output), target, device)
    seconds = time.perf_counter() - started
    sys.__stdout__.write(json.dumps({"seconds": seconds, "peak": peak_memory(), "before": before}))


def peak_memory() -> int:
    """Bytes of this program at its largest; unlike getrusage, not of the one that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure(way: str, source: Path, output: Path, target: str, device: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", way, str(source), str(output), target, device]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def rounds(folder: Path, target: str, device: str, count: int) -> Iterator[dict[str, dict[str, float]]]:
    """The ways take turns in going first, because a disk may be slower where nothing was written before."""
    source, example = folder / "source", folder / "example"
    measure("ours", source, example, target, device)
    for number in range(count):
        found = {}
        for way in (*WAYS, *WAYS)[number % len(WAYS) :][: len(WAYS)]:
            output = folder / way
            found[way] = measure(way, example if way == "copy" else source, output, target, device)
            found[way]["bytes"] = sum(path.stat().st_size for path in output.glob("*.safetensors"))
            shutil.rmtree(output)
        yield found
    shutil.rmtree(example)


def report(target: str, found: list[dict[str, dict[str, float]]]) -> None:
    def median(way: str, key: str) -> float:
        return statistics.median(result[way][key] for result in found)

    print(f"FP4 -> {target.upper()}, {len(found)} rounds, medians (spread of the seconds)")
    for way in WAYS:
        times = [result[way]["seconds"] for result in found]
        seconds, nbytes = median(way, "seconds"), median(way, "bytes")
        grown = median(way, "peak") - median(way, "before")
        print(
            f"  {way:6} {seconds:7.2f} s ({min(times):.2f} to {max(times):.2f})  {nbytes / seconds / 1e9:5.2f} GB/s out"
            f"  peak {median(way, 'peak') / 1e6:7.0f} MB, {grown / 1e6:7.0f} MB above start-up"
        )
    faster = median("plain", "seconds") / median("ours", "seconds")
    share = median("copy", "seconds") / median("ours", "seconds")
    memory = median("ours", "peak") / median("plain", "peak")
    print(
        f"  ours is {faster:.1f} times as fast as plain (asked: 3), at {memory:.2f} of its peak memory (asked: 0.25),"
    )
    print(f"  and reaches {share:.0%} of the rate of copying its output (asked: 60 %)")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="where `dsv4 convert` computes")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dsv4-convert-speed"))
    options = parser.parse_args()
    import torch

    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    shutil.rmtree(options.folder, ignore_errors=True)
    make_checkpoint(options.folder / "source", options.experts)
    try:
        for target in TARGETS:
            report(target, list(rounds(options.folder, target, options.device, options.rounds)))
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
