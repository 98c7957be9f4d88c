"""Engines that are not installed: the models that they serve, and programs in their place."""

from pathlib import Path

from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.deployment.served_model import ServedModel

NVFP4 = Formats(experts="nvfp4", draft_experts="fp4")


def model_of(preset: str, formats: Formats | None = None, name: str = "") -> ServedModel:
    """A release, in its own formats or in others."""
    return ServedModel(name or preset, name or preset, parse_config(PRESETS[preset], preset), formats or Formats())


def stand_in(folder: Path, script: str) -> str:
    """The path of a program that keeps its arguments and two of its variables in `folder`, then runs a shell script."""
    path = folder / "engine"
    keep = f"""printf '%s\\n' "$@" > '{folder}/arguments'
for name in VLLM_ENGINE_READY_TIMEOUT_S SGLANG_SHARED_EXPERT_TP1; do
    eval "value=\\$$name"
    [ -z "$value" ] || echo "$name=$value"
done > '{folder}/variables'
"""
    path.write_text(f"#!/bin/sh\n{keep}{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)
