"""`dsv4 convert`, round trips: official -> another layout -> official keeps every value, and the bytes where it can.

Bytes need not come back where values do: a block's scale is not unique. Codes up to 3 under one scale are codes up to 6
under half of it; the way back takes the smallest scale that holds a block, the publisher may have taken another. What
keeps the scales (nvfp4, mp but for wo_a) and all plain tensors come back byte for byte.
"""

import json

import pytest

from tests.support import damage, synthetic
from tests.support.conversions import convert, differing, official_values, stored, transformers_values
from tests.support.slow import slow

# kinds of tensors whose bytes come back from each target; plain ones always do
KEPT = {
    "official": {"expert", "linear", "wo_a"},
    "bf16": set(),
    "fp8": {"linear", "wo_a"},
    "base": {"linear", "wo_a"},
    "nvfp4": {"expert", "linear", "wo_a"},
    "mp --ranks 1": {"expert", "linear"},
    "mp --ranks 2": {"expert", "linear"},
    "transformers": set(),
}
CHAINS = (
    pytest.param(("nvfp4", "transformers", "mp --ranks 2"), marks=pytest.mark.slow),
    pytest.param(("transformers", "mp --ranks 1", "fp8"), marks=pytest.mark.slow),
    pytest.param(("fp8", "bf16", "nvfp4"), marks=pytest.mark.slow),
    pytest.param(("base", "nvfp4", "base", "transformers"), marks=pytest.mark.slow),
)


# which has every kind of tensor; nano, whose drafter is MTP, goes there and back in commands/run/test_nano.py
NETS = ["dspark", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiny-flash", "tiny-pro"))]


@pytest.fixture(scope="module", params=NETS)
def net(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nets") / request.param
    if request.param == "dspark":
        return synthetic.write_checkpoint(folder, synthetic.DSPARK)
    return damage.copy_checkpoint(folder, request.param)


def kind(name, tensors):
    matrix = name.removesuffix(".weight").removesuffix(".scale")
    if f"{matrix}.scale" not in tensors:
        return "plain"
    if ".ffn.experts." in name:
        return "expert"
    return "wo_a" if matrix.endswith(".wo_a") else "linear"


def assert_came_back(source, output, kept):
    first, second = stored(source), stored(output)
    assert first.keys() == second.keys()
    assert {name: (entry.dtype, entry.shape) for name, entry in first.items()} == {
        name: (entry.dtype, entry.shape) for name, entry in second.items()
    }
    kinds = {name: kind(name, first) for name in first}
    changed = [name for name in first if first[name].data != second[name].data]
    assert {kinds[name] for name in changed} <= {"expert", "linear", "wo_a"} - kept
    assert differing(official_values(first), official_values(second)) == []
    return {kinds[name] for name in changed}


@pytest.mark.parametrize(
    "target",
    ["nvfp4", "mp --ranks 2", *slow("base", "transformers", "official", "bf16", "fp8", "mp --ranks 1")],
)
def test_there_and_back(net, tmp_path, target):
    there, back = tmp_path / "there", tmp_path / "back"
    convert(net, there, "--to", *target.split(), "--max-shard-size", "3MB")
    convert(there, back, "--to", "official")
    changed = assert_came_back(net, back, KEPT[target])
    if net.name == "dspark":
        # its scales are not the smallest, so that the sentence above on bytes has its examples
        assert changed == {"expert", "linear", "wo_a"} - KEPT[target]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["official", "bf16", "fp8", "nvfp4", "transformers"])
def test_the_values_of_a_target_are_those_of_the_source(net, tmp_path, target):
    convert(net, tmp_path / "out", "--to", target)
    source, output = stored(net), stored(tmp_path / "out")
    values = official_values(source)
    found = transformers_values(output, list(values)) if target == "transformers" else official_values(output)
    assert differing(values, found) == []


@pytest.mark.parametrize("chain", CHAINS, ids=" ".join)
def test_a_chain_of_targets(net, tmp_path, chain):
    folder = net
    for step, target in enumerate([*chain, "official"]):
        convert(folder, tmp_path / str(step), "--to", *target.split())
        folder = tmp_path / str(step)
    assert_came_back(net, folder, set())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("official --experts fp8", marks=pytest.mark.slow),
        pytest.param("official --experts bf16", marks=pytest.mark.slow),
        pytest.param("official --attention bf16", marks=pytest.mark.slow),
        "official --experts fp8 --attention bf16",
        pytest.param("bf16 --experts fp4", marks=pytest.mark.slow),
        pytest.param("bf16 --experts fp8 --attention fp8", marks=pytest.mark.slow),
        *slow("fp8 --attention bf16", "nvfp4 --attention bf16"),
    ],
)
def test_formats_of_choice(net, tmp_path, options):
    convert(net, tmp_path / "there", "--to", *options.split())
    there = stored(tmp_path / "there")
    assert differing(official_values(stored(net)), official_values(there)) == []
    target, *chosen = options.split()
    chosen = dict(zip(chosen[::2], chosen[1::2], strict=True))
    experts = {"fp4": "I8", "fp8": "F8_E4M3", "bf16": "BF16", "official": "I8", "nvfp4": "U8"}
    linears = {"bf16": "BF16"}
    assert there["layers.1.ffn.experts.0.w2.weight"].dtype == experts[chosen.get("--experts", target)]
    assert there["layers.1.attn.wo_a.weight"].dtype == linears.get(chosen.get("--attention", target), "F8_E4M3")
    convert(tmp_path / "there", tmp_path / "back", "--to", "official")
    assert_came_back(net, tmp_path / "back", set())


@pytest.mark.slow  # test_consumers.py reads such files by default
@pytest.mark.parametrize(
    "options",
    ["--experts fp8", "--experts bf16", "--attention bf16"],
)
def test_files_for_ranks_in_formats_of_choice(net, tmp_path, options):
    convert(net, tmp_path / "there", "--to", "mp", "--ranks", "2", *options.split())
    convert(tmp_path / "there", tmp_path / "back", "--to", "official")
    assert_came_back(net, tmp_path / "back", set())


def test_a_cut_keeps_the_tensors_of_its_layers(tmp_path):
    net = damage.GOLDEN / "tiny-flash"
    convert(net, tmp_path / "cut", "--to", "official", "--layers", "1-3", "--no-mtp")
    whole, cut = stored(net), stored(tmp_path / "cut")
    names = {}
    for name in whole:
        parts = name.split(".")
        if parts[0] == "layers" and 1 <= int(parts[1]) <= 3:
            names[name] = ".".join(["layers", str(int(parts[1]) - 1), *parts[2:]])
        elif parts[0] not in ("layers", "mtp"):
            names[name] = name
    assert cut == {new: whole[old] for old, new in names.items()}


def test_small_files_hold_the_same(tmp_path):
    net = damage.GOLDEN / "tiny-flash"
    convert(net, tmp_path / "out", "--to", "transformers", "--max-shard-size", "300kB")
    convert(net, tmp_path / "one", "--to", "transformers")
    index = json.loads((tmp_path / "out" / damage.INDEX).read_text())
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) > 20
    assert names == [f"model-{number:05}-of-{len(names):05}.safetensors" for number in range(1, len(names) + 1)]
    for name in names:
        shard = damage.read_shard(tmp_path / "out" / name)
        assert sorted(shard) == sorted(key for key, file in index["weight_map"].items() if file == name)
        # a tensor is not cut, however small the files
        assert len(shard) == 1 or sum(len(entry.data) for entry in shard.values()) <= 300_000
    found = stored(tmp_path / "out")
    assert found == stored(tmp_path / "one")
    assert index["metadata"]["total_size"] == sum(len(entry.data) for entry in found.values())
