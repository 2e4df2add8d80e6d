"""The cards that are known by name: their measured or published numbers, from `cards.json`."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain_jax._src.common import checks, host_memory
from megatrain_jax._src.common.capability import compute_capability
from megatrain_jax._src.engine.state import pool_limit
from megatrain_jax._src.engine.state.hardware import Hardware
from megatrain_jax._src.engine.state.placement import default_device, num_local_devices

_GIB = 2**30
_UNITS = {None: 1, "MiB": 2**20, "GiB": _GIB, "GB": 10**9}
_SHARES = {
    "attention_flops_per_s": "sustained_attention",
    "float32_flops_per_s": "float32_share",
}
_FILE = Path(__file__).with_name("cards.json")


def read_cards(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Hardware]:
    """The cards of a table such as `cards.json`.

    Args:
        entries: One entry per card, by its public name. `name` and `source` are as in `Hardware`.
            `figures` has the remaining attributes of `Hardware`, each with a `value`, a `source`
            and optionally a `unit` (GB, MiB or GiB, per second for a rate). The rates
            `attention_flops_per_s` and `float32_flops_per_s` are given in place of the shares
            `sustained_attention` and `float32_share`. `like` names an earlier entry, whose figures
            are used unless the entry has its own. `names` and `device_kinds` find a card; a `note`
            is for readers.

    Raises:
        TypeError: If a figure has an unknown name or the wrong type.
        ValueError: If a figure has no source or an unknown unit, or is no positive number.
    """
    figures: dict[str, dict[str, float]] = {}
    found = {}
    for key, entry in entries.items():
        own = {name: _number(key, name, figure) for name, figure in entry["figures"].items()}
        figures[key] = figures[entry["like"]] | own if "like" in entry else own
        values = dict(figures[key])
        # Stored as shares, which stay right if somebody replaces `flops_per_s`.
        for rate, share in _SHARES.items():
            if rate in values:
                values[share] = values.pop(rate) / values["flops_per_s"]
        found[key] = Hardware(name=entry["name"], source=entry["source"], **values)  # type: ignore
    return found


def _number(card: str, name: str, figure: Mapping[str, Any]) -> float:
    if not figure.get("source"):
        raise ValueError(f"{_FILE.name}: `{name}` of {card} has no source")
    if figure.get("unit") not in _UNITS:
        raise ValueError(f"{_FILE.name}: `{name}` of {card} has an unknown unit {figure['unit']!r}")
    value = figure["value"]
    return value if isinstance(value, bool) else value * _UNITS[figure.get("unit")]


_ENTRIES = json.loads(_FILE.read_text(encoding="utf-8"))
_CARDS = read_cards(_ENTRIES)

# In the order in which messages list them, by number: A10G, A100, A6000.
_BY_NAME = dict(
    sorted(
        ((name, _CARDS[key]) for key in _CARDS for name in _ENTRIES[key]["names"]),
        key=lambda item: re.sub("[0-9]+", lambda digits: digits[0].zfill(5), item[0]),
    )
)
_NAMES = ", ".join(_BY_NAME)
_ASSUMED = "assumed, the vendor peak of an A100, unmeasured"
# Names such as "T4 x2", "2x T4" and "8 x H100".
_BEFORE = re.compile(r"(?P<count>\d{1,2}) ?[x×] ?(?P<card>.+)", re.IGNORECASE)
_AFTER = re.compile(r"(?P<card>.+?) ?[x×] ?(?P<count>\d{1,2})", re.IGNORECASE)
_BY_DEVICE_KIND = {
    kind: _CARDS[key] for key in _CARDS for kind in _ENTRIES[key].get("device_kinds", ())
}


def card(name: str) -> Hardware:
    """Looks up a card by its name, ignoring case, spaces and hyphens.

    Args:
        name: A name such as "H100", "rtx-4090" or "A100 40 GB", a name that a plan prints, or the
            driver's name of the card. Vendor words, such as NVIDIA GeForce, and the card's memory
            may be left out.

    Returns:
        The card, in a typical host.

    Raises:
        TypeError: If the name is no string.
        ValueError: If the card is unknown; the message suggests similar names.

    Examples:
        >>> card("rtx-4090").device_bytes // 2**30
        24
    """
    if not isinstance(name, str):
        raise TypeError(checks.refused("name", f"the name of a card ({_NAMES})", name))
    plain = _plain(name)
    printed = {machine.name: machine for machine in _BY_NAME.values()}
    known = {_plain(n): m for n, m in (printed | _BY_DEVICE_KIND | _BY_NAME).items()}
    found = known.get(plain) or _with_memory(plain, known)
    if found is None and (several := _BEFORE.fullmatch(name) or _AFTER.fullmatch(name)):
        one, number = several["card"], several["count"]
        card(one)  # refuses an unknown card by its own name
        raise ValueError(
            f"{name!r} names {number} cards: give one, {one!r}, and their number separately, as "
            f"num_gpus={number} (--gpus {number} on the command line)"
        )
    if found is None:
        names = {_plain(shown): shown for shown in _BY_NAME}
        near = difflib.get_close_matches(plain, names, n=3)
        if near:
            hint = f"did you mean {' or '.join(names[n] for n in near)}?"
        else:
            hint = f"known are {_NAMES}."
        raise ValueError(
            f"no card {name!r} is known; {hint} Describe others as megatrain_jax.Hardware(...)"
        )
    return found


def _plain(name: str) -> str:
    """A name without vendor words, case and separators: "A100 40 GB" becomes a10040g."""
    small = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"(?<=[0-9])gi?b", "g", re.sub("nvidia|geforce|tesla|quadro|rtx", "", small))


def _with_memory(plain: str, known: Mapping[str, Hardware]) -> Hardware | None:
    """The card of a name that ends with its memory, such as 409024g; None if there is none."""
    for name, machine in known.items():
        size = re.fullmatch(f"{re.escape(name)}([0-9]+)g", plain)
        # A card is sold with its nominal memory, and error correction takes some of it.
        if size and 0.9 < (machine.device_bytes or 0) / (int(size[1]) * _GIB) <= 1:
            return machine
    return None


def this_machine() -> Hardware | None:
    """Looks up the first JAX device among the known cards; starts JAX's backend.

    Returns:
        The card with this machine's host memory and the device memory that JAX may use here. An
        unknown GPU gets the rates of an A100. `None` if the device is not a GPU.
    """
    return None if (found := card_here()) is None else within_pools(found, num_local_devices())


def within_pools(machine: Hardware, num_devices: int) -> Hardware:
    """The machine with less host memory if the limit of JAX's pools keeps them from using it all.

    Args:
        machine: The machine.
        num_devices: Number of the host's devices that a run uses, in all processes there.
    """
    lists = num_devices * machine.list_bytes
    host = pool_limit.machine_bytes(machine.host_bytes, num_devices, lists)
    return replace(machine, host_bytes=host)


def card_here() -> Hardware | None:
    """See `this_machine`; the limit of JAX's pools doesn't reduce the host memory."""
    device = default_device()
    if device.platform != "gpu":
        return None
    # Ada is the first architecture with units for float8.
    capability = compute_capability(device)
    similar = card("A100")
    unknown = replace(
        similar,
        name=device.device_kind,
        device_bytes=None,
        float8_flops_per_s=2 * similar.flops_per_s if (capability or 0) >= 8.9 else None,
        source=_ASSUMED,
    )
    known = _BY_DEVICE_KIND.get(device.device_kind, unknown)
    if capability is not None:
        known = replace(known, has_bfloat16=capability >= 8)
    # An allocator that grows on demand reports 0.
    limit = (device.memory_stats() or {}).get("bytes_limit")
    share = 1.0 if limit else known.device_share
    limit = limit or known.device_bytes
    host = host_memory.total_bytes()
    return replace(known, device_bytes=limit, device_share=share, host_bytes=host)
