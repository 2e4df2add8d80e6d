"""Machines that a plan can be made for, and the rates that bound a step on them."""

import math
from dataclasses import dataclass, replace

from megatrain_jax._src.common import checks
from megatrain_jax._src.startup import allocator
from megatrain_jax._src.state import host_memory
from megatrain_jax._src.state.placement import default_device

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """An accelerator and its host, as far as a plan is concerned.

    Rates are of one accelerator, except for the host's memory, which all of them share.

    Attributes:
        name: The machine's name in plans.
        host_bytes: Host memory that training may use; `None` if unknown.
        typical_host_bytes: Host memory that plans count with where `host_bytes` isn't given.
        device_bytes: Memory of the accelerator; `None` if unknown.
        device_share: Share of it that JAX may allocate; `None` for what `XLA_CLIENT_MEM_FRACTION`
            says, which importing this library sets to 0.85.
        link_bytes_per_s: Bytes a second between host and device, each way.
        host_bytes_per_s: Bytes a second that the host's memory carries, to and from all devices
            together; without it, only the links bound what they carry.
        peer_bytes_per_s: Bytes a second that each device receives from the others in collectives;
            `None` if only the links connect them. Collectives then pass through the host's memory.
        flops_per_s: Floating-point operations a second in bfloat16 matrix products.
        memory_bytes_per_s: Bytes a second that the accelerator reads and writes in its memory;
            without it, what only moves bytes there counts as free.
        sustained: Share of `flops_per_s` that the stages of a step reach with all operations but
            those of attention's kernels.
        sustained_attention: Share of `flops_per_s` that these kernels, such as cuDNN's, reach in
            forward and backward together, where what a causal mask leaves out does not count.
        widest_heads: Width of the widest heads that cuDNN's attention takes there, by which plans
            made elsewhere tell whether `models.attention` calls it: 256 from Hopper on.
        source: Source of the two rates; vendors' peaks are never reached.

    Raises:
        TypeError: If an attribute is of another type; bytes are integers.
        ValueError: If a number is not positive, or a share is above 1.

    Examples:
        A known card in a host with 256 GiB:

        >>> import dataclasses
        >>> machine = dataclasses.replace(RTX_4090, host_bytes=256 * 2**30)
        >>> machine.name, machine.device_bytes // 2**30
        ('NVIDIA GeForce RTX 4090', 24)
    """

    name: str
    host_bytes: int | None = None
    typical_host_bytes: int | None = None
    device_bytes: int | None = None
    device_share: float | None = None
    link_bytes_per_s: float
    host_bytes_per_s: float = math.inf
    peer_bytes_per_s: float | None = None
    flops_per_s: float
    memory_bytes_per_s: float = math.inf
    sustained: float = 0.7
    sustained_attention: float = 0.6
    widest_heads: int = 128
    source: str = "given"

    def __post_init__(self) -> None:
        """Checks that every rate can be divided by."""
        for name in ("name", "source"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(checks.refused(name, "a str", value))
        for name in ("host_bytes", "typical_host_bytes", "device_bytes"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checks.integer(name, value, other=", or None"))
        object.__setattr__(self, "widest_heads", checks.integer("widest_heads", self.widest_heads))
        for name in ("link_bytes_per_s", "flops_per_s", "sustained", "sustained_attention"):
            checks.number(name, getattr(self, name), above=0)
        for name, unknown in (
            ("memory_bytes_per_s", math.inf),
            ("host_bytes_per_s", math.inf),
            ("peer_bytes_per_s", None),
            ("device_share", None),
        ):
            if (value := getattr(self, name)) != unknown:
                checks.number(name, value, above=0)
        for name in ("sustained", "sustained_attention", "device_share"):
            if (value := getattr(self, name)) is not None and value > 1:
                raise ValueError(checks.refused(name, "a share of at most 1", value))

    @property
    def usable_bytes(self) -> int | None:
        """Device memory that JAX may allocate; `None` if unknown."""
        if self.device_bytes is None:
            return None
        share = allocator.fraction() if self.device_share is None else self.device_share
        return int(share * self.device_bytes)

    def times(self, num_devices: int) -> "Hardware":
        """The same machine with so many of its accelerators, for which a host is typically made."""
        typical = self.typical_host_bytes
        return replace(self, typical_host_bytes=typical and typical * num_devices)

    def compute_seconds(self, flops: float, attention: float, sustained: float = 1.0) -> float:
        """Seconds that operations take one accelerator.

        Args:
            flops: All of them.
            attention: Those of attention's kernels among them.
            sustained: Share of `flops_per_s` that the others reach.
        """
        others = (flops - attention) / sustained
        return (others + attention / self.sustained_attention) / self.flops_per_s

    def transfer_bytes_per_s(self, num_devices: int) -> float:
        """Bytes a second between the host and each of so many devices, all of them, one way."""
        return min(self.link_bytes_per_s, self.host_bytes_per_s / num_devices)

    def collective_bytes_per_s(self, num_devices: int) -> float:
        """Bytes a second that each of so many devices receives from the others in collectives.

        Where only links connect them, a byte comes over the receiver's link, leaves over the
        sender's at the same time, and is written to and read from the host's memory on its way. On
        eight devices with links of 31.5 GB/s and a host's memory of 204.8 GB/s, each receives
        min(31.5, 204.8 / (2 · 8)) = 12.8 GB/s.
        """
        if self.peer_bytes_per_s is not None:
            return self.peer_bytes_per_s
        return min(self.link_bytes_per_s, self.host_bytes_per_s / (2 * num_devices))

    @property
    def assumed_host_bytes(self) -> int | None:
        """Host memory, or else the typical amount; `None` if unknown."""
        return self.typical_host_bytes if self.host_bytes is None else self.host_bytes


# Typical hosts: an eighth of a server with eight cards and 2 TiB (H200, H100) or 1 TiB (A100), and
# a desktop computer of the card's time.
#
# Measured with JAX 0.11.2: copies of 300 MiB between pinned host memory and the device (of a few
# GiB: 53 GB/s; 300 MiB both ways at once: 45 GB/s each), large bfloat16 matrix products. The card
# reports 143771 MiB. With four cards, on one NUMA node: copies both ways at once of all of them
# 156 GiB/s in all (157 to the devices alone, 123 from them alone; of two cards both ways 135), and
# 246 GiB/s into each for a cast to bfloat16 with an all-gather. Attention by cuDNN with 28 heads, 4
# of keys and values, of width 128, causal: 530 TFLOP/s within steps on sequences of 262,144 tokens;
# alone on 4,096 tokens 510 forward and 460 forward and backward.
H200 = Hardware(
    name="NVIDIA H200",
    typical_host_bytes=256 * _GIB,
    device_bytes=143771 * 2**20,
    link_bytes_per_s=47e9,
    host_bytes_per_s=156 * _GIB,
    peer_bytes_per_s=246 * _GIB,
    flops_per_s=730e12,
    memory_bytes_per_s=4.8e12,
    sustained=0.8,
    sustained_attention=530 / 730,
    widest_heads=256,
    source="measured",
)
# The rest as an H200's: link, host, NVLink, what whole steps reach, TFLOP/s of attention. Measured:
# a bfloat16 matrix product of 8192 x 8192 x 8192 (778 to 798 TFLOP/s). NVIDIA H100 Tensor Core GPU
# data sheet (SXM): 3.35 TB/s; the card reports 81559 MiB. FlashAttention-3 (arXiv 2407.08608) has
# for cuDNN's attention in heads of width 128 on 16,384 tokens 539 TFLOP/s forward, causal, and 516
# backward, not causal.
H100 = replace(
    H200,
    name="NVIDIA H100 80GB",
    device_bytes=81559 * 2**20,
    flops_per_s=778e12,
    memory_bytes_per_s=3.35e12,
    sustained_attention=530 / 778,
    source="measured, but for a link as an H200's",
)
# The cards below: dense bfloat16 products with fp32 accumulation, and PCIe 4.0 x16, which
# carries 16 GT/s x 16 lanes x 128/130 = 31.5 GB/s each way. A host that has several of them: AMD
# EPYC 7003 (128 lanes of PCIe 4.0), 8 channels x 8 bytes x 3200 MT/s = 204.8 GB/s a socket.
# Attention reaches 50 to 73% of an A100's peak (FlashAttention-2, arXiv 2307.08691): 60% here, and
# the same is assumed of all cards that nothing else is known of.
_EPYC_SOCKET = 204.8e9
# NVIDIA A100 Tensor Core GPU data sheet (80 GB): 312 TFLOP/s; NVLink 600 GB/s, half each way.
# NVIDIA DGX A100 data sheet: two sockets of AMD EPYC 7742, whose memory is that of the 7003.
A100_80GB = Hardware(
    name="NVIDIA A100 80GB",
    typical_host_bytes=128 * _GIB,
    device_bytes=80 * _GIB,
    link_bytes_per_s=31.5e9,
    host_bytes_per_s=2 * _EPYC_SOCKET,
    peer_bytes_per_s=300e9,
    flops_per_s=312e12,
    memory_bytes_per_s=2.0e12,
    source="vendor peak",
)
# NVIDIA Ampere GA102 GPU architecture white paper, GeForce RTX 3080 (10 GB): 59.5 TFLOP/s, no
# NVLink.
RTX_3080 = Hardware(
    name="NVIDIA GeForce RTX 3080",
    typical_host_bytes=32 * _GIB,
    device_bytes=10 * _GIB,
    link_bytes_per_s=31.5e9,
    host_bytes_per_s=_EPYC_SOCKET,
    flops_per_s=59.5e12,
    memory_bytes_per_s=760e9,
    source="vendor peak",
)
# NVIDIA Ada GPU architecture white paper, GeForce RTX 4090: 165.2 TFLOP/s, no NVLink; its driver
# has cards exchange nothing without the host.
RTX_4090 = Hardware(
    name="NVIDIA GeForce RTX 4090",
    typical_host_bytes=64 * _GIB,
    device_bytes=24 * _GIB,
    link_bytes_per_s=31.5e9,
    host_bytes_per_s=_EPYC_SOCKET,
    flops_per_s=165.2e12,
    memory_bytes_per_s=1008e9,
    source="vendor peak",
)

_ASSUMED = "assumed, those of an A100"
_BY_DEVICE_KIND = {
    "NVIDIA H200": H200,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA A100-SXM4-80GB": A100_80GB,
    "NVIDIA A100 80GB PCIe": A100_80GB,
    "NVIDIA GeForce RTX 3080": RTX_3080,
    "NVIDIA GeForce RTX 4090": RTX_4090,
}


def this_machine() -> Hardware | None:
    """Looks up the first JAX device among the known cards; starts JAX's backend.

    Returns:
        The card with this machine's host memory and the device memory that JAX may use here; for a
        GPU that is not known, rates of another one; `None` for what is no GPU.
    """
    device = default_device()
    if device.platform != "gpu":
        return None
    unknown = replace(A100_80GB, name=device.device_kind, device_bytes=None, source=_ASSUMED)
    card = _BY_DEVICE_KIND.get(device.device_kind, unknown)
    # An allocator that takes memory as it needs it says 0.
    limit = (device.memory_stats() or {}).get("bytes_limit")
    share = 1.0 if limit else card.device_share
    limit = limit or card.device_bytes
    return replace(
        card, host_bytes=host_memory.total_bytes(), device_bytes=limit, device_share=share
    )
