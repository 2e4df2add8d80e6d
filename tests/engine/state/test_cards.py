"""Known cards: found by the names of their drivers, each figure with its source."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import megatrain_jax as mt
from inside import on_one_device
from megatrain_jax._src.common import suggestions
from megatrain_jax._src.engine.state import hardware, pool
from messages import refuses, tells

GIB = 2**30
CARDS_OF_0_1 = json.loads(Path(suggestions.__file__).with_name("other_libraries.json").read_text())[
    "cards of version 0.1"
].split()


def test_known_cards(monkeypatch):
    class Card:
        device_kind, platform, process_index = "NVIDIA GeForce RTX 4090", "gpu", 0

        def memory_stats(self):
            return {"bytes_limit": 18 * GIB}

    placement = replace(on_one_device(), devices=(Card(),))
    monkeypatch.setattr(jax, "local_devices", lambda: [Card()])
    monkeypatch.setenv(pool.LIMIT_VARIABLE, "64")
    monkeypatch.setattr(hardware.host_memory, "total_bytes", lambda: 64 * GIB)
    assert hardware.this_machine() == replace(
        hardware.card("RTX 4090"), host_bytes=64 * GIB, device_bytes=18 * GIB, device_share=1.0
    )
    monkeypatch.setattr(Card, "device_kind", "NVIDIA Abacus")
    unknown = hardware.this_machine()
    assert unknown is not None and unknown.name == "NVIDIA Abacus"
    assert unknown.device_bytes == 18 * GIB and unknown.source.startswith("assumed")
    assert unknown.is_unmeasured
    # Other vendors' GPUs have bfloat16; of NVIDIA's, their compute capability tells.
    for capability, has_bfloat16 in (("gfx942", True), ("8.0", True), ("7.5", False)):
        monkeypatch.setattr(Card, "compute_capability", capability, raising=False)
        found = hardware.this_machine()
        assert found is not None and found.has_bfloat16 is has_bfloat16, capability
    monkeypatch.setattr(Card, "memory_stats", lambda self: {"bytes_limit": 0, "bytes_in_use": 7})
    unlimited = hardware.this_machine()
    assert unlimited is not None and unlimited.device_bytes is None
    assert pool.free_device_bytes(placement) is None
    monkeypatch.setattr(Card, "platform", "cpu")
    assert hardware.this_machine() is None


def test_a_plan_says_of_each_card_whether_its_rates_were_measured():
    """So that nobody takes a vendor's peak for a rate that was seen."""
    sources = {name: card.source for name, card in hardware._CARDS.items()}
    measured = {name for name, source in sources.items() if source.startswith("measured")}
    assert measured == {"H100", "H200", "HGX_H100", "HGX_H200"}
    (said,) = {sources[name] for name in sources.keys() - measured}
    assert tells(said, "unmeasured")
    assert {name for name, card in hardware._CARDS.items() if not card.is_unmeasured} == measured


def test_every_figure_of_a_card_has_a_source():
    """A card like another one has the other's figures; each public card is in the file."""
    link = {"value": 3e9, "source": "data sheet"}
    first = {
        "name": "A",
        "source": "measured",
        "figures": {
            "device_bytes": {"value": 3, "unit": "GiB", "source": "reported"},
            "link_bytes_per_s": link,
            "flops_per_s": {"value": 4e12, "source": "data sheet"},
            "attention_flops_per_s": {"value": 1e12, "source": "a paper"},
        },
    }
    faster = {"flops_per_s": {"value": 5e12, "source": "data sheet"}}
    second = {"name": "B", "like": "A", "source": "peak", "figures": faster}
    found = hardware.read_cards({"A": first, "B": second})
    rates = {"device_bytes": 3 * GIB, "link_bytes_per_s": 3e9}
    assert found == {
        "A": mt.Hardware(
            name="A", source="measured", flops_per_s=4e12, sustained_attention=0.25, **rates
        ),
        "B": mt.Hardware(
            name="B", source="peak", flops_per_s=5e12, sustained_attention=0.2, **rates
        ),
    }
    for figure, *named in (
        ({"value": 3e9}, "source"),
        (link | {"unit": "TB"}, "unit", "'TB'"),
    ):
        figures = first["figures"] | {"link_bytes_per_s": figure}
        with refuses(ValueError, "`link_bytes_per_s`", "A", *named):
            hardware.read_cards({"A": first | {"figures": figures}})


@pytest.mark.parametrize("key", CARDS_OF_0_1)
def test_a_card_that_was_a_constant_is_found_by_its_name(key):
    with refuses(AttributeError, key, "hardware=") as caught:
        getattr(mt, key)
    named = re.findall(r'card\("(.+?)"\)', str(caught.value))
    assert [hardware.card(name) for name in named] == [hardware._CARDS[key]]


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        *(("MI300X", "AMD"), ("AMD Instinct MI250", "AMD"), ("Radeon RX 7900 XTX", "AMD")),
        *(("TPU v5e", "Google"), ("v5p", "Google"), ("Gaudi 3", "Intel"), ("M4 Max", "Apple")),
        *(("Ascend 910B", "Huawei"), ("trn2", "AWS"), ("4x MI300X", "AMD")),
    ],
)
def test_cards_of_other_makers_are_told_apart(name: str, maker: str):
    with refuses(ValueError, maker, "NVIDIA", "megatrain_jax.Hardware") as caught:
        hardware.card(name)
    assert "did you mean" not in str(caught.value)


def test_unknown_cards_of_nvidia_are_no_other_maker_s():
    names = [
        "M40",
        "Quadro M6000",
        "MX450",
        "RTX 6000 Ada",
        "GTX 1080",
        "A16",
        "T1000",
        "V10",
        "GB10",
    ]
    for name in names:
        with refuses(ValueError, name) as caught:
            hardware.card(name)
        assert not any(maker in str(caught.value) for maker in hardware._MAKERS), name
