"""What takes long to import is imported where it is needed: not for help, a refusal, or what needs no tensors."""

import json
import os
import subprocess
import sys

import pytest

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


# prints what a terminal shows while PyTorch is imported, which it prevents
ANNOUNCED = """
import os, sys
from dsv4cli import cli, output
shown = ['']
output.Output.wait = lambda out, text: shown.append(text)

class Torch:
    def find_spec(self, name, path=None, target=None):
        if name == 'torch':
            print(shown[-1], flush=True)
            os._exit(0)

sys.meta_path.insert(0, Torch())
cli.main()
"""


@pytest.mark.parametrize(
    "line",
    ["run hi", "chat hi", "eval --limit 1", "serve --port 0", "convert nano OUT --to bf16",
     "trace record --out OUT", "trace bisect --slots", "trace bisect --prefill-chunk 1", "trace compare A B",
     "profile kernels", "profile step", "profile warm"],
)  # fmt: skip
def test_a_terminal_shows_that_pytorch_is_imported(tmp_path, line):
    command = [sys.executable, "-c", ANNOUNCED, *line.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("importing PyTorch …\n", "")


def test_a_folder_that_is_gone_is_told_before_pytorch_fails_in_it(tmp_path):
    program = "import os, sys; os.chdir(sys.argv.pop()); os.rmdir(os.getcwd()); from dsv4cli import cli; cli.main()"
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, "run", "hi", str(tmp_path / "gone")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0].startswith("error: the current folder has been removed")
