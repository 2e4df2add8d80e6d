"""Machines for plans: memory sizes and rates of an accelerator, its host and the link between them.

Cards that are known by name have measured or published numbers, from `cards.json`.
"""

import difflib
import json
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatrain_jax._src.common import checks, host_memory
from megatrain_jax._src.common.capability import compute_capability
from megatrain_jax._src.engine.startup import allocator
from megatrain_jax._src.engine.state import pool_limit
from megatrain_jax._src.engine.state.placement import default_device, num_local_devices
from megatrain_jax._src.engine.state.pool_limit import POOL_BYTES_PER_LIST_BYTE


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The memory sizes and rates of an accelerator and its host, for plans.

    Rates refer to one accelerator, except for those of the host's memory and of the network, which
    all accelerators of a host share. Several hosts are alike.

    Attributes:
        name: The machine's name in plans.
        host_bytes: Host memory that training may use; `None` if unknown.
        typical_host_bytes: Host memory that plans assume if `host_bytes` isn't given.
        device_bytes: Memory of the accelerator; `None` if unknown.
        device_share: Share of it that JAX may allocate. With `None`, all but 3.6 GiB, at least 85%
            and at most 93%, or a smaller `XLA_CLIENT_MEM_FRACTION` that is set here.
        link_bytes_per_s: Bytes per second from host to device, while both directions copy.
        link_out_bytes_per_s: Bytes per second from device to host meanwhile; `None` if they are as
            many. A run on a GPU measures both rates when it starts.
        host_bytes_per_s: Bytes per second between the host's memory and all devices together;
            infinite by default, so that only the links limit transfers.
        peer_bytes_per_s: Bytes per second that each device receives from its peers in collectives;
            `None` if only the links connect them. Collectives then pass through the host's memory.
        hosts: Number of hosts. A run sets it to the number of hosts that its processes are on.
        copies: Number of machines like this one that each hold all state of a run, and sum their
            gradients over the network; see `state_per_process` of `Trainer`. A run sets it.
        network_bytes_per_s: Bytes per second that each host receives from other hosts, while it
            sends as many; infinite by default, so that the network takes no time.
        disk_read_bytes_per_s: Bytes per second that each host reads from its disks; `None` without
            disks for the state. A run with `disk_dir` measures this and the next two.
        disk_write_bytes_per_s: Bytes per second that it writes to them.
        disk_bytes_per_s: Bytes per second that it reads and writes together; infinite by default,
            so that neither delays the other.
        flops_per_s: Floating-point operations per second in bfloat16 matrix products, or in float16
            if the card has no bfloat16.
        float32_share: Rate of float32 matrix products with JAX's default precision, as a share of
            `flops_per_s`. That precision is TF32 on NVIDIA's cards from Ampere on.
        float8_flops_per_s: Floating-point operations per second in float8 matrix products; `None`
            if the accelerator has no units for them, so that `Precision(products="float8")` is
            refused.
        memory_bytes_per_s: Bytes per second that the accelerator reads and writes in its memory;
            infinite by default, so that operations that only move bytes take no time.
        sustained: Share of `flops_per_s` that matrix products reach in the stages of a step. The
            other kernels of a stage are bound by the memory and count in addition.
        sustained_attention: Share of `flops_per_s` that attention kernels, such as cuDNN's, reach
            in forward and backward together; operations that a causal mask skips don't count.
        has_bfloat16: Whether the card computes in bfloat16, as NVIDIA's do from Ampere on.
        widest_heads: Maximum width of heads that cuDNN's attention supports on this card: 256 from
            Hopper on, 0 if the card is older than Ampere. Plans made on another machine use it to
            tell whether `models.attention` calls cuDNN.
        source: Source of the rates, such as "measured". It says "unmeasured" for vendors' peaks,
            which real runs never reach, and tables of plans then say so.

    Raises:
        TypeError: If an attribute has the wrong type; bytes are integers.
        ValueError: If a number is not positive, or a share is above 1.

    Examples:
        A known card in a host with 256 GiB:

        >>> import dataclasses
        >>> from megatrain_jax import card
        >>> machine = dataclasses.replace(card("RTX 4090"), host_bytes=256 * 2**30)
        >>> machine.name, machine.device_bytes // 2**30
        ('NVIDIA GeForce RTX 4090', 24)
    """

    name: str
    host_bytes: int | None = None
    typical_host_bytes: int | None = None
    device_bytes: int | None = None
    device_share: float | None = None
    link_bytes_per_s: float
    link_out_bytes_per_s: float | None = None
    host_bytes_per_s: float = math.inf
    peer_bytes_per_s: float | None = None
    hosts: int = 1
    copies: int = 1
    network_bytes_per_s: float = math.inf
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    disk_bytes_per_s: float = math.inf
    flops_per_s: float
    float32_share: float = 1.0
    float8_flops_per_s: float | None = None
    memory_bytes_per_s: float = math.inf
    sustained: float = 0.8
    # 50 to 73% of an A100's peak (FlashAttention-2, arXiv 2307.08691); assumed for other cards too.
    sustained_attention: float = 0.6
    has_bfloat16: bool = True
    widest_heads: int = 128
    source: str = "given"

    def __post_init__(self) -> None:
        """Checks types, and that all rates are positive, since times divide by them."""
        for name in ("name", "source"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(checks.refused(name, "a str", value))
        for name in ("host_bytes", "typical_host_bytes", "device_bytes"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checks.integer(name, value, other=", or None"))
        checks.boolean("has_bfloat16", self.has_bfloat16)
        for name in ("hosts", "copies"):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name)))
        widest_heads = checks.integer("widest_heads", self.widest_heads, least=0)
        object.__setattr__(self, "widest_heads", widest_heads)
        for field in fields(self):
            if field.type not in (float, float | None):
                continue
            # An unknown rate limits nothing: it is infinite if times divide by it, else None.
            name, value, unknown = field.name, getattr(self, field.name), field.default
            is_known = not isinstance(value, numbers.Real | None) or value != unknown
            if is_known or unknown not in (None, math.inf):
                value = checks.number(name, value, above=0)
                if math.isinf(1 / value):  # times divide by it
                    raise ValueError(checks.refused(name, "a number that is not that small", value))
                object.__setattr__(self, name, value)
        if (self.disk_read_bytes_per_s is None) != (self.disk_write_bytes_per_s is None):
            raise ValueError(
                "`disk_read_bytes_per_s` and `disk_write_bytes_per_s` are given together or not"
            )
        for name in ("sustained", "sustained_attention", "float32_share", "device_share"):
            if (value := getattr(self, name)) is not None and value > 1:
                raise ValueError(checks.refused(name, "a share of at most 1", value))

    @property
    def is_unmeasured(self) -> bool:
        """Whether the source says that nobody has measured the rates."""
        return "unmeasured" in self.source

    @property
    def usable_bytes(self) -> int | None:
        """Device memory that JAX may allocate; `None` if unknown."""
        if self.device_bytes is None:
            return None
        # Read late, because the user may set JAX's variable after the import.
        share = self.device_share
        share = allocator.share_of(self.device_bytes) if share is None else share
        return int(share * self.device_bytes)

    @property
    def list_bytes(self) -> int:
        """Host memory in which JAX lists one accelerator's memory; 0 if CUDA allocates it."""
        return (
            (self.usable_bytes or 0) // POOL_BYTES_PER_LIST_BYTE if allocator.keeps_lists() else 0
        )

    def times(self, num_devices: int) -> "Hardware":
        """The same machine with `num_devices` accelerators in a host of typical size for them."""
        typical = self.typical_host_bytes
        return replace(self, typical_host_bytes=typical and typical * num_devices)

    def compute_seconds(
        self,
        flops: float,
        attention: float,
        sustained: float = 1.0,
        float8: float = 0.0,
        float32: float = 0.0,
    ) -> float:
        """Seconds that one accelerator takes for a number of operations.

        Args:
            flops: Number of operations, including attention's.
            attention: Number of operations in attention kernels.
            sustained: Share of `flops_per_s` that operations outside attention reach.
            float8: Number of operations in float8 products.
            float32: Number of operations in float32 products.
        """
        # Attention kernels have a rate of their own, measured in steps.
        others = (flops - attention) / sustained
        found = (others + attention / self.sustained_attention) / self.flops_per_s
        found += float32 * (1 / self.float32_share - 1) / sustained / self.flops_per_s
        if self.float8_flops_per_s is None:
            return found
        # Only the products themselves are faster, not the operations around them.
        return found - float8 * (1 / self.flops_per_s - 1 / self.float8_flops_per_s)

    @property
    def link_rates(self) -> tuple[float, float]:
        """Bytes per second from host to device, and from device to host."""
        outward = self.link_out_bytes_per_s
        return self.link_bytes_per_s, self.link_bytes_per_s if outward is None else outward

    def transfer_rates(self, num_devices: int) -> tuple[float, float]:
        """Bytes per second from a host to each of its `num_devices` busy devices, and back."""
        inward, outward = self.link_rates
        each = self.host_bytes_per_s / num_devices
        return min(inward, each), min(outward, each)

    def collective_bytes_per_s(self, num_devices: int) -> float:
        """Bytes per second that each device receives in collectives of all devices.

        If only links connect the devices, a byte uses the sender's and the receiver's link at the
        same time, and is written to and read from the host's memory. On eight devices with links of
        31.5 GB/s and a host memory of 204.8 GB/s, each receives min(31.5, 204.8 / (2 · 8)) = 12.8
        GB/s.

        Over several hosts, rings of devices pass each byte into every host once, however many
        devices it has. So a host receives from the network as much as each of its devices does in
        all, and both end at the same time.

        Args:
            num_devices: Number of devices of each host.
        """
        within = self.peer_bytes_per_s
        if within is None:
            within = min(*self.link_rates, self.host_bytes_per_s / (2 * num_devices))
        return within if self.hosts == 1 else min(within, self.network_bytes_per_s)

    @property
    def assumed_host_bytes(self) -> int | None:
        """Host memory, or the typical amount if it isn't given; `None` if unknown."""
        return self.typical_host_bytes if self.host_bytes is None else self.host_bytes


def summing_bytes(num_bytes: int, copies: int) -> float:
    """Bytes that each machine receives while arrays of so many bytes are summed over machines."""
    return 2 * num_bytes * (copies - 1) / copies


# ---- cards

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
    checks.instance("name", name, str, f"the name of a card ({_NAMES})")
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
        if maker := next((m for m, names in _MAKERS.items() if re.match(names, plain)), None):
            raise ValueError(
                f"{name!r} is {maker}'s, and this library was tried on NVIDIA's GPUs alone, so no "
                "figures of others are known. A plan can take yours: describe it as "
                "megatrain_jax.Hardware(...)"
            )
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


# Beginnings of other makers' names, as `_plain` writes them.
_MAKERS = {
    "AMD": r"amd|mi\d|instinct|radeon|rx\d|gfx\d",
    "Apple": r"apple|m\d(pro|max|ultra)?$",
    "AWS": r"aws|trainium|inferentia|trn\d|inf\d",
    "Google": r"google|tpu|trillium|ironwood|v\d[ep]$",
    "Huawei": r"huawei|ascend",
    "Intel": r"intel|gaudi|arc|datacentergpu",
}


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
