"""The forms of a release on a machine: which fit, and estimates of throughput beside what was measured."""

import json
import re
from pathlib import Path

import pytest

from dsv4cli.commands.inspect.forms import _notes
from dsv4cli.engine.config.presets import FLASH, PRESETS, PRO, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit.cards import CARDS, SOURCES, card_named
from dsv4cli.engine.inspection.fit.compare import compare_forms, forms_document, tier_of
from dsv4cli.engine.inspection.fit.machine import parse_machine
from dsv4cli.engine.inspection.fit.share import SharedModel
from dsv4cli.engine.inspection.fit.speed import BY_DATA_SHEET, CALIBRATED, STORED, Speed, estimate
from tests.support.conversions import run
from tests.support.slow import slow

GB = 10**9
MODELS = {"flash": FLASH, "pro": PRO, "flash with 192 experts": FLASH | {"n_routed_experts": 192}}
SMALL = parse_config(shortened(FLASH, 3, 8), "small")
PARTLY = "flash with 192 experts"
# model, GPUs, free host memory, batch -> tokens/s over all sequences (docs/internals/performance.md, README.md)
DECODE = {
    (PARTLY, "1xH200", 120, 1): 1000 / 5.01,
    (PARTLY, "1xH200", 120, 16): 1050,
    ("flash", "1xH200", 120, 1): 129,
    ("flash", "2xH200", 240, 1): 252,
    ("flash", "2xH200", 240, 16): 1554,
    ("flash", "4xH200", 480, 1): 279,
    ("flash", "4xH200", 480, 16): 1844,
    ("flash", "1xH100", 190, 1): 26.9,
    ("pro", "4xH200", 512, 1): 27.2,
}
# the same for the 2-bit GGUF form on one H200, decode by batch size
BLOCKS_DECODE, BLOCKS_PREFILL = {1: 204, 16: 1093}, 15_631
PREFILL = {
    (PARTLY, "1xH200", 120): 19_500,
    ("flash", "2xH200", 240): 29_721,
    ("flash", "4xH200", 480): 29_252,
}


def speed(name: str, gpus: str, ram: int, batch: int) -> Speed:
    machine = parse_machine(gpus, f"{ram}GB")
    model = SharedModel(parse_config(MODELS[name], name), Formats(), machine.host)
    share = model.share(machine.gpus, 4096, batch)
    found = estimate(model.config, model.sizes(len(machine.gpus)), share, [batch], STORED)
    assert found is not None
    return found


@pytest.mark.parametrize("setting", [*list(DECODE)[:1], *slow(*list(DECODE)[1:])], ids=str)
def test_decode_is_within_a_quarter_of_what_was_measured(setting):
    name, gpus, ram, batch = setting
    found = speed(name, gpus, ram, batch)
    low, high = found.decode[batch].low, found.decode[batch].high
    assert found.calibrated
    middle = low / CALIBRATED[0]
    assert abs(middle / DECODE[setting] - 1) < 0.25, middle
    assert low <= DECODE[setting] <= high


@pytest.mark.parametrize("setting", [*list(PREFILL)[:1], *slow(*list(PREFILL)[1:])], ids=str)
def test_prefill_is_within_a_quarter_of_what_was_measured(setting):
    name, gpus, ram = setting
    found = speed(name, gpus, ram, 1)
    middle = found.prefill.low / CALIBRATED[0]
    assert abs(middle / PREFILL[setting] - 1) < 0.25, middle


def test_there_are_cards_with_bandwidths_and_sources():
    assert len(CARDS) >= 25
    for name, card in CARDS.items():
        assert card.source, name
        assert {*card.source} <= SOURCES.keys(), name
        assert 2**13 < card.mib < 2**19, name
        assert 2e11 < card.bandwidth < 1e13, name
        assert 5e13 < card.flops < 1e16, name
        assert card.link in (31.5 * GB, 63 * GB), name


def test_the_page_has_every_card_with_its_sources():
    page = Path("docs/hardware.md").read_text(encoding="utf-8")
    for name, card in CARDS.items():
        numbers = (
            f"{card.mib:,}",
            f"{card.bandwidth / GB:,.0f}",
            f"{card.flops / 1e12:,.0f}",
            f"{4 + (card.link > 40 * GB)}",
        )
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} | {' | '.join(numbers)} |"))
        assert all(f"({SOURCES[key]})" in row for key in card.source), name
    assert {key for card in CARDS.values() for key in card.source} == SOURCES.keys()


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 NVL", "H100NVL"),
        ("NVIDIA H100 PCIe", "H100PCIE"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100-SXM4-40GB", "A10040GB"),
        ("NVIDIA GeForce RTX 4090", "4090"), ("NVIDIA RTX 6000 Ada Generation", "6000ADA"), ("NVIDIA A1000", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "PRO6000"), ("GPU of 80GB", None), ("L40S", "L40S"),
        ("NVIDIA L40", "L40"), ("RTX A6000", "A6000"), ("", None),
    ],
)  # fmt: skip
def test_names_of_nvidia_smi_are_known(name, card):
    assert card_named(name) == card


@pytest.mark.slow
def test_two_bits_fit_where_the_release_does_not():
    config = parse_config(FLASH, "flash")
    forms = {
        one.form.name: one for one in compare_forms("flash", config, parse_machine("1xPRO6000", "64GB"), context=4096)
    }
    assert [tier_of(one) for one in forms.values()] == [None, None, None, "gpu"]
    assert forms["official"].missing > 30 * GB
    # sizes of the published files
    sizes = [one.nbytes / GB for one in forms.values()]
    assert sizes == pytest.approx([159.6, 168.3, 164.6, 86.7], rel=0.002)


def test_blocks_are_within_a_quarter_of_what_was_measured():
    forms = compare_forms("flash", parse_config(FLASH, "flash"), parse_machine("1xH200", "128GB"), context=4096)
    [found] = [one.speed for one in forms if one.form.name == "2-bit GGUF"]
    for batch, measured in BLOCKS_DECODE.items():
        low, high = found.decode[batch].low, found.decode[batch].high
        assert low <= measured <= high, batch
        assert abs(low / CALIBRATED[0] / measured - 1) < 0.25
    assert abs(found.prefill.low / CALIBRATED[0] / BLOCKS_PREFILL - 1) < 0.25


def test_every_form_on_known_gpus_has_an_estimate():
    forms = compare_forms("flash", SMALL, parse_machine("2xH200", "64GB"), context=4096)
    found = forms_document(forms)
    assert [one["form"] for one in found] == ["official", "NVFP4", "4-bit GGUF", "2-bit GGUF"]
    assert all(one["estimate"] for one in found)
    # blocks have kernels of their own
    assert found[3]["estimate"]["prefill"]["high"] < found[0]["estimate"]["prefill"]["high"]
    assert all((one["fits"], one["tier"], one["devices"]) == (True, "gpu", ["cuda:0"]) for one in found)
    assert found[2]["bytes"] > found[3]["bytes"] > 0
    assert found[0]["estimate"]["read"]["host"] == 0
    # JSON has no keys that are numbers
    assert json.loads(json.dumps(found[3]))["estimate"]["decode"]["1"] == found[3]["estimate"]["decode"][1]
    # where there is no GPU, the bandwidth of the RAM is not known
    assert [one.speed for one in compare_forms("flash", SMALL, parse_machine(None, "64GB"), context=64)] == [None] * 4


def test_a_card_that_was_not_measured_has_a_wider_range():
    one = compare_forms("flash", SMALL, parse_machine("1xB200", "64GB"), context=4096)[0]
    assert one.speed is not None
    assert not one.speed.calibrated
    assert one.speed.decode[1].high / one.speed.decode[1].low == pytest.approx(BY_DATA_SHEET[1] / BY_DATA_SHEET[0])


def test_only_kernels_that_were_measured_on_a_card_are_calibrated():
    forms = compare_forms("flash", SMALL, parse_machine("1xH100", "64GB"), context=4096)
    assert [one.speed.calibrated for one in forms] == [True, True, False, False]
    assert "GGUF was not measured on H100: its ranges are wider." in [*_notes(forms)]


@pytest.mark.slow
def test_the_report_and_the_document():
    words = ("inspect", "random:flash", "--fit", "--gpus", "2xH200", "--ram", "192GB", "--max-context", "4096")
    code, out, _ = run(*words)
    assert code == 0
    table = out.split("forms of this release, for 4,096 tokens; estimated tokens/s\n")[1]
    assert [line.split("  ")[0] for line in table.splitlines()[1:5]] == [
        "official",
        "NVFP4",
        "4-bit GGUF",
        "2-bit GGUF",
    ]
    # tokens/s of one sequence, of 16, and of prefill, each from low to high
    assert re.findall(r"[\d,]+–[\d,]+", table.splitlines()[1]) == ["200–310", "1,100–1,700", "26,000–41,000"]
    assert "Estimates for H200: calibrated to measurements on it" in out
    assert all(len(line) <= 80 for line in table.splitlines()[:6])


def test_other_models_have_no_forms():
    assert (
        compare_forms("custom", parse_config(PRESETS["tiny"], "tiny"), parse_machine("1xH200", None), context=64) == []
    )
