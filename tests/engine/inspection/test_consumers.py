"""Which program would load which folder: the targets of convert, each trap on its own, and transformers itself."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from dsv4cli.cli import app
from dsv4cli.commands.inspect.consumers import show_verdict
from dsv4cli.engine.checkpoint.naming import MpNaming, TransformersNaming
from dsv4cli.engine.config.presets import FLASH, PRO, TINY, shortened
from dsv4cli.engine.config.read import parse_config, read_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.conversion.metadata import metadata_files
from dsv4cli.engine.conversion.target import TARGETS, TargetName, choose_target
from dsv4cli.engine.inspection.consumers import judge as judge_module
from dsv4cli.engine.inspection.consumers.examine import judge
from dsv4cli.engine.inspection.consumers.judge import CONSUMERS, Consumer, ConsumerVerdict, start_command
from dsv4cli.engine.inspection.report import inspect_model
from dsv4cli.engine.inspection.sources import resolve_inspectable
from dsv4cli.errors import UsageError
from dsv4cli.output import Colours, Output
from tests.support import damage, foreign
from tests.support.damage import GOLDEN, Damage, edit_config, edit_json, rewrite
from tests.support.program import save_tokenizer
from tests.support.slow import slow_except
from tests.support.variants import write_variant

CONFIG = read_config(GOLDEN / "tiny-flash")
RANKS = 2
# target -> consumer -> whether it loads, None where that is not known; order of CONSUMERS
LOADS: dict[TargetName, tuple[bool | None, ...]] = {
    "official": (True, True, True, False, False, False, True),
    "bf16": (True, None, True, False, False, False, True),
    "fp8": (False, True, True, False, False, False, True),
    "base": (True, None, None, False, False, False, True),
    "nvfp4": (True, True, False, False, False, False, True),
    "mp": (False, False, False, True, False, False, True),
    "transformers": (False, False, True, False, False, False, True),
    "compressed-tensors": (None, None, None, False, False, False, True),
    # see commands/inspect/test_gguf.py
    "gguf": (None, None, None, None, True, False, False),
}


# those that read safetensors
ALL = [consumer for consumer in CONSUMERS if consumer not in ("llama.cpp", "ds4")]


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Callable[[TargetName], Path]:
    """Folders of the golden model in each layout, with the files that convert writes beside the weights."""
    root = tmp_path_factory.mktemp("targets")

    def make(name: TargetName) -> Path:
        folder = root / name
        if not folder.exists():
            target = choose_target(name, CONFIG, ranks=RANKS if name == "mp" else None)
            write_variant(folder, target.formats, target.naming)
            for path, text in metadata_files(GOLDEN / "tiny-flash", CONFIG, target.formats, name).items():
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_text(text)
            save_tokenizer(folder)
        return folder

    return make


def verdict(folder: Path, consumer: Consumer) -> ConsumerVerdict:
    return judge(inspect_model(resolve_inspectable(str(folder))), consumer)


def official_copy(target: Path) -> Path:
    folder = damage.copy_checkpoint(target)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("target", slow_except(("nvfp4", "mp"), [one for one in TARGETS if one != "gguf"]))
def test_who_loads_the_targets_of_convert(converted, target):
    found = {consumer: verdict(converted(target), consumer) for consumer in CONSUMERS}
    assert tuple(found[consumer].loads for consumer in CONSUMERS) == LOADS[target]
    for consumer, one in found.items():
        assert bool(one.reasons) is (one.loads is not True)
        assert bool(one.command) is (one.loads is True)
        assert bool(one.remedy) is (one.loads is not True)
        if one.loads is False and consumer != "ds4":
            # the remedy makes a target that this consumer loads
            match = re.search(r"dsv4 convert \S+ OUT --to (\w+)( --ranks 2)?", one.remedy)
            assert match is not None, one
            assert LOADS[match[1]][CONSUMERS.index(consumer)] is True


@pytest.mark.parametrize(("values", "ranks"), [(PRO, 8), (shortened(FLASH, 4, 12), 4), (TINY, 2)])
def test_the_scripts_are_given_files_for_the_gpus_of_one_machine(values, ranks):
    folder = SimpleNamespace(identity=SimpleNamespace(config=parse_config(values, "test")))
    assert judge_module._ranks(folder) == ranks


def test_every_option_of_a_remedy_exists():
    options = {
        option for parameter in typer.main.get_command(app).commands["convert"].params for option in parameter.opts
    }
    assert {"--to", "--ranks"} <= options


def drop(*path: str) -> Damage:
    """Removes a key of config.json."""

    def change(folder: Path) -> None:
        def without(config: dict) -> None:
            for key in path[:-1]:
                config = config[key]
            del config[path[-1]]

        edit_json(folder / "config.json", without)

    return change


def say(**values: object) -> Damage:
    return lambda folder: edit_config(folder, **values)


def say_quantization(**values: object) -> Damage:
    return lambda folder: edit_json(folder / "config.json", lambda config: config["quantization_config"].update(values))


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def index_without_metadata(folder: Path) -> None:
    rewrite(folder, lambda name, stored: {name: stored})


QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP4_SAID_FP8 = "the experts are FP4 and it takes them for FP8"
# layout, what is changed -> consumer -> (loads, words of the first reason, words of the remedy)
TRAPS: list[tuple[TargetName, str, Damage, dict[Consumer, tuple[bool | None, str, str]]]] = [
    (
        "official",
        "no expert_dtype anywhere",
        lambda folder: [drop("expert_dtype")(folder), drop("quantization_config", "expert_dtype")(folder)],
        {
            # vLLM: fp4 where it is missing; SGLang does not read it
            "vllm": (True, "", ""),
            "sglang": (True, "", ""),
            "transformers": (False, f"{FP4_SAID_FP8} without expert_dtype", 'set "expert_dtype": "fp4"'),
            "dsv4": (True, "", ""),
        },
    ),
    (
        "official",
        "expert_dtype inside quantization_config only",
        drop("expert_dtype"),
        {"vllm": (True, "", ""), "transformers": (True, "", "")},
    ),
    (
        "official",
        "expert_dtype at the top level only",
        drop("quantization_config", "expert_dtype"),
        {"vllm": (True, "", ""), "transformers": (True, "", "")},
    ),
    (
        "official",
        "no quantization_config",
        drop("quantization_config"),
        {
            "vllm": (False, "no quantization_config", "copy config.json"),
            "sglang": (False, "no quantization_config", "copy config.json"),
            "transformers": (False, "no quantization_config", "copy config.json"),
        },
    ),
    (
        "official",
        "no activation_scheme",
        drop("quantization_config", "activation_scheme"),
        {"vllm": (False, "activation_scheme", "dynamic"), "sglang": (False, "activation_scheme", "dynamic")},
    ),
    (
        "official",
        "another quant_method",
        say_quantization(quant_method="deepseek_v4_fp8"),
        {"vllm": (None, "quant_method is 'deepseek_v4_fp8'", ""), "sglang": (None, "quant_method", "")},
    ),
    (
        "bf16",
        "a quantization_config that was left behind",
        say(quantization_config=QUANTIZATION, expert_dtype="fp8"),
        {
            "vllm": (False, "no matrix is quantised", "remove quantization_config"),
            "transformers": (False, "no matrix is quantised", "remove quantization_config"),
        },
    ),
    (
        "nvfp4",
        "a quantization_config that does not say NVFP4",
        lambda folder: [drop("quantization_config", key)(folder) for key in ("moe_quant_algo", "quant_algo")],
        {
            "vllm": (False, "does not say moe_quant_algo NVFP4", "dsv4 convert"),
            "sglang": (False, "does not say so", "dsv4 convert"),
        },
    ),
    (
        "official",
        "a quantization_config that says NVFP4",
        say_quantization(quant_algo="MIXED_PRECISION", moe_quant_algo="NVFP4", group_size=16),
        {
            "vllm": (False, "the experts are FP4 and quantization_config says moe_quant_algo NVFP4", "dsv4 convert"),
            "sglang": (False, "the experts are FP4 and quantization_config says NVFP4", "dsv4 convert"),
        },
    ),
    (
        "official",
        "no architectures",
        drop("architectures"),
        {
            "vllm": (False, "architectures is None", '"DeepseekV4ForCausalLM"'),
            "sglang": (False, "architectures is None", '"DeepseekV4ForCausalLM"'),
            "transformers": (True, "", ""),
        },
    ),
    (
        "official",
        "no model_type",
        drop("model_type"),
        {"transformers": (False, "no model_type", '"deepseek_v4"'), "dsv4": (True, "", "")},
    ),
    (
        "official",
        "no tokenizer",
        without("tokenizer.json"),
        {
            "vllm": (False, "no tokenizer.json", "copy tokenizer.json"),
            "sglang": (False, "no tokenizer.json", "copy tokenizer.json"),
            "transformers": (True, "", ""),
            "dsv4": (False, "no tokenizer.json", "copy tokenizer.json"),
        },
    ),
    (
        "mp",
        "no inference/config.json",
        without("inference/config.json"),
        {"official": (False, "no inference/config.json", "copy inference/")},
    ),
    (
        "mp",
        "a key that ModelArgs does not have",
        lambda folder: edit_json(folder / "inference/config.json", lambda values: values.update(strange=1)),
        {"official": (False, "ModelArgs has no strange", "remove strange from inference/config.json")},
    ),
    (
        "mp",
        "an inference/config.json for other experts",
        lambda folder: [
            edit_json(folder / "inference/config.json", lambda values: values.pop("expert_dtype")),
            edit_json(folder / "inference/config.json", lambda values: values.update(dtype="bf16")),
        ],
        {"official": (False, "expert_dtype is None and the experts are FP4", "dsv4 convert")},
    ),
]


@pytest.mark.parametrize(
    ("target", "change", "expected"),
    slow_except([trap[:1] + trap[2:] for trap in TRAPS[::2]], [trap[:1] + trap[2:] for trap in TRAPS]),
    ids=[trap[1] for trap in TRAPS],
)
def test_traps(converted, tmp_path, target, change, expected):
    folder = shutil.copytree(converted(target), tmp_path / "copy")
    change(folder)
    for consumer, (loads, reason, remedy) in expected.items():
        found = verdict(folder, consumer)
        assert found.loads is loads, (consumer, found)
        assert reason in "; ".join(found.reasons), (consumer, found)
        assert remedy in found.remedy, (consumer, found)


def nothing(folder: Path) -> None:
    pass


# layout and change; whether transformers loads it is asked of both
TRIED: dict[str, tuple[TargetName, Damage]] = {
    "official": ("official", nothing),
    "fp8": ("fp8", nothing),
    "bf16": ("bf16", nothing),
    "nvfp4": ("nvfp4", nothing),
    "transformers": ("transformers", nothing),
    "mp": ("mp", nothing),
    "no expert_dtype": ("official", drop("quantization_config", "expert_dtype")),
    "fp8 without expert_dtype": ("fp8", drop("quantization_config", "expert_dtype")),
    "no quantization_config": ("official", drop("quantization_config")),
    "bf16 with one": ("bf16", say(quantization_config=QUANTIZATION, expert_dtype="fp8")),
    "no schedule": ("bf16", drop("compress_ratios")),
    "no model_type": ("bf16", drop("model_type")),
}


@pytest.mark.parametrize("case", slow_except(("no expert_dtype",), TRIED))
def test_transformers_agrees(converted, tmp_path, monkeypatch, case):
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils import logging

    target, change = TRIED[case]
    folder = shutil.copytree(converted(target), tmp_path / "copy")
    if "expert_dtype" in case:
        drop("expert_dtype")(folder)
    change(folder)
    # as on a GPU with FP8, and without the package accelerate
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        _, reported = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        loads = not any(reported.values())
    except (OSError, RuntimeError, ValueError):
        loads = False
    assert verdict(folder, "transformers").loads is loads


def test_sglang_needs_the_official_keys(converted, tmp_path):
    folder = shutil.copytree(converted("transformers"), tmp_path / "copy")
    for key in ("compress_ratios", "num_hash_layers", "rope_scaling"):
        drop(key)(folder)
    reasons = verdict(folder, "sglang").reasons
    assert "config.json lacks the official compress_ratios, num_hash_layers, rope_scaling" in reasons
    assert verdict(folder, "transformers").loads is True


def test_experts_of_other_formats_than_said(tmp_path):
    fp8 = write_variant(tmp_path / "fp8", Formats("fp8", "fp8"))
    save_tokenizer(fp8)
    edit_config(fp8, expert_dtype="fp4")
    assert "takes them for FP4" in verdict(fp8, "vllm").reasons[0]
    assert "takes them for FP4" in verdict(fp8, "transformers").reasons[0]
    edit_config(fp8, expert_dtype="fp8")
    # the bytes of e8m0 scales as numbers
    assert "e8m0" in verdict(fp8, "vllm").reasons[0]
    assert verdict(fp8, "transformers").loads is True
    edit_config(fp8, expert_dtype="bf16")
    assert "vLLM knows fp4 and fp8 only" in verdict(fp8, "vllm").reasons[0]
    assert "transformers knows fp4 and fp8 only" in verdict(fp8, "transformers").reasons[0]


@pytest.mark.parametrize(
    ("ignored", "vllm", "transformers"), [(None, False, False), (["layers.0.attn.wq_a"], None, True)]
)
def test_matrices_that_are_not_quantised_beside_fp4_experts(tmp_path, ignored, vllm, transformers):
    folder = write_variant(tmp_path / "mixed", Formats("bf16", "fp4"))
    save_tokenizer(folder)
    say_quantization(ignored_layers=ignored)(folder)
    assert verdict(folder, "vllm").loads is vllm
    assert verdict(folder, "sglang").loads is vllm
    assert verdict(folder, "transformers").loads is transformers


def test_files_for_ranks_need_wo_a_in_bf16(tmp_path):
    folder = write_variant(tmp_path / "mp", Formats(), MpNaming(RANKS, CONFIG.n_routed_experts))
    assert any("wo_a is FP8 and model.py has it in bf16" in reason for reason in verdict(folder, "official").reasons)


def test_layouts_that_nobody_has_tried_or_that_the_scripts_lack(tmp_path):
    renamed = write_variant(tmp_path / "renamed", Formats(), TransformersNaming(CONFIG))
    found = verdict(renamed, "transformers")
    assert (found.loads, found.reasons[0]) == (None, "transformers' names with quantised weights have not been tried")
    cut = write_variant(tmp_path / "cut", Formats("fp8", "nvfp4"), MpNaming(RANKS, CONFIG.n_routed_experts))
    (cut / "inference").mkdir()
    (cut / "inference/config.json").write_text("{}")
    assert any("model.py has FP4 or the format of the other" in reason for reason in verdict(cut, "official").reasons)


@pytest.mark.parametrize(("drafter", "unhappy"), [("fp4", "vllm"), (None, "sglang")])
def test_the_drafter_beside_nvfp4_experts(tmp_path, drafter, unhappy):
    folder = write_variant(tmp_path / "nvfp4", Formats("fp8", "nvfp4", draft_experts=drafter))
    for consumer in ("vllm", "sglang"):
        reported = any("no speculative decoding" in note for note in verdict(folder, consumer).notes)
        assert reported is (consumer == unhappy)


@pytest.mark.parametrize(
    "harm",
    [
        damage.shard_missing,
        damage.tensor_missing,
        damage.scale_missing,
        damage.weight_missing,
        damage.tensor_misshapen,
        damage.shard_truncated,
        damage.header_not_json,
        damage.config_missing,
        damage.config_lacks_key,
    ],
)
def test_nobody_loads_what_is_damaged(tmp_path, harm):
    folder = official_copy(tmp_path)
    harm(folder)
    result = inspect_model(resolve_inspectable(str(folder)))
    for consumer in CONSUMERS:
        found = judge(result, consumer)
        assert found.loads is False
        assert found.remedy
        assert "dsv4 convert" not in found.remedy


@pytest.mark.parametrize("consumer", ["vllm", "sglang", "transformers"])
def test_a_damaged_drafter_stops_only_speculation(tmp_path, consumer):
    folder = official_copy(tmp_path)
    damage.drop_tensor(folder, "mtp.0.norm.weight")
    found = verdict(folder, consumer)
    assert found.loads is True
    assert any("the drafter is damaged: mtp.0.norm.weight is missing" in note for note in found.notes)
    assert verdict(folder, "dsv4").loads is False


@pytest.mark.parametrize("consumer", ["vllm", "sglang", "transformers"])
def test_a_rounding_that_was_made_once_is_a_note(tmp_path, consumer):
    folder = official_copy(tmp_path)
    damage.tensor_mistyped(folder)
    found = verdict(folder, consumer)
    assert found.loads is True
    assert any("1 tensor is BF16 instead of F32 (layers.3.attn.attn_sink)" in note for note in found.notes)
    assert verdict(folder, "dsv4").loads is False


@pytest.mark.parametrize(("consumer", "loads"), [("vllm", False), ("sglang", True), ("transformers", True)])
def test_a_tensor_that_is_not_the_model_s(tmp_path, consumer, loads):
    folder = official_copy(tmp_path)
    damage.tensor_extra(folder)
    found = verdict(folder, consumer)
    assert found.loads is loads
    assert any("layers.3.attn.bias is not a tensor" in text for text in (*found.reasons, *found.notes))


@pytest.mark.parametrize(("consumer", "harm"), [("vllm", damage.tensor_extra), ("official", damage.tensor_mistyped)])
def test_what_convert_refuses_is_not_to_be_converted(tmp_path, consumer, harm):
    folder = official_copy(tmp_path)
    harm(folder)
    assert verdict(folder, consumer).remedy == f"download {damage.SHARD} again"


@pytest.mark.parametrize("harm", [damage.index_lacks_tensor, damage.index_names_other_shard])
def test_an_index_that_is_wrong_does_not_stop_readers_of_whole_files(tmp_path, harm):
    folder = official_copy(tmp_path)
    harm(folder)
    assert [verdict(folder, consumer).loads for consumer in ALL] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("harm", "reason", "remedy"),
    [
        (index_without_metadata, "no key 'metadata'", 'add "metadata": {}'),
        (without(damage.INDEX), "there is neither", "dsv4 convert"),
    ],
)
def test_transformers_needs_a_whole_index(tmp_path, harm, reason, remedy):
    folder = official_copy(tmp_path)
    harm(folder)
    found = verdict(folder, "transformers")
    assert (found.loads, reason in found.reasons[0], remedy in found.remedy) == (False, True, True)
    assert verdict(folder, "vllm").loads is True


@pytest.mark.parametrize("consumer", ["vllm", "transformers"])
def test_what_others_do_with_a_key_that_is_unknown_here_is_not_known(tmp_path, consumer):
    folder = official_copy(tmp_path)
    damage.config_unknown_key(folder)
    found = verdict(folder, consumer)
    assert found.loads is None
    assert "unknown key 'engram_layers'" in found.reasons[0]
    assert verdict(folder, "dsv4").loads is False


@pytest.mark.parametrize("harm", [foreign.is_v41, foreign.has_bf16_scales, foreign.is_compressed_tensors])
def test_of_foreign_models_nothing_is_known(tmp_path, harm):
    folder = official_copy(tmp_path)
    harm(folder)
    found = verdict(folder, "vllm")
    assert found.loads is None
    assert "is not known here" in found.reasons[0]
    assert verdict(folder, "dsv4").loads is False


def test_only_a_folder_or_a_repository_is_judged():
    for model in ("random:tiny", f"{GOLDEN}/tiny-flash/model-00001-of-00003.safetensors"):
        with pytest.raises(UsageError, match="not a whole checkpoint"):
            judge(inspect_model(resolve_inspectable(model)), "vllm")


def test_commands_quote_what_a_shell_would_read():
    assert start_command("official", "a b", 4) == (
        "torchrun --nproc-per-node 4 inference/generate.py --ckpt-path 'a b' --config 'a b'/inference/config.json "
        "--interactive"
    )
    assert start_command("vllm", "a;b", 2).endswith(" --tensor-parallel-size 2")
    assert start_command("vllm", "a;b").startswith("vllm serve 'a;b' --tool")


def test_the_answer_and_the_document(converted, capsys):
    result = inspect_model(resolve_inspectable(str(converted("fp8"))))
    assert show_verdict(Output(Colours()), result, "vllm") is False
    text = capsys.readouterr().out
    assert text.startswith(f"vLLM 0.33.0 would not load {converted('fp8')}\n  the scales of the FP8 experts are e8m0")
    assert f"→ dsv4 convert {converted('fp8')} OUT --to official" in text
    assert max(len(line) for line in text.splitlines() if str(converted("fp8")) not in line) <= 80
    result = inspect_model(resolve_inspectable(str(converted("bf16"))))
    assert show_verdict(Output(Colours(), as_json=True), result, "sglang") is False
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dsv4.verdict/1"
    assert (document["consumer"], document["version"], document["loads"]) == ("sglang", "SGLang 0.5.23", None)
    assert document["reasons"]
    assert document.keys() == {
        "schema",
        "model",
        "consumer",
        "version",
        "loads",
        "reasons",
        "notes",
        "command",
        "remedy",
        "deployment",
    }
