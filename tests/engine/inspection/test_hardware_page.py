"""The tables of docs/hardware.md are what `dsv4 inspect --fit` computes."""

import re
from functools import cache
from math import ceil
from pathlib import Path

import pytest

from dsv4cli.commands.inspect.forms import _range, _where
from dsv4cli.engine.config.presets import FLASH, PRO
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit.compare import FormFit, _fit
from dsv4cli.engine.inspection.fit.forms import forms_of
from dsv4cli.engine.inspection.fit.machine import parse_machine
from dsv4cli.engine.inspection.fit.share import SharedModel
from dsv4cli.engine.inspection.fit.speed import BLOCKS, CALIBRATED, STORED, estimate

pytestmark = pytest.mark.slow

GB = 10**9
PAGE = Path("docs/hardware.md").read_text(encoding="utf-8")
CONTEXT = 8192
FORMS = ("official", "NVFP4", "4-bit GGUF", "2-bit GGUF")
# model of a row of the last table -> its changes to Flash or Pro, its form, and GB of free host memory
MEASURED = {
    "Flash with 192 experts, 1 H200": (FLASH | {"n_routed_experts": 192}, "official", 120),
    "Flash, 1 H200, experts in host memory": (FLASH, "official", 120),
    "Flash, 2 H200": (FLASH, "official", 240),
    "Flash, 4 H200": (FLASH, "official", 480),
    "Flash, 1 H100, experts in host memory": (FLASH, "official", 190),
    "Pro, 4 H200, experts in host memory": (PRO, "official", 512),
    "Flash, 2-bit GGUF, 1 H200": (FLASH, "2-bit GGUF", 128),
    "Flash with 128 experts, 4-bit GGUF, 1 H200": (FLASH | {"n_routed_experts": 128}, "4-bit GGUF", 128),
}


def table(heading: str, number: int = 0) -> list[list[str]]:
    """Return the rows of a table of a section, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[number]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()[2:]]


@pytest.fixture(scope="module")
def forms():
    return forms_of("flash", parse_config(FLASH, "flash"))


@pytest.fixture(scope="module")
def on_machine(forms):
    """Every form of Flash on the machine of a row, computed once."""
    known: dict[tuple[str, str], dict[str, FormFit]] = {}

    def fits(gpus: str, ram: str) -> dict[str, FormFit]:
        # as in "4 A100, 2 of them used", "1 H100 (80 GB)" and "4 H200, `--tp 4`"
        name = re.sub(r" \(.*|,.*", "", gpus)
        if (name, ram) not in known:
            named = None if name == "none" else re.sub(r"^(\d+) ", r"\1x", name)
            machine = parse_machine(named, ram.replace(" ", ""))
            known[name, ram] = {form.name: _fit(form, machine, CONTEXT) for form in forms}
        return known[name, ram]

    return fits


def test_the_sizes_of_the_forms(forms):
    sizes = {name: size for name, _, size in table("Forms")}
    assert sizes == {
        form.name: f"{SharedModel(form.config, form.formats, None, form.table).sizes(1).total / GB:.0f} GB"
        for form in forms
    }


def test_where_the_forms_run(on_machine):
    rows = table("What runs on which GPUs")
    assert len(rows) > 12
    for gpus, ram, *cells in rows:
        computed = [_where(on_machine(gpus, ram)[form]) for form in FORMS]
        # as the page writes it: "1 + host" and "RAM"
        assert cells == [re.sub(r" GPUs? (?=\+)|in (?=RAM)", lambda m: " " * ("GPU" in m[0]), one) for one in computed]


@pytest.mark.parametrize(("number", "form"), [(0, "official"), (1, "2-bit GGUF")])
def test_the_estimates(on_machine, number, form):
    compared = 0
    for gpus, ram, *cells in table("Throughput", number):
        found = on_machine(gpus, ram)[form]
        ranges = [_range(rate) for rate in (*found.speed.decode.values(), found.speed.prefill)]
        # single numbers were measured
        pairs = [(cell, computed) for cell, computed in zip(cells, ranges, strict=True) if "–" in cell]
        assert [cell for cell, _ in pairs] == [computed for _, computed in pairs], gpus
        compared += len(pairs)
        used = re.search(r"(\d+) of them used", gpus)
        assert used is None or int(used[1]) == found.share.ranks
    assert compared > 20


def test_how_much_slower_nvfp4_is(on_machine):
    """One sentence has the largest differences: with experts in host memory on H200, and in all other rows."""
    slower = {True: 0.0, False: 0.0}
    for gpus, ram, *_ in table("Throughput"):
        official, other = (on_machine(gpus, ram)[form] for form in ("official", "NVFP4"))
        if official.share.ranks == other.share.ranks:
            rates = zip(*([*one.speed.decode.values(), one.speed.prefill] for one in (official, other)), strict=True)
            on_h200 = "H200" in gpus and other.share.host > 0
            slower[on_h200] = max(slower[on_h200], *(1 - b.low / a.low for a, b in rates))
    rest, h200 = (ceil(100 * slower[on_h200]) for on_h200 in (False, True))
    words = " ".join(PAGE.split())
    assert f"estimated up to {rest} % slower; with experts in host memory on H200, up to {h200} % slower" in words


@cache
def measured_model(name: str):
    """The model of a row of the last table, its configuration, its kernels, and GB of host memory."""
    values, form, ram = MEASURED[name]
    config = parse_config(values, name)
    if form == "official":
        return SharedModel(config, Formats(), None), config, STORED, ram
    [one] = [one for one in forms_of("flash", config) if one.name == form]
    return SharedModel(one.config, one.formats, None, one.table), one.config, BLOCKS, ram


def test_the_estimates_next_to_measurements():
    name, seen = "", set()
    for row, what, measured, written in table("How throughput is estimated"):
        name = row or name
        seen.add(name)
        model, config, kernels, ram = measured_model(name)
        batch = 16 if what.startswith("16") else 1
        machine = parse_machine(re.search(r"\d H[12]00", name)[0].replace(" ", "x"), f"{ram}GB")
        model.host = machine.host
        share = model.share(machine.gpus, 4096, batch)
        found = estimate(config, model.sizes(share.ranks), share, [batch], kernels)
        rate = found.prefill if what == "prefill" else found.decode[batch]
        assert f"{rate.low / CALIBRATED[0]:,.0f}" == written, (name, what)
        assert abs(float(written.replace(",", "")) / float(measured.replace(",", "")) - 1) < 0.25
    assert seen == MEASURED.keys()
