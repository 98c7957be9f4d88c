"""Checks flags against an engine: `python -m tools.engine_flags WHEEL…` reads the wheels of vLLM and SGLang.

It lists every flag, environment variable and value that `dsv4 serve --engine` uses and the wheel does not have. The
exit status is 1 if there are any. The engines are neither installed nor imported.
"""

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zipfile import ZipFile

from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.deployment.cluster import Cluster
from dsv4cli.engine.deployment.flags import EngineName, ServerSettings
from dsv4cli.engine.deployment.plan import ENGINES, plan_deployment
from dsv4cli.engine.deployment.served_model import ServedModel

# deployments that have every value of the flags with fixed values
EXPORT = Formats(experts="nvfp4", draft_experts="fp4")
DEPLOYED = (("flash", Formats()), ("flash-0731", Formats()), ("flash", EXPORT))
CLUSTER = Cluster(1, 8, "H100", 80 * 10**9, "hopper")


@dataclass(frozen=True)
class EngineSource:
    """Where an engine's wheel declares what the command line accepts.

    Attributes:
        declarations: files with the declarations of flags, as patterns.
        variables: the file that names the environment variables.
        values: for a flag with a fixed set of values, the file that names them.
    """

    declarations: tuple[str, ...]
    variables: str
    values: dict[str, str]


SOURCES: dict[EngineName, EngineSource] = {
    "vllm": EngineSource(
        (r"vllm/engine/arg_utils\.py", r"vllm/entrypoints/common/cli_args\.py", r"vllm/utils/argparse_utils\.py"),
        "vllm/envs.py",
        {
            "--tool-call-parser": "vllm/tool_parsers/__init__.py",
            "--reasoning-parser": "vllm/reasoning/__init__.py",
            "--spec-method": "vllm/config/speculative.py",
            "--max-model-len": "vllm/config/model.py",
        },
    ),
    "sglang": EngineSource(
        (r"sglang/srt/arg_groups/fields/\w+\.py", r"sglang/srt/server_args\.py"),
        "sglang/srt/environ.py",
        {
            "--tool-call-parser": "sglang/srt/function_call/parser_names.py",
            "--reasoning-parser": "sglang/srt/parser/reasoning_parser_names.py",
            "--speculative-algorithm": "sglang/srt/arg_groups/deepseek_v4_hook.py",
            "--moe-runner-backend": "sglang/srt/arg_groups/choices.py",
        },
    ),
}
WRITTEN = re.compile(r"[\"'](--[a-z0-9-]+)[\"']")
# a field of a class, from which both engines make a flag
FIELD = re.compile(r"^    ([a-z][a-z0-9_]*):", re.MULTILINE)


def main(wheels: Sequence[str]) -> int:
    """Check the wheels. Returns the exit status."""
    missing = [one for wheel in wheels for one in missing_from(Path(wheel))]
    for one in missing:
        sys.stdout.write(f"{one}\n")
    return int(bool(missing) or not wheels)


def missing_from(wheel: Path) -> list[str]:
    """Return what a wheel lacks: flags, values and environment variables. Raises ValueError for another package."""
    name, version = wheel.name.split("-")[:2]
    if name not in SOURCES:
        raise ValueError(f"{wheel.name} is not a wheel of {' or '.join(SOURCES)}")
    engine: EngineName = "vllm" if name == "vllm" else "sglang"
    source = SOURCES[engine]
    with ZipFile(wheel) as archive:
        texts = {path: archive.read(path).decode() for path in archive.namelist() if _is_read(path, source)}
    known = known_flags(text for path, text in texts.items() if _declares(path, source))
    lacks = (one for flag, values in used(engine) for one in _lacking(flag, values, source, texts, known))
    return [f"{name} {version}: {one}" for one in dict.fromkeys(lacks)]


def _lacking(
    flag: str, values: Sequence[str], source: EngineSource, texts: Mapping[str, str], known: Collection[str]
) -> Iterator[str]:
    """Yield what is missing of a flag or an environment variable."""
    if not flag.startswith("--"):
        if not re.search(rf"\b{flag}\b", texts[source.variables]):
            yield flag
    elif flag not in known:
        yield flag
    else:
        named = (re.search(rf"[\"']{value}[\"']", texts[source.values[flag]]) for value in values)
        yield from (f"{flag} {value}" for value, found in zip(values, named, strict=True) if not found)


def known_flags(texts: Iterator[str]) -> set[str]:
    """Return the flags that source files declare."""
    known: set[str] = set()
    for text in texts:
        known |= {*WRITTEN.findall(text)}
        known |= {f"--{name.replace('_', '-')}" for name in FIELD.findall(text)}
    return known


@cache
def used(engine: EngineName) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return every flag and environment variable of an engine's tables, and the values of those with fixed values."""
    spec = ENGINES[engine]
    names = [rule.name for rule in (*spec.rules, *spec.environment)] + ["--config", "--api-key"]
    names += [spec.model_flag] if spec.model_flag else []
    return *((name, ()) for name in names), *_fixed_values(engine)


def _fixed_values(engine: EngineName) -> Iterator[tuple[str, tuple[str, ...]]]:
    for preset, formats in DEPLOYED:
        model = ServedModel(preset, preset, parse_config(PRESETS[preset], preset), formats)
        for flag in plan_deployment(engine, model, CLUSTER, ServerSettings()).flags():
            if flag.name in SOURCES[engine].values:
                yield flag.name, flag.values


def _is_read(path: str, source: EngineSource) -> bool:
    return _declares(path, source) or path == source.variables or path in source.values.values()


def _declares(path: str, source: EngineSource) -> bool:
    return any(re.fullmatch(pattern, path) for pattern in source.declarations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
