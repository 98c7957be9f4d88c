"""What a card has decides what a kernel takes; kernels compiled for cards that are not there must fit them."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4cli.engine.system.backend import resolve_backend
from dsv4cli.errors import UnsupportedHardware
from dsv4cli.kernels import card
from tests.support.card import A100, B200, CARDS, H200, RTX3090, RTX4090, RTX5090, Card
from tests.support.forked import output_of

pytest.importorskip("triton")
from dsv4cli.kernels.attention import kernel as attention
from dsv4cli.kernels.experts.kernel import many_tokens as experts
from dsv4cli.kernels.gemm.kernel import tiled_fp8
from dsv4cli.kernels.hyper_connections import kernel as hyper_connections
from dsv4cli.kernels.indexer import kernel as indexer
from dsv4cli.kernels.routing import kernel as routing
from tests.support.slow import slow

GPU = torch.device("cuda", 0)
# seconds, less than the limit of a slow test: all kernels of a card that Triton has not compiled before
COMPILING = 1700


@pytest.fixture
def insert(monkeypatch):
    """Makes PyTorch see a card."""

    def use(one: Card, hip: str | None = None) -> None:
        properties = SimpleNamespace(shared_memory_per_block_optin=one.shared << 10)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: one.capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "the card")
        card.real_card.cache_clear()

    yield use
    card.real_card.cache_clear()


def stages(columns: int = 128) -> tuple[int, int, int, int]:
    """Of a prompt's hyper-connections, router and experts, at this many pairs in a tile."""
    return (
        hyper_connections.project_tiles(4096, 4096, True, GPU).stages,
        routing.logit_tiles(4096, GPU).stages,
        experts.gate_up_tiles(columns, True, GPU).stages,
        experts.down_tiles(columns, True, GPU).stages,
    )


@pytest.mark.parametrize(
    ("one", "expected", "attends"),
    [
        # measured there
        (H200, (4, 5, 3, 3), True),
        (B200, (4, 5, 3, 3), True),
        (A100, (4, 5, 3, 3), False),
        (RTX3090, (2, 4, 3, 2), False),
        (RTX4090, (2, 4, 3, 2), False),
        (RTX5090, (2, 4, 3, 2), False),
    ],
)
def test_the_card_is_asked_for_its_shared_memory(insert, one, expected, attends):
    insert(one)
    assert (stages(), attention.roomy(GPU)) == (expected, attends)
    assert stages(64)[2:] == (3, 3)
    # a token of Flash, whose list is not spread: 16 heads a program
    x = SimpleNamespace(device=GPU, dtype=torch.bfloat16)
    assert attention.tiles(4096, 64, 640, x).heads == (64 if one is H200 else 16)
    assert attention.tiles(1, 64, 128, x).warps == (8 if one.shared > 112 else 4)


def test_an_amd_gpu_has_no_compute_capability(insert):
    # an MI300X says 9.4, and its FP8 is another format
    insert(Card((9, 4), 64, 304), hip="6.4")
    x = SimpleNamespace(device=GPU, dtype=torch.bfloat16)
    assert not card.has_fp8(x)
    assert not tiled_fp8.multiplies(x)
    assert indexer._operand(GPU) is torch.bfloat16


@pytest.mark.parametrize(
    ("one", "hip", "words"),
    [
        (Card((7, 5), 64, 72), None, "cuda:0: the card has compute capability 7.5, and .* 8.0 or newer"),
        (Card((6, 1), 48, 28), None, "compute capability 6.1"),
        (Card((9, 4), 64, 304), "6.4", "the card is an AMD GPU, and the Triton kernels run on NVIDIA GPUs only"),
        (Card((11, 0), 64, 96), "6.4", "AMD GPU"),
    ],
)
@pytest.mark.parametrize("asked", ["auto", "triton"])
def test_a_card_that_the_kernels_do_not_run_on_is_refused_before_loading(insert, asked, one, hip, words):
    insert(one, hip)
    with pytest.raises(UnsupportedHardware, match=words) as refused:
        resolve_backend(asked, GPU)
    assert refused.value.remedy == "use --backend torch"
    assert resolve_backend("torch", GPU) == "torch"


@pytest.mark.parametrize("one", CARDS.values(), ids=str)
def test_every_card_from_ampere_on_is_taken(insert, one):
    insert(one)
    assert resolve_backend("auto", GPU) == "triton"


def compiled(which: str, *archs: int) -> list[dict[str, Any]]:
    """The lines of tests/benchmarks/launches.py. Triton reads TRITON_INTERPRET when it is imported: another process."""
    words = "-m", "tests.benchmarks.launches", which, ",".join(map(str, archs))
    return [json.loads(line) for line in output_of(*words, seconds=COMPILING, TRITON_INTERPRET=None).splitlines()]


@pytest.mark.parametrize("archs", [(86,), *slow((86, 90), (89, 90, 120))], ids=str)
def test_what_a_prompt_takes_the_most_shared_memory_for_fits_every_card(archs):
    rows = compiled("prompt", *archs)
    taken = {(row["kernel"].split(".")[0], row["arch"]): row.get("shared", row.get("error")) for row in rows}
    assert len(taken) == len(rows) == 3 * len(archs)
    assert [key for key, shared in taken.items() if shared > CARDS[key[1]].shared << 10] == []
    if 90 in archs:  # beyond what an RTX 4090 has: the H200 keeps what was measured there
        assert min(taken[name, 90] for name in ("experts", "hyper_connections", "routing")) > RTX4090.shared << 10


@pytest.mark.parametrize("which", ["few", *slow("all")])
def test_the_compiler_accepts_kernels_of_every_ggml_type(which):
    assert output_of("-m", "tests.support.front_end", which, TRITON_INTERPRET=None) == ""


@pytest.mark.slow  # twenty minutes on one core, seconds once Triton has compiled them
@pytest.mark.parametrize("arch", CARDS)
def test_every_kernel_compiles_and_fits(arch):
    rows = compiled("all", arch)
    assert len({row["kernel"] for row in rows}) >= 57
    assert [row for row in rows if "error" in row or row["shared"] > CARDS[arch].shared << 10] == []


@pytest.mark.parametrize(("name", "has"), [("h200", False), ("b200", True), ("rtx5090", False)])
def test_only_data_centre_cards_have_tensor_memory(name, has):
    with card.described(card.CARDS[name]):
        assert card.has_tensor_memory(torch.device("cuda")) is has
