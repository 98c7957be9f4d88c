"""What takes long to import is imported where it is needed: not for help, a refusal, or what needs no tensors."""

import json
import subprocess
import sys

from tests.support.damage import GOLDEN
from tests.support.program import ROOT

# carries out command lines, one after another, and prints the exit code of each and what it has imported of this
PROGRAM = """
import json, sys
from dsv4cli import cli
heavy = {'torch', 'triton', 'transformers', 'huggingface_hub', 'numpy', 'safetensors', 'rich', 'prompt_toolkit'}
found = []
for sys.argv in json.loads(sys.argv[1]):
    try:
        cli.main()
    except SystemExit as left:
        found.append([left.code or 0, *sorted(heavy & sys.modules.keys())])
print()
print(json.dumps(found))
"""
FLASH = str(GOLDEN / "tiny-flash")
# the exit code of each
LINES = {
    ("--help",): 0,
    ("run", "--help"): 0,
    ("run", "hi", "--show-prompt"): 0,
    ("run", "hi", "--show-prompt", "--json"): 0,
    ("run", "hi", "--temperature", "-1"): 2,
    ("run", "hi", "--device", "gpu"): 2,
    ("run", "--prompts", "./nothing"): 2,
    ("run", "hi", "--max-context", "3"): 2,
    ("run", "hi", "--tp", "2", "--temperature", "-1"): 2,
    ("chat", "--help"): 0,
    ("chat", "--device", "gpu"): 2,
    ("inspect", FLASH): 0,
    ("inspect", FLASH, "--json"): 0,
    ("inspect", "random:tiny"): 0,
    ("inspect",): 2,
    ("serve", "--help"): 0,
    ("download", "--help"): 0,
}
# these look into the Hugging Face cache
CACHED = {
    ("serve", "flash", "--engine", "vllm", "--gpus", "8xH100", "--print"): 0,
    ("inspect", "nano", "--for", "sglang", "--gpus", "2x8xH200"): 0,
}


def imported_by(lines):
    """What each command line returns and imports, and what is printed to stderr."""
    words = json.dumps([["dsv4", *line] for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_nothing_heavy_is_imported_where_nothing_is_computed():
    found, err = imported_by(LINES)
    assert dict(zip(LINES, found, strict=True)) == {line: [code] for line, code in LINES.items()}
    # a refusal is said on stderr
    assert err.lower().count("error: ") == sum(code == 2 for code in LINES.values())


def test_another_engine_needs_no_tensors():
    found, _ = imported_by(CACHED)
    assert {*map(tuple, found)} <= {(0,), (0, "huggingface_hub")}
