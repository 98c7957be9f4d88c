"""Advice that follows from a fit: the command that runs the model, or alternatives; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4cli.engine.inspection.fit.machine import FREE_OF_RAM
from dsv4cli.engine.inspection.fit.plan import Fit
from dsv4cli.engine.inspection.fit.share import Share
from dsv4cli.errors import Dsv4Error
from dsv4cli.harmless import shell_word

MB = 10**6


@dataclass(frozen=True)
class Advice:
    """One step of advice: the reason ('' if obvious), and the command, or a sentence if there is no command."""

    why: str
    command: str


def advise(fit: Fit, name: str, problem: Dsv4Error | None = None, *, is_random: bool = False) -> list[Advice]:
    """Return the commands that follow from a fit, best first.

    name: dsv4's name of the model. problem: why dsv4 would not load it even if it fits. is_random: whether its weights
    are
    random; fewer layers then need no conversion.
    """
    if problem is not None:
        return [Advice(f"dsv4 would not load it: {problem.message}", problem.remedy)]
    if fit.best is not None:
        first = Advice("", run_command(fit, fit.best, name, fit.context, fit.batch))
        return [first, *(_another(fit, share, name) for share in fit.others), *_larger_machine(fit, name)]
    if fit.shorter is not None or fit.fewer is not None:
        return [*_smaller_load(fit, name)]
    return [*_larger_machine(fit, name), *_fewer_layers(fit, name, is_random=is_random)]


def run_command(fit: Fit, share: Share, name: str, context: int, batch: int) -> str:
    """Return the `dsv4 run` command for the devices of a share, with the options that make it fit."""
    words = [*_numbering(fit, share), "dsv4", "run", "--model", shell_word(name), "--max-context", str(context)]
    if share.ranks > 1:
        words += ["--tp", str(share.ranks)]
    elif share.devices[0].torch_name != fit.machine.automatic:
        words += ["--device", share.devices[0].torch_name]
    in_host = share.host if share.on_gpu else share.weights
    if fit.machine.claims_ram and in_host:
        words += ["--host-memory", f"{-(-in_host * share.ranks // MB)}MB"]
    return " ".join([*words, "--prompts questions.jsonl" if batch > 1 else "'What is 17 + 25?'"])


def _numbering(fit: Fit, share: Share) -> list[str]:
    """Return environment settings that make CUDA number GPUs as nvidia-smi does and select those of the share."""
    if not share.on_gpu:
        return []
    words = ["CUDA_DEVICE_ORDER=PCI_BUS_ID"] if fit.machine.is_mixed else []
    numbers = sorted(int(gpu.torch_name.removeprefix("cuda:")) for gpu in share.devices)
    if share.ranks > 1 and numbers != list(range(share.ranks)):
        words.append(f"CUDA_VISIBLE_DEVICES={','.join(map(str, numbers))}")
    return words


def _another(fit: Fit, share: Share, name: str) -> Advice:
    """Return a slower way to run the model."""
    why = "the RAM holds it, for the CPU"
    if share.on_gpu:
        why = "one GPU runs it, slower: experts that do not fit stay in host memory"
    return Advice(why, run_command(fit, share, name, fit.context, fit.batch))


def _smaller_load(fit: Fit, name: str) -> Iterator[Advice]:
    """Yield advice with a shorter context or fewer sequences, if the weights fit."""
    if fit.shorter is not None:
        why = f"with at most {fit.largest_context:,} tokens it fits"
        yield Advice(why, run_command(fit, fit.shorter, name, fit.largest_context, fit.batch))
    if fit.fewer is not None:
        why = f"with at most {fit.largest_batch} at once it fits"
        yield Advice(why, run_command(fit, fit.fewer, name, fit.context, fit.largest_batch))


def _larger_machine(fit: Fit, name: str) -> Iterator[Advice]:
    """Yield the larger machines to ask about: more host memory, more GPUs or more RAM."""
    gpus = [] if fit.machine.is_here else [gpu.label for gpu in fit.machine.gpus]
    if fit.more_host is not None:
        ranks = fit.more_host.ranks
        several, whose = (f"{ranks} GPUs run", "theirs") if ranks > 1 else ("one GPU runs", "its own")
        why = f"{several} it where {_tenths(fit.host_needed)} GB of host memory are free, for experts beyond {whose}"
        yield _ask(fit, name, gpus, fit.host_needed, why)
    if fit.more_gpus is not None:
        count, label = fit.more_gpus.ranks, fit.more_gpus.devices[0].label
        yield _ask(fit, name, [label] * count, 0, f"{count}x{label} hold it")
    cpu = fit.shares[-1]
    if fit.best is None and fit.more_host is None and not cpu.on_gpu:
        yield _ask(fit, name, [], cpu.needed, f"the RAM holds it where {_tenths(cpu.needed)} GB are free")


def _tenths(nbytes: int) -> str:
    """Return `nbytes` in GB, rounded up to a tenth."""
    return f"{-(-nbytes // 10**8) / 10:,.1f}"


def _ask(fit: Fit, name: str, gpus: list[str], ram: int, why: str) -> Advice:
    """Return the command that asks the same question about another machine."""
    words = ["dsv4", "inspect", shell_word(name), "--fit", "--max-context", str(fit.context)]
    if fit.batch > 1:
        words += ["--batch", str(fit.batch)]
    if gpus:
        alike = len(set(gpus)) == 1 and len(gpus) > 1
        words += ["--gpus", f"{len(gpus)}x{gpus[0]}" if alike else ",".join(gpus)]
    if ram:
        words += ["--ram", f"{-(-ram * 100 // (FREE_OF_RAM * 2**30))}GB"]
    return Advice(why, " ".join(words))


def _fewer_layers(fit: Fit, name: str, *, is_random: bool) -> Iterator[Advice]:
    if not fit.layers:
        return
    device = fit.largest
    layers = f"{fit.layers} layers fit" if fit.layers > 1 else "layer fits"
    why = f"its first {layers} {device.torch_name if device.is_gpu else 'the RAM'}, for tests"
    if is_random:
        parts = [part for part in name.split(",") if not part.startswith("layers=")]
        where = "" if device.torch_name == fit.machine.automatic else f" --device {device.torch_name}"
        yield Advice(why, f"dsv4 run --model {','.join(parts)},layers={fit.layers}{where} 'What is 17 + 25?'")
        return
    command = f"dsv4 convert {shell_word(name)} OUT --to official --layers 0-{fit.layers - 1} --no-mtp"
    yield Advice(why, command)
