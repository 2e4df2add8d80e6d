"""The cards that are known by name: their measured or published numbers, with sources."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace

from megatrain_jax._src.common import checks
from megatrain_jax._src.state import host_memory, pool_limit
from megatrain_jax._src.state.hardware import Hardware
from megatrain_jax._src.state.placement import default_device, num_local_devices

_GIB = 2**30

# Typical hosts: an eighth of a server with eight cards and 2 TiB (H200, H100) or 1 TiB (A100), and
# a desktop computer of the card's time.
#
# Measured with JAX 0.11.2: copies of 300 MiB between pinned host memory and the device (of a few
# GiB: 53 GB/s; 300 MiB both ways at once: 45 GB/s each), large bfloat16 matrix products; on an H100
# float8 products of 32768 x 5120 x 13824. The card reports 143771 MiB. With four cards, on one NUMA
# node: copies both ways at once of all of them 156 GiB/s in all (157 to the devices alone, 123 from
# them alone; of two cards both ways 135), and 246 GiB/s into each for a cast to bfloat16 with an
# all-gather. Attention by cuDNN with 28 heads, 4
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
    float8_flops_per_s=1395e12,
    memory_bytes_per_s=4.8e12,
    sustained=0.8,
    sustained_attention=530 / 730,
    widest_heads=256,
    source="measured",
)
# Link, host, NVLink, sustained rates and attention's TFLOP/s are an H200's. Measured: a bfloat16
# matrix product of 8192 x 8192 x 8192 (778 to 798 TFLOP/s). NVIDIA H100 Tensor Core GPU
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
# Eight of them in a server: NVIDIA DGX H100 and DGX H200 data sheets: two sockets, 2 TiB. Each
# socket has its own memory, with the rate measured on one socket. For this, each card's share of
# the state has to lie in its own socket's memory, as with one process per socket.
HGX_H200 = replace(
    H200,
    name="NVIDIA H200 of eight, two sockets",
    host_bytes_per_s=2 * 156 * _GIB,
    source="measured, but for the second socket",
)
HGX_H100 = replace(
    H100,
    name="NVIDIA H100 80GB of eight, two sockets",
    host_bytes_per_s=2 * 156 * _GIB,
    source="measured, but for a link as an H200's and the second socket",
)
# The cards below: dense bfloat16 products with fp32 accumulation, and PCIe 4.0 x16, which
# carries 16 GT/s x 16 lanes x 128/130 = 31.5 GB/s each way. A host that has several of them: AMD
# EPYC 7003 (128 lanes of PCIe 4.0), 8 channels x 8 bytes x 3200 MT/s = 204.8 GB/s a socket.
# Attention reaches 50 to 73% of an A100's peak (FlashAttention-2, arXiv 2307.08691): 60% here, and
# the same is assumed for all cards without a better number.
_EPYC_SOCKET = 204.8e9
# NVIDIA A100 Tensor Core GPU data sheet (80 GB): 312 TFLOP/s; NVLink 600 GB/s, half each way.
# NVIDIA DGX A100 data sheet: two sockets of AMD EPYC 7742, with the same memory as the 7003.
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
# NVIDIA Ada GPU architecture white paper, GeForce RTX 4090: 165.2 TFLOP/s, in float8 with fp32
# accumulation 330.3, no NVLink; its driver sends all traffic between cards through the host.
RTX_4090 = Hardware(
    name="NVIDIA GeForce RTX 4090",
    typical_host_bytes=64 * _GIB,
    device_bytes=24 * _GIB,
    link_bytes_per_s=31.5e9,
    host_bytes_per_s=_EPYC_SOCKET,
    flops_per_s=165.2e12,
    float8_flops_per_s=330.3e12,
    memory_bytes_per_s=1008e9,
    source="vendor peak",
)

# NVIDIA Ampere GA102 GPU architecture white paper, GeForce RTX 3090: 71 TFLOP/s. A bridge for two
# of them is not counted.
RTX_3090 = Hardware(
    name="NVIDIA GeForce RTX 3090",
    typical_host_bytes=64 * _GIB,
    device_bytes=24 * _GIB,
    link_bytes_per_s=31.5e9,
    host_bytes_per_s=_EPYC_SOCKET,
    flops_per_s=71e12,
    memory_bytes_per_s=936e9,
    source="vendor peak",
)
# NVIDIA L40S data sheet: 362.05 TFLOP/s and 733 in float8, half of its numbers for sparse products;
# no NVLink. With error correction the card reports 46068 MiB.
L40S = Hardware(
    name="NVIDIA L40S",
    typical_host_bytes=128 * _GIB,
    device_bytes=46068 * 2**20,
    link_bytes_per_s=31.5e9,
    host_bytes_per_s=_EPYC_SOCKET,
    flops_per_s=362.05e12,
    float8_flops_per_s=733e12,
    memory_bytes_per_s=864e9,
    source="vendor peak",
)
# PCIe 5.0 x16 carries 32 GT/s x 16 lanes x 128/130 = 63 GB/s each way. A host that has several such
# cards: AMD EPYC 9004 (128 lanes of PCIe 5.0), 12 channels x 8 bytes x 4800 MT/s = 460.8 GB/s a
# socket.
#
# NVIDIA RTX Blackwell GPU architecture white paper, GeForce RTX 5090: 209.5 TFLOP/s, in float8 with
# fp32 accumulation 419, no NVLink. The card reports 32607 MiB.
RTX_5090 = Hardware(
    name="NVIDIA GeForce RTX 5090",
    typical_host_bytes=96 * _GIB,
    device_bytes=32607 * 2**20,
    link_bytes_per_s=63e9,
    host_bytes_per_s=460.8e9,
    flops_per_s=209.5e12,
    float8_flops_per_s=419e12,
    memory_bytes_per_s=1792e9,
    widest_heads=256,
    source="vendor peak",
)
# NVIDIA Blackwell architecture technical brief, HGX B200: 2.25 PFLOP/s, in float8 4.5, half of its
# numbers for sparse products; 8 TB/s; NVLink 1.8 TB/s, half each way. The card reports 183359 MiB.
# The host is a DGX B200's: two sockets, 8 channels x 8 bytes x 5600 MT/s = 358.4 GB/s each, and 2
# TiB for eight cards.
B200 = Hardware(
    name="NVIDIA B200",
    typical_host_bytes=256 * _GIB,
    device_bytes=183359 * 2**20,
    link_bytes_per_s=63e9,
    host_bytes_per_s=2 * 358.4e9,
    peer_bytes_per_s=900e9,
    flops_per_s=2250e12,
    float8_flops_per_s=4500e12,
    memory_bytes_per_s=8e12,
    widest_heads=256,
    source="vendor peak",
)
# NVIDIA GH200 Grace Hopper Superchip data sheet, with 96 GB of HBM3 and 480 GB of LPDDR5X: 990
# TFLOP/s, in float8 1,979, 4 TB/s; NVLink-C2C 900 GB/s, half each way; 384 GB/s of the host's
# memory, which is less. The card reports 97871 MiB. Several of them in one host are not counted.
GH200 = Hardware(
    name="NVIDIA GH200 480GB",
    typical_host_bytes=480 * 10**9,
    device_bytes=97871 * 2**20,
    link_bytes_per_s=450e9,
    host_bytes_per_s=384e9,
    flops_per_s=990e12,
    float8_flops_per_s=1979e12,
    memory_bytes_per_s=4e12,
    widest_heads=256,
    source="vendor peak",
)

# No run was tried on the cards below, and nothing was measured on them.
_UNMEASURED = "vendor peak, unmeasured"
# NVIDIA A100 Tensor Core GPU data sheet (40 GB): as with 80 GB, but 1,555 GB/s.
A100_40GB = replace(
    A100_80GB,
    name="NVIDIA A100 40GB",
    device_bytes=40 * _GIB,
    memory_bytes_per_s=1.555e12,
    source=_UNMEASURED,
)
# NVIDIA A10G data sheet: 70 TFLOP/s, half of its number for sparse products; 600 GB/s; no NVLink.
# With error correction the card reports 23028 MiB. The host is an eighth of an AWS g5.48xlarge.
A10G = Hardware(
    name="NVIDIA A10G",
    typical_host_bytes=96 * _GIB,
    device_bytes=23028 * 2**20,
    link_bytes_per_s=31.5e9,
    host_bytes_per_s=_EPYC_SOCKET,
    flops_per_s=70e12,
    memory_bytes_per_s=600e9,
    source=_UNMEASURED,
)
# NVIDIA RTX A6000 data sheet: 154.8 TFLOP/s, half of its number for sparse products; 768 GB/s. A
# bridge for two of them is not counted. Without error correction, its default, the card reports
# 49140 MiB.
RTX_A6000 = Hardware(
    name="NVIDIA RTX A6000",
    typical_host_bytes=128 * _GIB,
    device_bytes=49140 * 2**20,
    link_bytes_per_s=31.5e9,
    host_bytes_per_s=_EPYC_SOCKET,
    flops_per_s=154.8e12,
    memory_bytes_per_s=768e9,
    source=_UNMEASURED,
)
# NVIDIA L4 data sheet: 121 TFLOP/s and 242.5 in float8, half of its numbers for sparse products;
# 300 GB/s; no NVLink. With error correction the card reports 23034 MiB.
L4 = Hardware(
    name="NVIDIA L4",
    typical_host_bytes=64 * _GIB,
    device_bytes=23034 * 2**20,
    link_bytes_per_s=31.5e9,
    host_bytes_per_s=_EPYC_SOCKET,
    flops_per_s=121e12,
    float8_flops_per_s=242.5e12,
    memory_bytes_per_s=300e9,
    source=_UNMEASURED,
)
# NVIDIA GeForce RTX 3060 specifications (12 GB): 3,584 cores at 1.78 GHz, 12.7 TFLOP/s, of which
# bfloat16 products with fp32 accumulation are twice as many on all GA10x (GA102 white paper); 192
# bits at 15 Gbit/s; no NVLink. This agrees with NVIDIA's 101 TFLOP/s, which count sparse products
# with fp16 accumulation: four times as many.
RTX_3060 = Hardware(
    name="NVIDIA GeForce RTX 3060",
    typical_host_bytes=32 * _GIB,
    device_bytes=12 * _GIB,
    link_bytes_per_s=31.5e9,
    host_bytes_per_s=_EPYC_SOCKET,
    flops_per_s=25.5e12,
    memory_bytes_per_s=360e9,
    source=_UNMEASURED,
)
# NVIDIA T4 data sheet: 320 GB/s, PCIe 3.0 x16 (8 GT/s x 16 lanes x 128/130 = 15.75 GB/s each way).
# Turing's tensor cores have no bfloat16 (the published 65 TFLOP/s are for float16), so products
# count with the fp32 rate of the ordinary cores, 8.1 TFLOP/s. With error correction the card
# reports 15360 MiB.
T4 = Hardware(
    name="NVIDIA T4",
    typical_host_bytes=64 * _GIB,
    device_bytes=15360 * 2**20,
    link_bytes_per_s=15.75e9,
    host_bytes_per_s=_EPYC_SOCKET,
    flops_per_s=8.1e12,
    memory_bytes_per_s=320e9,
    source=_UNMEASURED,
)

_BY_NAME = {
    "A10G": A10G,
    "A100": A100_80GB,
    "A100 40GB": A100_40GB,
    "A100 80GB": A100_80GB,
    "A6000": RTX_A6000,
    "B200": B200,
    "GH200": GH200,
    "H100": H100,
    "H200": H200,
    "HGX H100": HGX_H100,
    "HGX H200": HGX_H200,
    "L4": L4,
    "L40S": L40S,
    "RTX 3060": RTX_3060,
    "RTX 3080": RTX_3080,
    "RTX 3090": RTX_3090,
    "RTX 4090": RTX_4090,
    "RTX 5090": RTX_5090,
    "T4": T4,
}
_NAMES = ", ".join(_BY_NAME)
_ASSUMED = "assumed, those of an A100"
_BY_DEVICE_KIND = {
    "NVIDIA H200": H200,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA A100-SXM4-40GB": A100_40GB,
    "NVIDIA A100-PCIE-40GB": A100_40GB,
    "NVIDIA A100-SXM4-80GB": A100_80GB,
    "NVIDIA A100 80GB PCIe": A100_80GB,
    "NVIDIA A10G": A10G,
    "NVIDIA GeForce RTX 3060": RTX_3060,
    "NVIDIA GeForce RTX 3080": RTX_3080,
    "NVIDIA GeForce RTX 3090": RTX_3090,
    "NVIDIA GeForce RTX 4090": RTX_4090,
    "NVIDIA GeForce RTX 5090": RTX_5090,
    "NVIDIA L4": L4,
    "NVIDIA L40S": L40S,
    "NVIDIA RTX A6000": RTX_A6000,
    "Tesla T4": T4,
    "NVIDIA B200": B200,
    "NVIDIA GH200 480GB": GH200,
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
    device = default_device()
    if device.platform != "gpu":
        return None
    # Ada is the first architecture with units for float8.
    capability = float(getattr(device, "compute_capability", "0"))
    unknown = replace(
        A100_80GB,
        name=device.device_kind,
        device_bytes=None,
        float8_flops_per_s=2 * A100_80GB.flops_per_s if capability >= 8.9 else None,
        source=_ASSUMED,
    )
    known = _BY_DEVICE_KIND.get(device.device_kind, unknown)
    # An allocator that grows on demand reports 0.
    limit = (device.memory_stats() or {}).get("bytes_limit")
    share = 1.0 if limit else known.device_share
    limit = limit or known.device_bytes
    host = pool_limit.machine_bytes(host_memory.total_bytes(), num_local_devices())
    return replace(known, host_bytes=host, device_bytes=limit, device_share=share)
