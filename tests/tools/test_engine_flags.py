"""The check of flags against the wheel of an engine."""

from zipfile import ZipFile

import pytest

from dsv4cli.engine.deployment.plan import ENGINES
from tools.engine_flags import SOURCES, main, missing_from, used

FIRST = {"vllm": "vllm/engine/arg_utils.py", "sglang": "sglang/srt/arg_groups/fields/serving.py"}


def wheel(folder, engine, *, without="", field=""):
    """A wheel that has all that is used but one thing; `field` is a flag that stands as a field of a class."""
    source, flags, values = SOURCES[engine], [], {path: [] for path in SOURCES[engine].values.values()}
    for name, words in used(engine):
        flags += [name] if name.startswith("--") and name not in (without, field) else []
        for word in words:
            values[source.values[name]] += [word] if word != without else []
    variables = [rule.name for rule in ENGINES[engine].environment if rule.name != without]
    path = folder / f"{engine}-1.2-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        declared = f"class Arguments:\n    {field.removeprefix('--').replace('-', '_') or 'x'}: int = 1\n"
        archive.writestr(FIRST[engine], declared + "\n".join(f"add('{flag}')" for flag in flags))
        archive.writestr(source.variables, "\n".join(f"{one} = 1" for one in variables))
        for name, words in values.items():
            archive.writestr(name, "\n".join(f'"{word}"' for word in words))
    return path


@pytest.mark.parametrize("engine", SOURCES)
def test_a_complete_wheel_lacks_nothing(engine, tmp_path):
    assert missing_from(wheel(tmp_path, engine)) == []
    assert missing_from(wheel(tmp_path, engine, field="--served-model-name")) == []


@pytest.mark.parametrize(
    ("engine", "lost", "named"),
    [
        ("vllm", "--spec-tokens", "--spec-tokens"),
        ("vllm", "dspark", "--spec-method dspark"),
        ("vllm", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_ENGINE_READY_TIMEOUT_S"),
        ("vllm", "--config", "--config"),
        ("sglang", "--attn-dp-size", "--attn-dp-size"),
        ("sglang", "marlin", "--moe-runner-backend marlin"),
        ("sglang", "deepseek-v4", "--reasoning-parser deepseek-v4"),
        ("sglang", "--model-path", "--model-path"),
    ],
)
def test_what_a_wheel_lacks_is_named(engine, lost, named, tmp_path, capsys):
    path = wheel(tmp_path, engine, without=lost)
    assert main([str(path)]) == 1
    assert capsys.readouterr().out == f"{engine} 1.2: {named}\n"


def test_other_packages_are_refused(tmp_path):
    assert main([]) == 1
    with pytest.raises(ValueError, match="not a wheel of vllm or sglang"):
        missing_from(tmp_path / "torch-2-py3-none-any.whl")
