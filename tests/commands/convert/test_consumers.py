"""`dsv4 convert`, read by others: transformers, the official converter's rules, ModelOpt's, a plain safetensors loader.

What is expected follows from the source alone, by formulas that share no line with the converter.
"""

import json
import re
import shutil
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.weights.load import load_model
from dsv4cli.kernels.indexer import ref as indexer_ref
from tests.support import damage, synthetic
from tests.support.conversions import E2M1, convert, cut_dimension, differing, run, same, transformers_place
from tests.support.golden_data import TieWatch, topk_entries
from tests.support.oracle import logits_in_chunks
from tests.support.program import BYTES, save_tokenizer
from tests.support.slow import slow

TOKENS = 140
# seeds of texts in which no two scores of the indexer tie for the last place, so that there is one right choice
UNTIED = {"tiny-flash": 1, "tiny-pro": 12}
# relative, of a token's logits: fp32 sums in another order are 2e-6 apart, two swapped tensors 1
TOLERANCE = 1e-5
# the keys of the official ModelArgs -> those of the root file
MODEL_ARGS = {
    "n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads", "head_dim": "head_dim",
    "rope_head_dim": "qk_rope_head_dim", "q_lora_rank": "q_lora_rank", "o_lora_rank": "o_lora_rank",
    "o_groups": "o_groups", "n_routed_experts": "n_routed_experts", "n_shared_experts": "n_shared_experts",
    "n_activated_experts": "num_experts_per_tok", "moe_inter_dim": "moe_intermediate_size",
    "route_scale": "routed_scaling_factor", "score_func": "scoring_func", "n_hash_layers": "num_hash_layers",
    "swiglu_limit": "swiglu_limit", "window_size": "sliding_window", "compress_ratios": "compress_ratios",
    "index_n_heads": "index_n_heads", "index_head_dim": "index_head_dim", "index_topk": "index_topk",
    "hc_mult": "hc_mult", "hc_sinkhorn_iters": "hc_sinkhorn_iters", "hc_eps": "hc_eps", "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta", "compress_rope_theta": "compress_rope_theta", "vocab_size": "vocab_size",
    "n_mtp_layers": "num_nextn_predict_layers", "rope_factor": "rope_scaling.factor",
    "original_seq_len": "rope_scaling.original_max_position_embeddings", "beta_fast": "rope_scaling.beta_fast",
    "beta_slow": "rope_scaling.beta_slow",
}  # fmt: skip
OFFICIAL_STORAGE = {"dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
# what a root file may leave out
DEFAULTS = {"n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "num_nextn_predict_layers": 1}


# the larger net has no kind of tensor of its own
LARGER = pytest.param("tiny-pro", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[*slow("tiny-flash"), LARGER, "dspark"])
def net(request, sources):
    return sources(request.param)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The folder of a net in the official layout, by name, with a tokenizer."""

    @cache
    def of(name):
        folder = tmp_path_factory.mktemp("sources")
        if name == "dspark":
            return synthetic.write_checkpoint(folder / name, synthetic.DSPARK)
        folder = damage.copy_checkpoint(folder, name)
        save_tokenizer(folder)
        return folder

    return of


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The folder that `dsv4 convert SOURCE … --to …` writes, once for each source and options."""

    @cache
    def of(source, options):
        folder = tmp_path_factory.mktemp("converted") / "out"
        convert(source, folder, "--to", *options.split(), "--verify", "off")
        return folder

    return of


@pytest.fixture(scope="module")
def loaded(sources, converted):
    """What transformers makes of a net after `--to …`, in fp32, and what it has to say about it."""

    @cache
    def of(name, target):
        from transformers import AutoModelForCausalLM

        folder = converted(sources(name), f"{target} --max-shard-size 2MB")
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )

    return of


@cache
def original(folder):
    """The tensors of a source, and their values."""
    tensors = load(folder)
    return tensors, values(tensors)


def load(folder):
    """Every tensor, from the file where the index puts it, as any program with the safetensors library does."""
    tensors = {}
    weight_map = json.loads((folder / damage.INDEX).read_text())["weight_map"]
    for file in sorted({*weight_map.values()}):
        found = load_file(folder / file)
        assert found.keys() == {name for name, place in weight_map.items() if place == file}
        tensors |= found
    return tensors


def values(tensors):
    """Values by weight, fp32, by the definition of each format; integers as they are."""
    found = {}
    for name, weight in tensors.items():
        stem = name.removesuffix(".weight")
        if name.endswith((".scale", ".weight_scale", ".weight_scale_2", ".input_scale")):
            continue
        if weight.dtype == torch.uint8:
            scale = tensors[f"{stem}.weight_scale"].float() * tensors[f"{stem}.weight_scale_2"]
            found[name] = codes(weight) * scale.repeat_interleave(16, 1)
        elif f"{stem}.scale" in tensors and weight.dtype == torch.int8:
            found[name] = codes(weight) * tensors[f"{stem}.scale"].float().repeat_interleave(32, 1)
        elif f"{stem}.scale" in tensors:
            found[name] = weight.float() * blocks(tensors[f"{stem}.scale"].float(), weight)
        else:
            found[name] = weight.float() if weight.is_floating_point() else weight
    return found


def codes(packed):
    """The values of e2m1 codes, two in a byte, the low half first."""
    byte = torch.arange(256)
    return torch.stack((E2M1[byte & 15], E2M1[byte >> 4]), 1)[packed.view(torch.uint8).int()].flatten(1)


def blocks(scale, weight):
    """A number for each 128 x 128 values, at each of them."""
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]


def text(seed):
    return torch.randint(0, 512, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def transformers_logits(model, ids):
    return model.eval()(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def furthest(logits, expected):
    return float(((logits - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize("target", ["transformers", *slow("bf16")])
@pytest.mark.parametrize("name", ["tiny-flash", LARGER])
def test_transformers_takes_every_tensor(sources, loaded, name, target):
    """Of `bf16` it renames and stacks the tensors itself; of `transformers` we have done it."""
    model, info = loaded(name, target)
    assert type(model).__name__ == "DeepseekV4ForCausalLM"
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert not [key for key in info["unexpected_keys"] if not key.startswith("mtp.")]
    parameters, used = model.state_dict(), set()
    for official, value in original(sources(name))[1].items():
        if official.startswith("mtp."):
            continue
        key, expert, half = transformers_place(official)
        found = parameters[key] if expert is None else parameters[key][expert]
        found = found if half is None else found.chunk(2)[half]
        assert same(found.contiguous(), value), official
        used.add(key)
    assert used == parameters.keys()


@pytest.mark.parametrize("name", ["tiny-flash", LARGER])
def test_transformers_computes_what_the_original_does(loaded, monkeypatch, name):
    model, _ = loaded(name, "transformers")
    engine = load_model(FolderSource(name, damage.GOLDEN / name), Numerics.plain())
    watch = TieWatch()
    monkeypatch.setattr(indexer_ref, "top_entries", watch)
    ids = text(UNTIED[name])
    assert furthest(transformers_logits(model, ids), logits_in_chunks(engine, ids, [TOKENS])) < TOLERANCE
    assert watch.tied
    assert not any(tied.any() for tied in watch.tied)
    # other texts have ties, which torch.topk resolves in transformers
    monkeypatch.setattr(indexer_ref, "top_entries", topk_entries)
    for seed in (2, 3):
        ids = text(seed)
        assert furthest(transformers_logits(model, ids), logits_in_chunks(engine, ids, [TOKENS])) < TOLERANCE


@pytest.mark.parametrize("target", ["transformers", *slow("bf16")])
def test_transformers_finds_the_tokenizer(sources, converted, target):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted(sources("tiny-flash"), f"{target} --max-shard-size 2MB"))
    assert tokenizer("Grüße")["input_ids"] == BYTES.encode("Grüße")


def test_what_transformers_saves_comes_back(sources, loaded, tmp_path):
    """After fine-tuning: its own shards, its own config.json, without the drafter, which it does not have."""
    model, _ = loaded("tiny-flash", "transformers")
    model.save_pretrained(tmp_path / "theirs", save_original_format=False, max_shard_size="5MB")
    convert(tmp_path / "theirs", tmp_path / "ours", "--to", "official")
    _, expected = original(sources("tiny-flash"))
    expected = {name: value for name, value in expected.items() if not name.startswith("mtp.")}
    assert differing(values(load(tmp_path / "ours")), expected) == []


@pytest.mark.slow  # test_what_transformers_saves_comes_back covers its usual way
@pytest.mark.parametrize(
    ("dtype", "original_format"),
    [(torch.bfloat16, True), (torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
    ids=str,
)
def test_what_transformers_saves_in_other_ways_comes_back(sources, converted, tmp_path, dtype, original_format):
    """Its bf16 models keep norms and some others in fp32; by default it undoes half of the renaming."""
    from transformers import AutoModelForCausalLM

    source = sources("tiny-flash")
    model = AutoModelForCausalLM.from_pretrained(converted(source, "transformers --max-shard-size 2MB"), dtype=dtype)
    model.save_pretrained(tmp_path / "theirs", save_original_format=original_format)
    # it would load as it is
    code, out, err = run("inspect", tmp_path / "theirs", "--json")
    assert (code, json.loads(out)["coverage"]["complete"]) == (0, True), err
    assert "all are exact" in convert(tmp_path / "theirs", tmp_path / "ours", "--to", "official", "--verify", "full")
    expected = {name: value for name, value in original(source)[1].items() if not name.startswith("mtp.")}
    assert differing(values(load(tmp_path / "ours")), expected) == []


def test_what_an_earlier_transformers_has_saved_comes_back(sources, converted, tmp_path):
    """It made bf16 of what the releases have in fp32: every value that is left is kept."""
    source = sources("tiny-flash")
    theirs = shutil.copytree(converted(source, "transformers --max-shard-size 2MB"), tmp_path / "theirs")
    narrow = {"F32": lambda stored: replace(stored, dtype="BF16", data=half(stored.data))}
    damage.rewrite(theirs, lambda name, stored: {name: narrow.get(stored.dtype, lambda same: same)(stored)})
    assert "all are exact" in convert(theirs, tmp_path / "ours", "--to", "official", "--verify", "full")
    tensors = load(tmp_path / "ours")
    assert tensors["layers.1.hc_attn_fn"].dtype == torch.float32
    expected = original(source)[0]["layers.1.hc_attn_fn"]
    assert same(tensors["layers.1.hc_attn_fn"], half_of(expected))


def test_what_transformers_has_saved_in_part_is_to_be_saved_again(sources, converted, tmp_path):
    theirs = shutil.copytree(converted(sources("tiny-flash"), "transformers --max-shard-size 2MB"), tmp_path / "theirs")
    damage.rewrite(theirs, lambda name, stored: {} if "q_a_proj" in name else {name: stored})
    code, _, err = run("convert", theirs, tmp_path / "ours", "--to", "official")
    assert (code, "`model.save_pretrained(FOLDER)`" in err, "q_a_proj.weight is missing" in err) == (1, True, True)


def half(data):
    return (
        half_of(torch.frombuffer(bytearray(data), dtype=torch.float32)).bfloat16().view(torch.uint8).numpy().tobytes()
    )


def half_of(tensor):
    return tensor.bfloat16().float()


def official_ranks(source, count, fp8=False):
    """The tensors of each file that the official convert.py writes: its steps, one after another."""
    tensors, _ = original(source)
    assert [name for name in tensors if name.startswith("model.") or dropped(name)] == []
    experts = 1 + max(int(name.split(".")[-3]) for name in tensors if ".ffn.experts." in name)
    ranks = []
    for rank in range(count):
        own = {}
        for name, tensor in tensors.items():
            dim = cut_dimension(name)
            if ".ffn.experts." in name:
                if int(name.split(".")[-3]) // (experts // count) == rank:
                    own[name] = tensor
            elif dim is None:
                own[name] = tensor
            else:
                size = tensor.shape[dim] // count
                assert size * count == tensor.shape[dim]
                own[name] = tensor.narrow(dim, rank * size, size)
        ranks.append(prepared(own, fp8))
    return ranks


def dropped(name):
    """No release has a tensor that the official converter leaves out."""
    return name.startswith("mtp.") and ("emb" in name or name.endswith("head.weight"))


def prepared(tensors, fp8):
    """wo_a in bf16 without its scale; experts as pairs of e2m1 codes or, at wish, in FP8."""
    found = {}
    for name, tensor in tensors.items():
        stem = name.rpartition(".")[0]
        if stem.endswith(".wo_a"):
            if name.endswith(".weight"):
                found[name] = (tensor.float() * blocks(tensors[f"{stem}.scale"].float(), tensor)).bfloat16()
        elif tensor.dtype != torch.int8:
            # not the scale of an expert that has got a new one
            found.setdefault(name, tensor)
        elif fp8:
            found |= dict(zip((name, f"{stem}.scale"), fp8_expert(tensor, tensors[f"{stem}.scale"]), strict=True))
        else:
            found[name] = tensor.view(torch.float4_e2m1fn_x2)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def fp8_expert(packed, scale):
    """The official scale of a block: the largest of its groups' scales / 2 ** 6."""
    scale = scale.float()
    rows, groups = scale.shape
    block = scale.unflatten(0, (-1, 128)).unflatten(2, (groups // 4, 4)).amax((1, 3)) / 64
    each = block.repeat_interleave(128, 0).repeat_interleave(4, 1)[:rows]
    weight = codes(packed) * (scale / each).repeat_interleave(32, 1)
    return weight.to(torch.float8_e4m3fn), block.to(torch.float8_e8m0fnu)


@pytest.mark.parametrize("options", [*slow("--ranks 1", "--ranks 2"), "--ranks 2 --experts fp8"])
def test_the_files_for_ranks_are_those_of_the_official_converter(net, converted, tmp_path, options):
    folder, count = converted(net, f"mp {options}"), int(options.split()[1])
    for rank, tensors in enumerate(official_ranks(net, count, fp8="fp8" in options)):
        file = f"model{rank}-mp{count}.safetensors"
        # the safetensors library, by which the official converter writes and the official script reads
        save_file(tensors, tmp_path / file)
        assert damage.read_shard(folder / file) == damage.read_shard(tmp_path / file)
        found = load_file(folder / file)
        assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
            name: (t.dtype, t.shape) for name, t in tensors.items()
        }
    assert len(list(folder.glob("*.safetensors*"))) == count


@pytest.mark.parametrize("options", ["--ranks 2", "--ranks 2 --experts fp8"])
def test_the_official_script_takes_the_configuration(net, converted, options):
    root = DEFAULTS | json.loads((net / "config.json").read_text())
    expected = {}
    for key, name in MODEL_ARGS.items():
        table, _, leaf = name.rpartition(".")
        expected[key] = (root[table] if table else root)[leaf]
    expected |= {key: value for key, value in root.items() if key.startswith("dspark_")} | OFFICIAL_STORAGE
    if net.name == "dspark":
        expected["n_mtp_layers"] = 3
    if "fp8" in options:
        # null, or no such key: as the other matrices
        expected["expert_dtype"] = None
    # ModelArgs(**values) fails for a key that it does not have
    assert json.loads((converted(net, f"mp {options}") / "inference" / "config.json").read_text()) == expected


def test_nvfp4_is_laid_out_as_by_modelopt(net, converted):
    (source, expected), found = original(net), load(converted(net, "nvfp4"))
    experts = [name for name in source if re.fullmatch(r"layers\.\d+\.ffn\.experts\.\d+\.w[123]\.weight", name)]
    replaced = {*experts, *(name.replace(".weight", ".scale") for name in experts)}
    parts = {name + suffix for name in experts for suffix in ("", "_scale", "_scale_2")}
    parts |= {name.replace(".weight", ".input_scale") for name in experts}
    assert found.keys() == source.keys() - replaced | parts
    # the drafter and all else as they were
    assert [name for name in source.keys() - replaced if not same(found[name], source[name])] == []
    for name in experts:
        rows, half = source[name].shape
        scale, scale_2 = found[f"{name}_scale"], found[f"{name}_scale_2"]
        inputs = found[name.replace(".weight", ".input_scale")]
        assert (found[name].dtype, found[name].shape) == (torch.uint8, (rows, half))
        assert (scale.dtype, scale.shape) == (torch.float8_e4m3fn, (rows, half // 8))
        assert (scale_2.dtype, scale_2.shape) == (inputs.dtype, inputs.shape) == (torch.float32, ())
        assert inputs > 0
        # the nibbles are the source's, and the largest scale becomes the largest power of two of e4m3; one number for
        # w1 and w3, which kernels run as one matrix
        assert torch.equal(found[name], source[name].view(torch.uint8))
        fused = {name, name.replace(".w1.", ".w3."), name.replace(".w3.", ".w1.")}
        largest = max(float(source[one.replace(".weight", ".scale")].float().max()) for one in fused)
        assert float(scale_2) == largest / 256
    assert differing(values(found), expected) == []


def test_nvfp4_says_what_is_quantised_and_how(net, converted):
    folder = converted(net, "nvfp4")
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    manifest = json.loads((folder / "hf_quant_config.json").read_text())
    assert {key: quantization[key] for key in ("quant_method", "quant_algo", "moe_quant_algo", "group_size")} == {
        "quant_method": "fp8", "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16
    }  # fmt: skip
    assert config["expert_dtype"] == quantization["expert_dtype"] == "fp4"
    assert quantization["producer"]["name"] == manifest["producer"]["name"] == "modelopt"
    layers, ignore = quantization["quantized_layers"], quantization["ignore"]
    assert (manifest["quantization"]["quantized_layers"], manifest["quantization"]["exclude_modules"]) == (
        layers,
        ignore,
    )
    assert all(layer == {"quant_algo": "NVFP4", "group_size": 16} for layer in layers.values())
    used = set()
    for name, tensor in load(folder).items():
        module = name.removesuffix(".weight")
        under = [layer for layer in layers if module.startswith(f"{layer}.")]
        ignored = any(fnmatchcase(module, pattern) for pattern in ignore)
        if tensor.dtype == torch.uint8:
            assert (len(under), ignored) == (1, False), name
            used.add(under[0])
        elif tensor.dtype in (torch.int8, torch.float8_e4m3fn) and name.endswith(".weight"):
            assert (under, ignored) == ([], True), name
    assert used == layers.keys()
    # vLLM reads names here, and skips what it finds: nothing but the head is without a quantisation
    assert quantization["ignored_layers"] == ["head"]


@pytest.mark.parametrize("target", [*slow("bf16"), "fp8"])
def test_a_plain_loader_reads_the_values(net, converted, target):
    (source, expected), found = original(net), load(converted(net, target))
    assert differing(values(found), expected) == []
    plain = {name for name, tensor in source.items() if tensor.dtype in (torch.float32, torch.int64)}
    assert [name for name in plain if not same(found[name], source[name])] == []
    kinds = {tensor.dtype for name, tensor in found.items() if name not in plain}
    config = json.loads((converted(net, target) / "config.json").read_text())
    assert config["expert_dtype"] == target
    if target == "bf16":
        assert kinds == {torch.bfloat16}
        assert "quantization_config" not in config
        return
    assert kinds == {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu}
    assert found.keys() == source.keys()
    assert config["quantization_config"]["expert_dtype"] == "fp8"
    for name, tensor in found.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = found[name.replace(".weight", ".scale")]
            assert (scale.dtype, scale.shape) == (torch.float8_e8m0fnu, tuple(-(-size // 128) for size in tensor.shape))
