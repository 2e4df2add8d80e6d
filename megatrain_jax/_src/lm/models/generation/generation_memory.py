"""The memory of the device: whether weights fit beside caches, and for how many texts."""

import bisect
import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megatrain_jax import Hardware, card
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.host_memory import available_bytes
from megatrain_jax._src.common.sizes import bytes_of, sized
from megatrain_jax._src.lm.models.generation.decoding import READ_AT_ONCE, shapes_of
from megatrain_jax._src.lm.models.generation.weight_source import WeightSource, WeightsPart

# The share of the device's free memory that is used.
_SHARE = 0.9
# Weights stay on the device if at least this number of texts, or all texts, fit beside them.
_ENOUGH = 8
# The share of the available host memory that pages of caches may take: JAX's pool of pinned memory
# may double when it grows.
_HOST_SHARE = 0.5
# What a layer on the device takes for a token of all texts beside its bytes, for some 18 kernels.
# Measured with 36 layers and 64 texts: 94 µs on an H200, 104 µs on an H100.
_SECONDS_OF_LAYER = 1e-4
# Pages that are on the device at a time: one leaves, one is used, one arrives.
_PAGES_THERE = 3


class DecodeForm(NamedTuple):
    """The form of a decode.

    Attributes:
        resident: Whether all weights stay on the device.
        num_rows: Number of texts at a time.
        pages: Numbers of the layers with caches in pinned host memory, which come to the device
            with their layer.
    """

    resident: bool
    num_rows: int
    pages: frozenset[int] = frozenset()


class GenerationMemory:
    """The bytes of the device that generation may use.

    Attributes:
        shapes: Shapes of the weights outside the layers, and of each layer's.
        pageable: The layers with caches that no other layer uses.
    """

    def __init__(self, source: WeightSource, budget: int | str | None):
        """Counts the bytes of the weights.

        Args:
            source: The model.
            budget: See `generate`.

        Raises:
            TypeError: If the budget is neither a number nor text.
            ValueError: If it is no number of bytes.
        """
        checks.num_bytes("device_budget", budget, least=1)
        budget = bytes_of("device_budget", budget) if isinstance(budget, str) else budget
        self._budget = budget
        # Asked once, before any weights are there.
        # All processes choose the same form.
        own = _free_bytes(source.device) if budget is None else budget
        self._bytes = source.sharing.least(own)
        self._host_bytes = source.sharing.least(_HOST_SHARE * available_bytes())
        self._source = source
        self._patches, self._num_beams = 0, 1
        self.shapes = _shapes(source, source.ends), [_shapes(source, x) for x in source.layers]
        caches = shapes_of(source.form, *self.shapes)
        # Bytes of each layer's cache of one text with some number of tokens.
        self._layer_bytes = functools.cache(
            lambda size: [
                sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
                for cache in caches(1, size)
            ]
        )
        layers = source.form.layers
        lenders = {layer.borrows for layer in layers}
        self.pageable = [
            i for i, layer in enumerate(layers) if layer.borrows is None and i not in lenders
        ]

    def on(self, hardware: Hardware) -> "GenerationMemory":
        """Returns the memory of a different machine, where it is known; a budget stays."""
        other = copy.copy(self)
        if self._budget is None and hardware.usable_bytes is not None:
            other._bytes = _SHARE * hardware.usable_bytes
        if hardware.assumed_host_bytes is not None:
            weights = self.read_bytes(resident=False)
            other._host_bytes = _HOST_SHARE * (hardware.assumed_host_bytes - weights)
        return other

    def with_images(self, patches: int) -> "GenerationMemory":
        """Returns the memory for prompts with images of up to so many patches each."""
        other = copy.copy(self)
        other._patches = patches
        return other

    def with_beams(self, num_beams: int) -> "GenerationMemory":
        """Returns the memory for texts that are written so many at a time, or a multiple of it."""
        other = copy.copy(self)
        other._num_beams = num_beams
        return other

    def choose(self, size: int, wanted: int) -> DecodeForm:
        """Chooses the form of the decode, by bytes.

        Args:
            size: Number of tokens of the longest text.
            wanted: Number of texts to write at a time; each beam is one.

        Raises:
            MemoryError: If not even one text fits.
        """
        if self._bytes == math.inf:
            return DecodeForm(True, wanted)
        beams = self._num_beams
        resident = _most(wanted, lambda n: self.needs(size, n, resident=True) <= self._bytes, beams)
        if resident >= min(wanted, _ENOUGH):
            return DecodeForm(True, resident)
        forms = [self._streamed(size, wanted, most) for most in (0, len(self.pageable))]
        # Pages cost transfers, but with them more texts share each transfer of the weights.
        form = max(forms, key=lambda form: form.num_rows / self.link_bytes(size, form))
        if form.num_rows:
            return form
        least = self.needs(size, beams, resident=False, num_pages=len(self.pageable))
        text = "one text" if beams == 1 else f"one search with {beams:,} beams"
        shorter = "shorter prompts" + (", or fewer images" if self._patches else "")
        raise MemoryError(
            f"not {text} of {size:,} tokens fits on the device: with two layers, embeddings and "
            f"head, {sized(self._weights(resident=False))}, and temporaries, it takes "
            f"{sized(least)}, but there are {sized(int(self._bytes))}. Pass a larger "
            f"`device_budget`, fewer `max_tokens` or {shorter}"
        )

    def needs(self, size: int, rows: int, *, resident: bool, num_pages: int = 0) -> int:
        """Returns the bytes that a decode takes: weights, caches, and an estimate of temporaries.

        Args:
            size: Number of tokens of the longest text.
            rows: Number of texts at a time.
            resident: Whether all weights stay on the device.
            num_pages: Number of layers with caches in pinned host memory.
        """
        config, itemsize = self._source.config, jnp.dtype(self._source.dtype).itemsize
        layers, paged = self._layer_bytes(size), self.pages_of(num_pages)
        pages = sorted((layers[i] for i in paged), reverse=True)
        each = sum(layers) - sum(pages) + sum(pages[:_PAGES_THERE])
        # A row's logits, in fp32, with the sorted ones of sampling.
        logits = 6 * 4 * config.vocab_size
        # Prompts that are read: hidden states, the MLP's, and their caches.
        tokens = max(min(READ_AT_ONCE, rows * size), size)
        wide = _width_alive(config.hidden_size, config.intermediate_size)
        reading = tokens * (wide * itemsize + -(-sum(layers) // size))
        if config.vision is not None:  # before it; a prompt with images is read alone
            wide = _width_alive(*config.vision.tower_widths)
            reading = max(reading, self._patches * wide * itemsize)
        return self._weights(resident=resident) + rows * (each + logits) + reading

    def _num_pages(self, size: int, rows: int) -> float:
        """Returns the least number of pages with which some texts fit; infinite if none does."""
        for number in range(len(self.pageable) + 1):
            there = self.needs(size, rows, resident=False, num_pages=number) <= self._bytes
            pages = sum(self._layer_bytes(size)[i] for i in self.pages_of(number))
            if there and rows * pages <= self._host_bytes:
                return number
        return math.inf

    def _streamed(self, size: int, wanted: int, most_pages: int) -> DecodeForm:
        """Returns the form of a streamed decode with a maximum number of pages."""
        beams = self._num_beams
        number = _most(wanted, lambda n: self._num_pages(size, n) <= most_pages, beams)
        pages = self._num_pages(size, number) if number else 0
        return DecodeForm(False, number, self.pages_of(int(pages)))

    def pages_of(self, number: int) -> frozenset[int]:
        """Returns the layers to page: the last ones, as the first one's cache is needed at once."""
        return frozenset(self.pageable[len(self.pageable) - number :])

    def link_bytes(self, size: int, form: DecodeForm) -> int:
        """Returns the bytes of weights and pages that are streamed for each token of all texts."""
        layers = self._layer_bytes(size)
        pages = form.num_rows * sum(layers[i] for i in form.pages)
        return self.read_bytes(resident=False) + pages

    def cache_bytes(self, size: int) -> int:
        """Returns the bytes of the caches of one text with this number of tokens."""
        return sum(self._layer_bytes(size))

    def read_bytes(self, *, resident: bool) -> int:
        """Returns the bytes of weights that are read for each token of all texts.

        Args:
            resident: Whether they are read on the device, or from the host in their form there.
        """
        layers = sum(part.num_bytes for part in self._source.layers)
        at_rest = self._source.bytes_at_rest
        return self._source.ends.num_bytes + layers if resident else at_rest or layers

    def _weights(self, *, resident: bool) -> int:
        """Bytes of the weights that are on the device at a time."""
        layers = [part.num_bytes for part in self._source.layers]
        own = sum(layers) if resident else 2 * max(layers)
        return self._source.ends.num_bytes + own


def _width_alive(hidden_size: int, intermediate_size: int) -> int:
    """Numbers that exist at once for each token, or patch, in a layer.

    In fp32, Gemma 3's tower takes 86 KB a patch as compiled for CPUs, and this is 88.
    """
    return 8 * hidden_size + 3 * intermediate_size


def _most(wanted: int, fits: Callable[[int], bool], unit: int) -> int:
    """Returns the largest multiple of a unit, at most `wanted`, that fits; 0 if none does."""
    multiples = range(unit, wanted + 1, unit)
    return unit * bisect.bisect_left(multiples, True, key=lambda number: not fits(number))


def _free_bytes(device: Any) -> float:
    """Bytes of the device that are used if there is no budget; infinite if they aren't known."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return math.inf
    return _SHARE * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def _shapes(source: WeightSource, part: WeightsPart) -> Any:
    leaves = []
    for x in part.leaves:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        dtype = source.dtype if is_float else x.dtype
        leaves.append(jax.ShapeDtypeStruct(tuple(x.shape), dtype))
    return jax.tree.unflatten(part.treedef, leaves)


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
        tokens_per_s: Tokens of all texts per second, by the time for these bytes and, where weights
            stay on the device, for the kernels of each layer; caches count in full.
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
            f"at a time: about {self.tokens_per_s:,.0f} tokens/s"
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
    allowed = 'a Hardware or the name of a card, such as "H100"'
    checks.instance("hardware", hardware, Hardware | str, allowed)
    machine = card(hardware) if isinstance(hardware, str) else hardware
    room = room.on(machine)
    form = room.choose(length, num_texts)
    weights = room.read_bytes(resident=form.resident)
    caches = form.num_rows * room.cache_bytes(length)
    pages = room.link_bytes(length, form) - room.read_bytes(resident=False)
    seconds = caches / machine.memory_bytes_per_s
    rate = machine.memory_bytes_per_s if form.resident else machine.link_bytes_per_s
    seconds += (weights + pages) / rate
    seconds += _SECONDS_OF_LAYER * len(room.shapes[1]) if form.resident else 0.0
    return GenerationPlan(
        resident=form.resident,
        num_texts=form.num_rows,
        length=length,
        weight_bytes=weights,
        cache_bytes=caches,
        paged_bytes=pages,
        tokens_per_s=form.num_rows / seconds,
    )
