"""`GenerationPlan`: the form of a decode, its bytes, and its rate at best."""

from dataclasses import dataclass

from megatrain_jax import Hardware, card
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.lm.models.generation.generation_memory import GenerationMemory


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """The form of a decode, by bytes.

    Attributes:
        resident: Whether all weights stay on the device; otherwise they are streamed through it.
        num_texts: Number of texts that are written at a time.
        length: Number of tokens of each text, prompt included.
        weight_bytes: Bytes of weights that are read for a token of all texts: from device memory,
            or through the link to the host in their form there.
        cache_bytes: Bytes of the caches of all texts.
        paged_bytes: Bytes of the caches, among these, that are in pinned host memory. They come to
            the device with their layers' weights for each token.
        tokens_per_s: Tokens of all texts per second, if nothing but these bytes takes time; caches
            count in full.
    """

    resident: bool
    num_texts: int
    length: int
    weight_bytes: int
    cache_bytes: int
    paged_bytes: int
    tokens_per_s: float

    def __str__(self) -> str:
        """Returns the plan as a sentence."""
        form = "stay on the device" if self.resident else "are streamed for each token"
        pages = f", {sized(self.paged_bytes)} of them in the host" if self.paged_bytes else ""
        return (
            f"weights, {sized(self.weight_bytes)}, {form}, and {self.num_texts:,} texts of "
            f"{self.length:,} tokens, with caches of {sized(self.cache_bytes)}{pages}, are written "
            f"at a time: at most {self.tokens_per_s:,.0f} tokens/s"
        )


def plan_of(
    room: GenerationMemory, hardware: Hardware | str, length: int, num_texts: int
) -> GenerationPlan:
    """Returns the plan of a decode.

    Args:
        room: The bytes of weights and caches, and of the device.
        hardware: The machine whose memory and rates count, or its name.
        length: Number of tokens of each text, prompt included.
        num_texts: Number of texts to write at a time, if they fit.
    """
    if not isinstance(hardware, Hardware | str):
        allowed = 'a Hardware or the name of a card, such as "H100"'
        raise TypeError(checks.refused("hardware", allowed, hardware))
    machine = card(hardware) if isinstance(hardware, str) else hardware
    room = room.on(machine)
    form = room.choose(length, num_texts)
    weights = room.read_bytes(resident=form.resident)
    caches = form.num_rows * room.cache_bytes(length)
    pages = room.link_bytes(length, form) - room.read_bytes(resident=False)
    seconds = caches / machine.memory_bytes_per_s
    rate = machine.memory_bytes_per_s if form.resident else machine.link_bytes_per_s
    seconds += (weights + pages) / rate
    return GenerationPlan(
        resident=form.resident,
        num_texts=form.num_rows,
        length=length,
        weight_bytes=weights,
        cache_bytes=caches,
        paged_bytes=pages,
        tokens_per_s=form.num_rows / seconds,
    )
