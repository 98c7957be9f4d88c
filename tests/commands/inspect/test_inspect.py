"""`dsv4 inspect` and the program around it, from outside: streams, exit codes, documents."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4cli import __version__, cli
from dsv4cli.engine.checkpoint.identify import identify
from dsv4cli.engine.checkpoint.naming import TransformersNaming
from dsv4cli.engine.config.presets import FLASH as FLASH_KEYS
from dsv4cli.engine.config.storage import Formats, contradictions
from dsv4cli.engine.inspection import report
from dsv4cli.engine.text.tokenizer import Tokenizer
from dsv4cli.errors import Dsv4Error
from dsv4cli.output import Output, ReaderGone
from tests.support import damage
from tests.support.foreign import FOREIGN, INCOMPLETE
from tests.support.forked import Forked
from tests.support.program import Program, inside
from tests.support.slow import slow_except, slow_rows
from tests.support.synthetic import write_holes
from tests.support.terminals import Terminal
from tests.support.variants import write_variant

ROOT = Path(__file__).resolve().parents[3]
FLASH = str(damage.GOLDEN / "tiny-flash")
HARMS = damage.DAMAGES | FOREIGN | INCOMPLETE


def test_the_table_of_a_sound_checkpoint():
    done = inside("inspect", FLASH)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{FLASH} would load: all 432 tensors are present and as expected\n")
    for words in ("5 with ratios 0 0 4 128 4", "MTP", "experts fp4", "6.02M", "7.35 MB", "1 GB = 10^9 bytes"):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines()[1:])) <= 80


def test_the_document_of_a_sound_checkpoint():
    done = inside("inspect", FLASH, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    sections = ["contents", "values", "tensor", "layer", "tree", "template", "verdict", "fit", "diff"]
    known = ["schema", "model", "folder", "file", "loads", "problem", "notes", "identity", "gguf", "coverage", "sizes"]
    assert list(document) == known + sections
    assert (document["schema"], document["loads"], document["problem"]) == ("dsv4.inspect/1", True, None)
    identity = document["identity"]
    assert (identity["release"], identity["size"], identity["drafter"]) == ("v4", "custom", "mtp")
    assert (identity["layers"], identity["schedule"]) == ([0, 0, 4, 128, 4], "0 0 4 128 4")
    formats = {"linear": "fp8", "experts": "fp4", "dense": "bf16", "wo_a": "fp8", "draft_experts": "fp4"}
    assert identity["formats"] == formats
    assert document["coverage"]["complete"]
    assert document["sizes"]["nbytes"] == sum(document["sizes"]["by_family"].values()) == 7348132


def test_a_release_that_nothing_tells_is_unknown_and_the_assumed_one_is_named(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.drafter_lost(folder)
    damage.edit_config(folder, compress_ratios=[0, 0, 4, 128, 4])
    done = inside("inspect", str(folder))
    assert "\nrelease     unknown; prompts use the format of April 2026 (v4)\n" in done.stdout
    assert '            to state it, set "dsv4_release" in config.json to "v4" or "0731"\n' in done.stdout
    identity = json.loads(inside("inspect", str(folder), "--json").stdout)["identity"]
    assert (identity["release"], identity["release_known"]) == ("v4", False)
    damage.edit_config(folder, dsv4_release="0731")
    assert "\nrelease     0731 or later\n" in inside("inspect", str(folder)).stdout
    identity = json.loads(inside("inspect", str(folder), "--json").stdout)["identity"]
    assert (identity["release"], identity["release_known"]) == ("0731", True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("random:flash", ("DeepSeek-V4-Flash", "0 0 (4 128)×20 4", "159.61 GB", "284.33B", "13.80B", "13.27B")),
        *slow_rows(("random:pro,experts=6", ("6 per layer", "128 128 (4 128)×29 4"))),
        ("random:flash-0731,experts=6", ("0731", "DSpark, 3 blocks")),
        ("random:tiny,layers=2", ("2 with ratios 0 0",)),
    ],
)
def test_a_model_of_random_weights_needs_no_files(model, words):
    done = inside("inspect", model)
    assert done.exit_code == 0
    assert all(word in done.stdout for word in words)
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_a_released_model_takes_seconds(tmp_path):
    nbytes, _ = write_holes(tmp_path, FLASH_KEYS, 46)
    assert nbytes == 159_609_485_896
    # a process begins with the peak of the one that has started it, and pytest's is large
    starts = "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:])\n"
    starts += "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
    starts += "print(used.ru_utime + used.ru_stime, used.ru_maxrss); sys.exit(code)"
    command = [sys.executable, "-c", starts, sys.executable, "-m", "dsv4cli", "inspect", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()
    assert first == f"{tmp_path} would load: all 69,187 tensors are present and as expected"
    seconds, peak = map(float, last.split())
    # processor time, of which other processes take nothing; 1.5 s on a Xeon
    assert seconds < 3
    # kB on Linux, bytes on macOS; 110 MB
    assert peak < 300e6 / (1024 if sys.platform == "linux" else 1)


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ((), ""),
        ((4,), "4"),
        ((0, 0, 4, 128, 4), "0 0 4 128 4"),
        ((0, 0) + (4, 128) * 20 + (4,), "0 0 (4 128)×20 4"),
        ((128, 128) + (4, 128) * 29 + (4,), "128 128 (4 128)×29 4"),
        ((4,) * 5 + (0, 4), "4×5 0 4"),
        ((4, 128, 4, 128), "(4 128)×2"),
    ],
)
def test_a_schedule_is_short(ratios, text):
    assert report.schedule(ratios) == text


@pytest.mark.parametrize("harm", slow_except([*HARMS][::3], HARMS), ids=lambda harm: harm.__name__)
def test_what_would_not_load_is_told_with_exit_code_3(tmp_path, harm):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    table = inside("inspect", str(folder))
    assert (table.exit_code, table.stderr) == (3, "")
    first, reason, *others = table.stdout.splitlines()
    assert first == f"{folder} would not load"
    assert all(words in "\n".join([reason, *others]) for words in HARMS[harm])
    assert any(line.startswith("→ ") for line in others)
    document = inside("inspect", str(folder), "--json")
    assert (document.exit_code, document.stderr) == (3, "")
    problem = json.loads(document.stdout)["problem"]
    assert problem["kind"] == ("unsupported" if harm in FOREIGN else "damaged")
    assert all(words in problem["message"] for words in HARMS[harm])
    assert problem["remedy"]


def test_a_damaged_checkpoint_from_outside(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.shard_missing(folder)
    code, out, err = Forked("-m", "dsv4cli", "inspect", str(folder)).ended()
    assert (code, err) == (3, "")
    assert f"{damage.SHARD} is missing" in out
    assert "Traceback" not in out


def test_a_long_list_is_cut_in_the_table_and_whole_in_the_document(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.rewrite(folder, lambda name, stored: {} if ".ffn.experts." in name else {name: stored})
    table = inside("inspect", str(folder)).stdout
    assert "  and 208 more; --json lists them all\n" in table
    assert len(json.loads(inside("inspect", str(folder), "--json").stdout)["coverage"]["missing"]) == 216


def commands_in(text: str) -> list[list[str]]:
    """What a user would paste of a text, as a shell parts it."""
    return [shlex.split(command) for command in re.findall("`([^`]*)`", text)]


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        (Formats("fp8", "nvfp4"), "ModelOpt's, with NVFP4 experts"),
        (Formats("fp8_f32", "fp8_f32"), "official names, all matrices in FP8 with FP32 scales"),
        (None, "transformers' names, experts stacked"),
    ],
    ids=str,
)
def test_other_layouts_would_load_and_are_named(tmp_path, formats, words):
    naming = None if formats else TransformersNaming(identify(damage.GOLDEN / "tiny-flash").config)
    folder = write_variant(tmp_path / "it's mine", formats or Formats("bf16", "bf16"), naming)
    done = inside("inspect", str(folder))
    assert (done.exit_code, done.stdout.splitlines()[0].partition(":")[0]) == (0, f"{folder} would load")
    assert words in done.stdout


def test_a_damaged_snapshot_of_the_cache_is_repaired_by_a_command(tmp_path):
    folder = tmp_path / "models--org--a-b" / "snapshots" / ("0" * 40)
    folder.parent.mkdir(parents=True)
    damage.copy_checkpoint(tmp_path).rename(folder)
    damage.tensor_missing(folder)
    assert commands_in(inside("inspect", str(folder)).stdout) == [["dsv4", "download", "org/a-b@" + "0" * 40]]


def with_tokenizer(folder):
    (folder / "tokenizer.json").write_text(Tokenizer.byte_level().text())
    return folder


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "no tokenizer.json in "),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer file: "),
        ("tokenizer.json", Tokenizer.byte_level().text().replace("｜User｜", "Sir"), "has no token <｜User｜>"),
        ("generation_config.json", "{", "generation_config.json cannot be used: "),
        ("generation_config.json", '{"temperature": 0.5}', ""),
    ],
    ids=lambda value: value if value is None else value[:30],
)
def test_a_note_says_why_prompts_would_fail(tmp_path, dsv4, name, content, words):
    folder = with_tokenizer(damage.copy_checkpoint(tmp_path))
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    done, document = dsv4("inspect", str(folder)), json.loads(dsv4("inspect", str(folder), "--json").out)
    [*notes] = document["notes"]
    assert (done.code, document["loads"], len(notes)) == (0, True, bool(words))
    assert ("  note: run, chat, serve and eval fail: " in done.out) is bool(words)
    assert all(note.startswith("run, chat, serve and eval fail: ") and words in note for note in notes)
    run = dsv4("run", "hi", "--show-prompt", "--model", str(folder))  # the note is what `run` says
    assert run.code == bool(words)
    assert words in run.err


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"expert_dtype": "fp8"}, "config.json says expert_dtype 'fp8', and the experts are fp4"),
        ({"quantization_config": {"expert_dtype": "bf16"}}, "quantization_config.expert_dtype 'bf16', and the experts"),
        ({"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}, ""),
    ],
    ids=str,
)
def test_a_configuration_that_contradicts_the_tensors_is_told(tmp_path, config, note):
    folder = with_tokenizer(damage.copy_checkpoint(tmp_path))
    damage.edit_config(folder, **config)
    done, document = inside("inspect", str(folder)), json.loads(inside("inspect", str(folder), "--json").stdout)
    assert (done.exit_code, document["loads"], len(document["notes"])) == (0, True, bool(note))
    shown = " ".join(done.stdout.split())
    assert (note in "".join(document["notes"]), note in shown) == (True, True)
    assert ("; dsv4 uses the tensors, other programs may not" in shown) is bool(note)


@pytest.mark.parametrize(
    ("formats", "config", "note"),
    [
        (Formats("bf16", "bf16"), {"quantization_config": {}}, "and no matrix is quantised"),
        (Formats("bf16", "bf16"), {}, ""),
        (Formats("bf16", "fp4"), {"quantization_config": {}}, "fp8, and the matrices outside the experts are bf16"),
        (Formats("bf16", "fp4"), {"quantization_config": {"ignored_layers": ["attn"]}}, ""),
        (Formats("fp8", "nvfp4"), {"quantization_config": {}}, "does not say moe_quant_algo 'NVFP4', and the experts"),
        (Formats("fp8", "nvfp4"), {"quantization_config": {"moe_quant_algo": "NVFP4"}, "expert_dtype": "fp4"}, ""),
        (Formats(), {"quantization_config": {"moe_quant_algo": "NVFP4"}}, "says moe_quant_algo 'NVFP4', and the"),
        (Formats(), {"quantization_config": {}}, ""),
        (Formats("fp8", "nvfp4"), {"quantization_config": {"quant_method": "compressed-tensors"}}, ""),
        (Formats("fp8_f32", "fp8_f32"), {"quantization_config": {}, "expert_dtype": "fp8"}, ""),
    ],
    ids=str,
)
def test_what_contradicts_the_stored_formats(formats, config, note):
    if "quantization_config" in config:
        config = config | {"quantization_config": {"quant_method": "fp8"} | config["quantization_config"]}
    notes = list(contradictions(config, formats))
    assert (len(notes), note in "".join(notes)) == (bool(note), True)


def test_a_name_with_control_characters_does_not_reach_the_terminal(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    path = folder / damage.SHARD
    damage.write_shard(path, damage.read_shard(path) | {"a\x1b[31m[bold]b": damage.Stored("U8", [1], b"x")})
    stdout = inside("inspect", str(folder)).stdout
    assert r"a\x1b[31m[bold]b is not a tensor of this model" in stdout


def test_a_name_of_a_tensor_begins_no_line_and_does_not_flood_the_terminal(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    path = folder / damage.SHARD
    name = f"a\n{folder} would load\u202e" + "y" * 10**6
    damage.write_shard(path, damage.read_shard(path) | {name: damage.Stored("U8", [1], b"x")})
    for options in ([], ["--for", "vllm"], ["--tensor", name]):
        stdout = inside("inspect", str(folder), *options).stdout
        assert "\u202e" not in stdout
        assert f"{folder} would load" not in [line[: len(f"{folder} would load")] for line in stdout.splitlines()]
        assert len(stdout) < 4000
        assert "y…y" in stdout.replace("\n", "").replace(" ", "")
        assert ",000," in stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["inspect"], 2, "Missing argument"),
        (["inspect", FLASH, "--jason"], 2, "No such option"),
        (["inspekt", FLASH], 2, "inspect"),
        (["inspect", "random:huge"], 2, "error: random:huge: there is no preset 'huge'\n→ "),
        (["inspect", "./nothing", "--json"], 1, "error: there is no folder ./nothing\n→ "),
        (["inspect", FLASH, "--tensor", ""], 2, "has no tensor ''"),
        (["inspect", FLASH, "--layer", ""], 2, "there is no layer "),
        (["inspect", FLASH, "--diff", ""], 2, "error: '' is neither a folder nor a known model"),
        (["inspect", "nothing.gguf"], 1, "error: there is no file nothing.gguf\n→ "),
        (["inspect", FLASH, "--diff", "nothing.safetensors"], 1, "error: there is no file nothing.safetensors\n→ "),
        (["inspect", "nothing"], 2, "error: 'nothing' is neither a folder nor a known model\n→ "),
    ],
)
def test_a_wrong_call_is_told_on_stderr(arguments, code, words, monkeypatch, capsys):
    done = Program(monkeypatch, capsys)(*arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert "Traceback" not in done.err


def test_the_help_lists_exit_codes_and_ends_with_examples():
    for page in (inside("--help").stdout, inside("inspect", "--help").stdout):
        body, _, examples = page.partition("Examples:\n")
        for words in (
            "0 ok",
            "1 failure",
            "2 usage",
            "3 checked",
            "4 unsupported",
            "5 not enough",
            "7 finished",
            "130",
        ):
            assert words in body
        assert all(line.startswith("    dsv4 ") for line in examples.rstrip().splitlines())
        assert max(map(len, page.splitlines())) <= 80


COMMANDS = ("convert", "download", "inspect", "run")


def test_the_first_page_shows_every_command():
    page = inside("--help").stdout
    body, _, examples = page.partition("Examples:\n")
    assert all(f"    dsv4 {command} " in examples for command in COMMANDS)
    assert "..." not in body.partition("Commands:\n")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_are_calls_that_exist(command):
    page = inside(command, "--help").stdout
    examples = page.partition("Examples:\n")[2].strip().splitlines()
    assert examples
    assert max(map(len, page.splitlines())) <= 80
    for example in examples:
        # without remarks and redirections
        words = shlex.split(re.sub(r"  +\(.*\)| [<>] \S+", "", example))
        assert words[:2] == ["dsv4", command]
        # options are known before the help is shown
        assert inside(*words[1:], "--help").exit_code == 0


def test_every_question_of_inspect_has_an_example():
    examples = inside("inspect", "--help").stdout.partition("Examples:\n")[2]
    assert all(f" {option} " in examples for option in ("--values", "--fit", "--for", "--diff", "--tensor"))


@pytest.mark.parametrize(
    ("question", "command"),
    [
        (["--for", "vllm"], "vllm serve ./-g "),
        (["--for", "official"], "dsv4 convert ./-g OUT --to mp"),
        (["--fit"], "dsv4 run --model ./-g "),
        (["--fit", "--ram", "0.1GB"], "dsv4 inspect ./-g --fit "),
    ],
)
def test_a_folder_that_looks_like_an_option_can_be_pasted(tmp_path, monkeypatch, question, command):
    (tmp_path / "-g").symlink_to(ROOT / "dsv4cli" / "nano")
    monkeypatch.chdir(tmp_path)
    assert f"→ {command}" in inside("inspect", *question, "--", "-g").stdout


def test_the_version():
    assert inside("--version").stdout == f"dsv4 {__version__}\n"


def test_a_reader_that_leaves_ends_the_program_quietly():
    program = subprocess.Popen(
        [sys.executable, "-m", "dsv4cli", "inspect", FLASH], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == b""
    program.stderr.close()
    assert program.wait(60) == 0


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)], ids=str
)
def test_colour_is_for_terminals_that_want_it(environment, coloured):
    terminal = Terminal("inspect", FLASH, **environment)
    assert terminal.leave() == 0
    assert ("\x1b[" in terminal.shown) is coloured


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (Dsv4Error("it failed", "try again"), 1, "error: it failed\n→ try again\n"),
        (MemoryError(), 5, "error: the machine ran out of memory\n→ "),
        (
            OSError(28, "No space left on device", "out.bin"),
            5,
            "error: no space left on the disk while writing out.bin\n→ ",
        ),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(143), 143, ""),
    ],
    ids=repr,
)
def test_the_boundary_turns_a_failure_into_an_exit_code(monkeypatch, capsys, raised, code, words):
    def fail(*_):
        raise raised

    monkeypatch.setattr(report, "inspect_model", fail)
    monkeypatch.setattr(sys, "argv", ["dsv4", "inspect", FLASH])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(words)
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("gone", [ReaderGone(), OSError(28, "No space left on device")], ids=repr)
def test_a_failure_that_nobody_hears_has_its_exit_code(monkeypatch, capsys, gone):
    def fail(*_):
        raise gone

    silent = []
    monkeypatch.setattr(cli, "_be_silent", lambda: silent.append(True))
    monkeypatch.setattr(Output, "error", fail)
    assert (Program(monkeypatch, capsys)("inspect", "nothing").code, silent) == (2, [True])


@pytest.mark.parametrize("raised", [ValueError("a bug"), OSError(13, "Permission denied", "x")], ids=repr)
def test_a_bug_keeps_its_traceback(monkeypatch, raised):
    def fail(*_):
        raise raised

    monkeypatch.setattr(report, "inspect_model", fail)
    monkeypatch.setattr(sys, "argv", ["dsv4", "inspect", FLASH])
    with pytest.raises(type(raised)):
        cli.main()


def test_the_traceback_of_a_failure_is_there_for_the_asking():
    code, _, err = Forked("-m", "dsv4cli", "inspect", "./nothing", DSV4_DEBUG="1").ended()
    assert code == 1
    assert "Traceback" in err
    assert err.splitlines()[-2] == "error: there is no folder ./nothing"


def test_sigterm_is_143(tmp_path):
    waits = "import os, signal, sys; from dsv4cli import cli; from dsv4cli.engine.inspection import report\n"
    waits += "report.inspect_model = lambda _: os.kill(os.getpid(), signal.SIGTERM)\ncli.main()"
    assert Forked("-c", waits, "inspect", FLASH).ended() == (143, "", "")
