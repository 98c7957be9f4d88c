"""llama.cpp's NLL on the same GGUF files: nano in Q8_0, Q4_K and Q2_K, token by token."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv4cli.engine.checkpoint.gguf.files import read_model
from dsv4cli.engine.checkpoint.gguf.header import gguf_header, tensor_places
from dsv4cli.engine.conversion.gguf.encode import encode
from dsv4cli.kernels.ggml.types import decode, row_bytes
from tests.support.conversions import convert
from tests.support.ggml_quantize import q2_k, q4_k
from tests.support.program import Program
from tests.support.wide_nano import make_wide_nano

QUANTIZED = re.compile(r"token_embd|^output\.weight|attn_(q_a|q_b|kv|output_a|output_b)\.weight|_exps|_shexp")
QUANTIZERS = {"Q8_0": lambda values: encode("Q8_0", {"weight": values}), "Q4_K": q4_k, "Q2_K": q2_k}
# error of quantization, as a fraction of the RMS of the values
ERRORS = {"Q8_0": 0.01, "Q4_K": 0.1, "Q2_K": 0.4}
TEXT = "What is 17 + 25? 17 + 25 = 42. What is 30 - 12?"
# one token more at a time, because the server returns no log-probabilities of a prompt
SERVER = """
import json, sys
import xllamacpp
path, ids = sys.argv[1], json.loads(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = path, 512, 1, 0
params.warmup, params.fit_params, params.verbosity, params.cpuparams.n_threads = False, False, 0, 1
server = xllamacpp.Server(params)
found = []
for count in range(1, len(ids)):
    asked = {"prompt": ids[:count], "n_predict": 1, "logprobs": 4000, "n_probs": 4000, "temperature": 1.0}
    answer = server.handle_completions(asked)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    found.append({one["id"]: one["logprob"] for one in answer}[ids[count]])
print(json.dumps(found))
"""


def quantize(source: Path, target: Path, kind: str) -> None:
    """Write a GGUF file with its large matrices in another type."""
    model, content = read_model(source), source.read_bytes()
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, info in model.checkpoint.tensors.items():
        raw, stored = content[info.begin : info.end], info.dtype
        if QUANTIZED.search(name):
            values = decode(stored, np.frombuffer(raw, np.uint8).reshape(-1, row_bytes(stored, info.shape[-1])))
            stored = kind if info.shape[-1] % 256 == 0 else "Q8_0"
            blocks = QUANTIZERS[stored](np.ascontiguousarray(values))
            error = np.sqrt(np.mean((decode(stored, blocks) - values) ** 2) / np.mean(values**2))
            assert 0 < error < ERRORS[stored], (name, error)
            raw = blocks.tobytes()
        tensors[name] = stored, info.shape, raw
    described = {name: (stored, shape) for name, (stored, shape, _) in tensors.items()}
    output = bytearray(gguf_header(model.metadata, described))
    start = len(output)
    for (begin, _), (_, _, raw) in zip(tensor_places(described), tensors.values(), strict=True):
        output += bytes(start + begin - len(output)) + raw
    target.write_bytes(output)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A file in BF16: nano with heads as wide as Flash's, which llama.cpp expects."""
    folder = tmp_path_factory.mktemp("wide")
    convert(make_wide_nano(folder / "wide"), folder / "gguf", "--to", "gguf", "--verify", "off", "--attention", "bf16")
    return next((folder / "gguf").glob("*.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_llama_cpp_has_the_same_nll(exact, monkeypatch, capsys, tmp_path, kind):
    pytest.importorskip("xllamacpp")
    path, texts = tmp_path / f"{kind}.gguf", tmp_path / "texts.jsonl"
    quantize(exact, path, kind)
    texts.write_text(json.dumps({"text": TEXT}) + "\n")
    ours = json.loads(Program(monkeypatch, capsys)("run", "--score", str(texts), "-m", str(path)).out)
    done = subprocess.run([sys.executable, "-c", SERVER, str(path), json.dumps(ours["ids"])], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    # llama.cpp rounds activations to 8 bits and does not round the KV cache to FP8 nor the indexer to FP4
    assert np.mean(theirs) == pytest.approx(np.mean(ours["logprobs"][1:]), rel=0.01)
