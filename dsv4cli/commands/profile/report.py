"""Report of `dsv4 profile`: the machine, the measured times, and changes since a baseline."""

from typing import TYPE_CHECKING, Any

from dsv4cli.output import Output, counted, size_text

if TYPE_CHECKING:
    from dsv4cli.engine.profiling.compare import BaselineComparison

Document = dict[str, Any]
KERNELS = ("operation", "tokens", "time", "spread", "GB/s", "of max", "TFLOP/s", "of max")
OTHERS = ("operation", "tokens", "time", "reference", "faster", "library", "faster")
STEP = ("part", "number", "time", "share")
# relative spread above which a warning is printed; fraction of a peak rate above which a rate cannot be right
WIDE, IMPOSSIBLE = 0.25, 1.05


def show_kernels(out: Output, document: Document) -> None:
    """Print the machine, its peak rates, and one line per operation."""
    _show_machine(out, document)
    results = document["results"]
    shown = [line for line in results if line["seconds"]]
    if shown:
        out.line()
        out.table([KERNELS, *(_kernel(line) for line in shown)], numbers=True)
        out.line()
        compared = [line for line in shown if line["reference_seconds"] or line["rival"]]
        if compared:
            out.table([OTHERS, *(_others(line) for line in compared)], numbers=True)
            out.line()
        if any(line["seconds"]["method"] == "events" for line in shown):
            out.line("operations that wait for the host are timed one by one, including the gaps")
        if not any(line["cold"] for line in shown):
            out.line("inputs may be in the cache, which is flushed only on a GPU for large inputs")
    for line in results:
        if line["skipped"]:
            out.line(f"skipped {line['name']} x{line['tokens']}: {line['skipped']}")
    for line in results:
        if line["wrong"]:
            out.line(f"WRONG {line['name']} x{line['tokens']}: {line['wrong']}", strong=True)
    warn_of_spreads(out, shown)
    _warn_of_rates(out, shown)


def show_step(out: Output, document: Document) -> None:
    """Print the machine, the step, and one line per part of the model."""
    _show_machine(out, document)
    whole, *parts = document["results"]
    seconds, weights = whole["seconds"], document["weights"]
    what = "decode" if document["tokens"] == 1 else "prefill"
    sequences, tokens = counted(document["batch"], "sequence"), counted(document["tokens"], "token")
    rows = [
        ("step", f"{what}: {sequences}, {tokens} of each after {document['context']:,}"),
        ("time", f"{time_text(seconds['median'])} ({time_text(seconds['low'])} to {time_text(seconds['high'])})"),
        ("", f"{document['tokens_per_second']:,.1f} tokens/s" + (", in a CUDA graph" if document["captured"] else "")),
        ("weights", f"{size_text(weights['bytes'])} read, which takes at least {time_text(weights['floor_seconds'])}"),
        ("", f"{weights['of_bandwidth']:.1%} of the bandwidth measured"),
    ]
    launched = document["kernels"]
    if launched:
        each = launched["per_token"]
        rows.append(("kernels", f"{launched['count']:,} in the step, {each['count']:,.0f} per token"))
        rows.append(
            ("gaps", f"{time_text(launched['gap_seconds'])}: the GPU is busy {time_text(launched['busy_seconds'])}")
        )
    out.table(rows)
    out.line()
    out.table([STEP, *(_part(line) for line in parts)], numbers=True)
    for layer in launched["layers"] if launched else ():
        out.line()
        out.table(_layer(layer), numbers=True)
    warn_of_spreads(out, [whole])


def show_changes(out: Output, comparison: "BaselineComparison") -> None:
    """Print what differs between the two runs, then each time before and now, their ratio and its verdict."""
    out.line()
    if not comparison.same_device:
        out.warning("the baseline was measured on another device, so the ratios compare two machines")
    for name, (before, now) in comparison.differences.items():
        out.line(f"{name}: {before}, now {now}")
    rows = [
        (
            change.name,
            time_text(change.before.median if change.before else None),
            time_text(change.now.median if change.now else None),
            f"{change.speedup:.2f}x" if change.speedup else "-",
            change.verdict or "",
        )
        for change in comparison.changes
    ]
    out.table([("since the baseline", "before", "now", "faster", ""), *rows], numbers=True)
    if any(change.verdict == "unclear" for change in comparison.changes):
        out.warning(
            f"the device was up to {comparison.drift:.2f} times as fast in one of the runs: another program ran; "
            "measure both again"
        )


def warn_of_spreads(out: Output, shown: list[Document]) -> None:
    """Warn of times with a large spread."""
    loose = [line for line in shown if _spread(line) > WIDE]
    if loose:
        out.warning(
            f"{len(loose)} of {counted(len(shown), 'time')} with a spread above {WIDE:.0%}: something else may have run"
        )


def _warn_of_rates(out: Output, shown: list[Document]) -> None:
    """Warn of rates above the measured maximum."""
    over = [line for line in shown if max(line["of_bandwidth"] or 0, line["of_matmul"] or 0) > IMPOSSIBLE]
    if over:
        names = ", ".join(f"{line['name']} x{line['tokens']}" for line in over[:3])
        more = f" and {len(over) - 3} more" if len(over) > 3 else ""
        out.warning(
            f"over {IMPOSSIBLE:.0%} of the measured maximum: {names}{more}; another program ran during that "
            "measurement, or the inputs were in the cache"
        )


def _spread(line: Document) -> float:
    seconds = line["seconds"]
    return float((seconds["high"] - seconds["low"]) / seconds["median"])


def _show_machine(out: Output, document: Document) -> None:
    machine, ceilings = document["machine"], document["ceilings"]
    versions = [f"torch {machine['torch']}"]
    versions += [f"{name} {machine[name]}" for name in ("triton", "driver") if machine[name]]
    rates = [f"{rate / 1e12:.3g} TFLOP/s {name}" for name, rate in ceilings["matmul_flops"].items()]
    bandwidths = [f"{kind} {_rate(ceilings[f'{kind}_bytes_per_second'])}" for kind in ("copy", "read")]
    rows = [
        ("device", machine["device"]),
        ("software", ", ".join(versions)),
        ("model", f"{document['model']}, backend {document['backend']}"),
        ("at most", ", ".join([*bandwidths, *rates])),
    ]
    if machine["commit"]:
        rows.append(("commit", machine["commit"]))
    out.table(rows)


def _kernel(line: Document) -> tuple[str, ...]:
    seconds = line["seconds"]
    computes = line["flops"] > 0
    return (
        line["name"],
        f"{line['tokens']:,}",
        time_text(seconds["median"]),
        f"{_spread(line):.0%}",
        f"{line['bytes_per_second'] / 1e9:,.1f}",
        f"{line['of_bandwidth']:.1%}",
        f"{line['flops_per_second'] / 1e12:.3g}" if computes else "-",
        f"{line['of_matmul']:.1%}" if computes else "-",
    )


def _others(line: Document) -> tuple[str, ...]:
    """Return the table row of an operation, with the times of the reference and of another library's operator."""
    ours, reference = line["seconds"]["median"], line["reference_seconds"] and line["reference_seconds"]["median"]
    name, rival = (line["rival"]["name"], line["rival"]["seconds"]["median"]) if line["rival"] else ("", None)
    return (
        line["name"],
        f"{line['tokens']:,}",
        time_text(ours),
        time_text(reference),
        f"{reference / ours:.3g}x" if reference else "-",
        f"{name} {time_text(rival)}",
        f"{rival / ours:.3g}x" if rival else "-",
    )


def _part(line: Document) -> tuple[str, ...]:
    count = "" if line["count"] is None else f"{line['count']}"
    return line["name"], count, time_text(line["seconds"]["median"]), f"{line['share']:.1%}"


def _layer(layer: Document) -> list[tuple[str, ...]]:
    """Return the table rows of a layer with one kind of attention, kernel by kernel."""
    lines = [*layer["kernels"], {**layer, "name": "total"}]
    head = f"{layer['kind']}, mean of {counted(layer['layers'], 'layer')}"
    return [
        (head, "to its end", "idle before"),
        *((one["name"], time_text(one["seconds"]), time_text(one["idle_seconds"])) for one in lines),
    ]


def time_text(seconds: float | None) -> str:
    """Format a duration in µs or ms; "-" if there is none."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:,.1f} µs" if abs(seconds) < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def _rate(bytes_per_second: float) -> str:
    return f"{size_text(round(bytes_per_second))}/s"
