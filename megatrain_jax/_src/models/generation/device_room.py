"""The memory of the device: whether weights fit beside caches, and for how many texts."""

import copy
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax import Hardware
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.sizes import bytes_of, sized
from megatrain_jax._src.models.generation.batching import READ_AT_ONCE, shapes_of
from megatrain_jax._src.models.generation.weight_source import WeightSource, WeightsPart

# The share of the device's free memory that is used.
_SHARE = 0.9
# Weights stay on the device if this number of texts has room beside them, or all of them.
_ENOUGH = 8


class DeviceRoom:
    """The bytes of the device that generation may use.

    Attributes:
        shapes: Shapes of the weights outside the layers, and of each layer's.
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
        self._bytes = _free_bytes(source.device) if budget is None else budget
        self._source = source
        self.shapes = _shapes(source, source.ends), [_shapes(source, x) for x in source.layers]
        self._caches = functools.cache(shapes_of(source.form, *self.shapes))

    def on(self, hardware: Hardware) -> "DeviceRoom":
        """Returns the same room on another device, if its memory is known; a budget stays."""
        other = copy.copy(self)
        if self._budget is None and hardware.usable_bytes is not None:
            other._bytes = _SHARE * hardware.usable_bytes
        return other

    def choose(self, size: int, wanted: int) -> tuple[bool, int]:
        """Chooses the form of the decode, by bytes.

        Args:
            size: Number of tokens of the longest text.
            wanted: Number of texts to write at a time.

        Returns:
            Whether all weights stay on the device, and the number of texts at a time.

        Raises:
            MemoryError: If not even one text fits.
        """
        if self._bytes == math.inf:
            return True, wanted
        resident, streamed = (self._rows(size, wanted, resident=form) for form in (True, False))
        if resident >= min(wanted, _ENOUGH):
            return True, resident
        if streamed:
            return False, streamed
        least = self.needs(size, 1, resident=False)
        raise MemoryError(
            f"not one text of {size:,} tokens fits on the device: with two layers, embeddings and "
            f"head, {sized(self._weights(resident=False))}, and temporaries, it takes "
            f"{sized(least)}, but there are {sized(int(self._bytes))}. Pass a larger "
            "`device_budget`, fewer `max_tokens` or shorter prompts"
        )

    def needs(self, size: int, rows: int, *, resident: bool) -> int:
        """Returns the bytes that a decode takes: weights, caches, and an estimate of temporaries.

        Args:
            size: Number of tokens of the longest text.
            rows: Number of texts at a time.
            resident: Whether all weights stay on the device.
        """
        config, itemsize = self._source.config, jnp.dtype(self._source.dtype).itemsize
        each = self.cache_bytes(size)
        # A row's logits, in fp32, with the sorted ones of sampling.
        logits = 6 * 4 * config.vocab_size
        # Prompts that are read: hidden states, the MLP's, and their caches.
        tokens = max(min(READ_AT_ONCE, rows * size), size)
        wide = 8 * config.hidden_size + 3 * config.intermediate_size
        reading = tokens * (wide * itemsize + -(-each // size))
        return self._weights(resident=resident) + rows * (each + logits) + reading

    def cache_bytes(self, size: int) -> int:
        """Returns the bytes of the caches of one text with this number of tokens."""
        return _num_bytes(self._caches(1, size))

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

    def _rows(self, size: int, wanted: int, *, resident: bool) -> int:
        """The number of texts that fit at a time, at most as many as are wanted."""
        low, high = 0, wanted
        while low < high:
            middle = -(-(low + high) // 2)
            fits = self.needs(size, middle, resident=resident) <= self._bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def _free_bytes(device: Any) -> float:
    """Bytes of the device that are used if there is no budget; infinite if they aren't known."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return math.inf
    return _SHARE * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def _shapes(source: WeightSource, part: WeightsPart) -> Any:
    leaves = [jax.ShapeDtypeStruct(tuple(x.shape), _dtype(source, x)) for x in part.leaves]
    return jax.tree.unflatten(part.treedef, leaves)


def _dtype(source: WeightSource, leaf: Any) -> Any:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return source.dtype if is_float else leaf.dtype


def _num_bytes(shapes: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
