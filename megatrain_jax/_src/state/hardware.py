"""A machine to plan for: the rates of its device, its host and the link between them."""

import math
from dataclasses import dataclass, replace

from megatrain_jax._src.common import checks
from megatrain_jax._src.startup import allocator


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
        >>> from megatrain_jax import RTX_4090
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
            # A rate that isn't known bounds nothing: infinite where it would be divided by, else
            # None.
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
        # Read when it is asked for: the user may have set JAX's variable after the import.
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
        # `sustained` of 1 asks for the least time possible, as a bound does; a plan gives the
        # stages' own. Attention's kernels have no better one: what they reach is the measured rate.
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
