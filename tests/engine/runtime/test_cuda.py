"""The engine on a GPU with either backend: the recorded answers, the same numbers as on the CPU, nano's answers."""

import pytest
import torch

from dsv4cli.engine.checkpoint.source import FolderSource, resolve_model
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.weights.load import build_random, load_model
from dsv4cli.kernels.block_scale import dequantise, fp4_round, fp8_round
from dsv4cli.kernels.dispatch import use
from tests.commands.run.test_nano import MANY, MOST_WRONG, chosen
from tests.support.drafting import mtp_logits
from tests.support.golden_data import BLOCK_PROMPTS, FOLDER, NETS, chunks, golden
from tools.nano.judge import is_right
from tools.nano.score import Examinee

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=["torch", "auto"])
def backend(request):
    """Plain PyTorch, or Triton for what is on the GPU and plain PyTorch for what is not."""
    with use(request.param):
        yield request.param


def on_gpu(name):
    return load_model(FolderSource(name, FOLDER / name), Numerics.reference(), device="cuda")


@pytest.mark.parametrize("split", ["recorded", "all at once", "uneven"])
@pytest.mark.parametrize("prompt", BLOCK_PROMPTS)
@pytest.mark.parametrize("name", NETS)
def test_every_block(name, prompt, split):
    net, model = golden(name), on_gpu(name)
    expected = net.outputs(prompt)
    rows = len(expected[0])
    sizes = {"recorded": [prompt] + [1] * (rows - prompt), "all at once": [rows], "uneven": [3, 2, 60, 7]}[split]
    cache = Cache(model.config, model.numerics, device="cuda")
    sequence = cache.allocate()
    parts = [[] for _ in expected]
    for start, end in chunks(sizes, rows):
        batch = make_batch(cache, [(sequence, net.tokens[0, start:end].tolist())])
        for number, (layer, streams) in enumerate(zip(model.layers, net.inputs(prompt), strict=True)):
            parts[number].append(layer(streams[start:end].cuda(), batch, cache.layers[number]).connect_post().cpu())
        cache.advance(sequence, end - start)
    for number, (part, theirs) in enumerate(zip(parts, expected, strict=True)):
        error = ((torch.cat(part).float() - theirs.float()).norm() / theirs.float().norm()).item()
        # sums in another order than on the CPU: up to 0.03; a wrong rule gives 0.1 and more
        assert error <= 0.05, f"block {number}: {error:.3g}"


@pytest.mark.parametrize("name", NETS)
def test_end_to_end(name):
    """All cases of a net together: one of few tokens hangs on a single code that is rounded the other way."""
    net, model = golden(name), on_gpu(name)
    ours, noise = {"logits": 0.0, "mtp_logits": 0.0}, {"logits": 0.0, "mtp_logits": 0.0}
    for prompt, steps in net.cases:
        cache = Cache(model.config, model.numerics, slots=2, device="cuda")
        sequences = [cache.allocate() for _ in range(2)]
        for step, (start, end) in enumerate(chunks([prompt, *[1] * steps], prompt + steps)):
            batch = make_batch(cache, [(s, net.tokens[i, start:end].tolist()) for i, s in enumerate(sequences)])
            streams = model(batch, cache.layers).streams
            following = net.tokens[:, start + 1 : end + 1].flatten().cuda()
            answers = {
                "logits": model.logits(streams[batch.last]),
                "mtp_logits": mtp_logits(model, streams, following, batch, cache, batch.last),
            }
            for sequence in sequences:
                cache.advance(sequence, end - start)
            for kind, answer in answers.items():
                recorded = net.recorded[f"p{prompt}.{kind}"][:, step]
                other = net.recorded[f"p{prompt}.{kind}_alt"][:, step]
                ours[kind] += (answer.cpu() - recorded).abs().mean().item() / (1 + steps)
                noise[kind] += (other - recorded).abs().mean().item() / (1 + steps)
    for kind in ours:
        assert ours[kind] <= 2 * noise[kind], f"{kind}: {ours[kind]:.3g}, noise {noise[kind]:.3g}"


def test_quantised_values_are_those_of_the_cpu():
    x = (torch.randn(64, 512) * torch.logspace(-20, 20, 64)[:, None]).bfloat16()
    for on_cpu, on_gpu in (
        (fp8_round(x, 128), fp8_round(x.cuda(), 128)),
        (fp4_round(x, 32), fp4_round(x.cuda(), 32)),
    ):
        assert torch.equal(on_cpu, on_gpu.cpu())
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 2)
    scales = torch.arange(255, dtype=torch.uint8).repeat(256, 1)[:, :32].clone()
    scales[:, 0] = torch.arange(256).clamp_max(200).byte()
    pairs = (
        (codes.view(torch.int8), scales.view(torch.float8_e8m0fnu)),
        (codes[:, :126].repeat(1, 4)[:, :384].view(torch.float8_e4m3fn), scales[:2, :3].view(torch.float8_e8m0fnu)),
    )
    for weight, scale in pairs:
        assert torch.equal(dequantise(weight, scale), dequantise(weight.cuda(), scale.cuda()).cpu())


def test_plain_fp32_equals_the_cpu():
    config = resolve_model("random:tiny").config
    logits = {}
    for device in ("cpu", "cuda"):
        model = build_random(config, Numerics.plain(), formats=Formats("f32", "f32", "f32"), device=device)
        cache = Cache(config, model.numerics, slots=3, device=device)
        sequences = [cache.allocate() for _ in range(3)]
        rows = []
        for sizes in ((1, 127, 150), (3, 1, 40), (130, 1, 1)):
            work = [
                (s, [(7 * s.length + 3 * i) % 512 for i in range(n)]) for s, n in zip(sequences, sizes, strict=True)
            ]
            batch = make_batch(cache, work)
            rows.append(model.logits(model(batch, cache.layers).streams))
            for sequence, ids in work:
                cache.advance(sequence, len(ids))
        logits[device] = torch.cat(rows).cpu()
    difference = (logits["cpu"] - logits["cuda"]).abs().max() / logits["cpu"].abs().max()
    assert difference <= 1e-5  # fp32 sums in another order; TF32 would give 1e-3


def test_nano_answers(backend):
    if backend == "torch":
        pytest.skip("the other backend's answers are compared with this one's")
    items = [item for items in chosen(MANY).values() for item in items]
    examinee, answers = Examinee("nano", "cuda"), {}
    for name in ("torch", "triton"):
        with use(name):
            replies = sorted(examinee.replies(items), key=lambda pair: items.index(pair[0]))
        answers[name] = [reply["ids"] for _, reply in replies]
        assert sum(is_right(item, reply) for item, reply in replies) >= sum(MANY.values()) - MOST_WRONG
    different = sum(ours != theirs for ours, theirs in zip(*answers.values(), strict=True))
    assert different <= 2
