"""The two forms of a decode: all weights on the device, or streamed through it layer by layer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from megatrain_jax._src.lm.models.generation import programs
from megatrain_jax._src.lm.models.generation.caches import as_page, is_page, on_device
from megatrain_jax._src.lm.models.generation.programs import TextRows, Written
from megatrain_jax._src.lm.models.generation.sampling import SamplingKind, SamplingParams, choose
from megatrain_jax._src.lm.models.generation.weight_source import WeightSource


class ResidentDecoding:
    """A decode with all weights on the device.

    Attributes:
        steps: Maximum number of tokens of a row that one call of `write` writes.
    """

    steps = programs.STEPS

    def __init__(self, source: WeightSource):
        """Reads all weights onto the device, layer by layer."""
        # Looked up once: hashing a form takes as long as computing a layer.
        self._read = programs.reading(source.form)
        self._write = functools.cache(functools.partial(programs.writing, source.form))
        self._ends = source.weights(source.ends)
        self._layers = []
        for part in source.layers:
            self._layers.append(source.weights(part))
            # One layer at a time: at most one group of masters is on the device beside the weights.
            jax.block_until_ready(self._layers[-1])

    def read(self, tokens: np.ndarray, lengths: np.ndarray) -> list[Any]:
        """Returns the caches of prompts; see `programs.read_prompts`."""
        return self._read(self._ends, self._layers, tokens, lengths)

    def write(
        self,
        sampling_kind: SamplingKind,
        caches: list[Any],
        rows: TextRows,
        sampling_params: SamplingParams,
        stops: Any,
        steps: int,
    ) -> tuple[list[Any], TextRows, Written]:
        """Writes some tokens of each row; see `programs.write_tokens`."""
        write = self._write(sampling_kind)
        return write(
            self._ends, self._layers, caches, rows, sampling_params, stops, np.int32(steps)
        )


class StreamedDecoding:
    """A decode that streams the layers' weights through the device, once per token of all rows.

    The weights outside the layers stay on the device, beside at most two layers. Paged caches, in
    pinned host memory, are copied to the device for their layer, and back.
    """

    steps = 1

    def __init__(self, source: WeightSource):
        """Reads the weights outside the layers."""
        self._form, self._source = source.form, source
        self._ends = source.weights(source.ends)
        layers = source.form.layers
        # Looked up once: hashing a form takes as long as computing a layer.
        self._rotation_program = _rotation_program(tuple(layer.rope for layer in layers))
        self._embedding_program = _embedding_program(source.form)
        self._prefill_program = [_prefill_program(layer) for layer in layers]
        self._decode_program = [
            (_decode_program if x.borrows is None else _borrowing_decode_program)(x) for x in layers
        ]
        self._sampling_program = functools.cache(functools.partial(_sampling_program, source.form))
        self._ahead: Any = None  # the weights of the next layer
        # Weights that are not in pinned memory are copied there once, in the dtype of the device.
        self._pinned = [] if source.bytes_at_rest else [self._rest(part) for part in source.layers]

    def read(self, tokens: np.ndarray, lengths: np.ndarray) -> list[Any]:
        """See `ResidentDecoding`."""
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        turns = self._rotation_program(positions, lengths)
        x, handed = self._embedding_program(self._ends, tokens)
        caches = []
        for i, layer in enumerate(self._form.layers):
            weights, turn = self._weights(i, x), turns[layer.rope]
            x, handed, kept = self._prefill_program[i](weights, x, turn, handed, lengths - 1)
            del weights
            caches.append(kept)
        return caches

    def write(
        self,
        sampling_kind: SamplingKind,
        caches: list[Any],
        rows: TextRows,
        sampling_params: SamplingParams,
        stops: Any,
        steps: int,
    ) -> tuple[list[Any], TextRows, Written]:
        """See `ResidentDecoding`; writes one token of each row."""
        turns = self._rotation_program(rows.positions[:, None], rows.positions + 1)
        x, handed = self._embedding_program(self._ends, rows.tokens[:, None])
        caches = [*caches, None]
        ahead = on_device(caches[0])
        for i, layer in enumerate(self._form.layers):
            weights, turn = self._weights(i, x), turns[layer.rope]
            if i > 1:
                # At most three pages are on the device: one leaves, one is used, one arrives.
                jax.block_until_ready(caches[i - 2])
            cache, ahead = ahead, on_device(caches[i + 1])
            if layer.borrows is None:
                is_paged, caches[i] = is_page(caches[i]), None
                x, handed, cache = self._decode_program[i](cache, weights, x, turn, handed, rows)
                caches[i] = as_page(cache) if is_paged else cache
            else:
                lent = caches[layer.borrows]
                x, handed = self._decode_program[i](lent, weights, x, turn, handed, rows)
            del weights, cache
        caches.pop()
        rows, written = self._sampling_program(sampling_kind)(
            rows, self._ends, x, handed, sampling_params, stops
        )
        return caches, rows, written

    def _weights(self, i: int, x: Any) -> Any:
        """Returns the weights of a layer, and starts to copy the next one's.

        Args:
            i: Number of the layer.
            x: The hidden states that it reads.
        """
        # The layer before is done, so that its memory is free for the layer after this one.
        jax.block_until_ready(x)
        weights = self._fetch(i) if self._ahead is None else self._ahead
        # After the last layer comes the first one, for the next token.
        self._ahead = None
        self._ahead = self._fetch((i + 1) % len(self._source.layers))
        return weights

    def _fetch(self, i: int) -> Any:
        if self._source.bytes_at_rest:
            return self._source.weights(self._source.layers[i])
        return jax.device_put(self._pinned[i], _memory(self._source.device, "device"))

    def _rest(self, part: Any) -> Any:
        return jax.device_put(
            self._source.weights(part), _memory(self._source.device, "pinned_host")
        )


def _memory(device: Any, kind: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind=kind)


# Layers with equal forms share a program.


@functools.lru_cache(maxsize=32)
def _rotation_program(ropes: tuple[Any, ...]) -> Callable[..., Any]:
    # JAX can't sort rotary embeddings as keys of a dict, so they leave the program in order.
    kinds = tuple(dict.fromkeys(ropes))

    @jax.jit
    def turns(positions, lengths):
        found = programs.rotations(kinds, positions, lengths)
        return [found[kind] for kind in kinds]

    return lambda *args: dict(zip(kinds, turns(*args), strict=True))


@functools.lru_cache(maxsize=32)
def _embedding_program(form: programs.ModelForm) -> Callable[..., Any]:
    return jax.jit(functools.partial(programs.begin, form))


@functools.lru_cache(maxsize=256)
def _prefill_program(layer: programs.LayerForm) -> Callable[..., Any]:
    return jax.jit(functools.partial(programs.read_layer, layer))


@functools.lru_cache(maxsize=256)
def _decode_program(layer: programs.LayerForm) -> Callable[..., Any]:
    def write(cache, weights, x, turn, handed, rows):
        return programs.write_layer(layer, weights, x, turn, handed, cache, rows)

    return jax.jit(write, donate_argnums=0)


@functools.lru_cache(maxsize=256)
def _borrowing_decode_program(layer: programs.LayerForm) -> Callable[..., Any]:
    def write(lent, weights, x, turn, handed, rows):
        return programs.write_layer(layer, weights, x, turn, handed, lent, rows)[:2]

    return jax.jit(write)


@functools.lru_cache(maxsize=32)
def _sampling_program(form: programs.ModelForm, sampling_kind: SamplingKind) -> Callable[..., Any]:
    def one(rows, ends, x, handed, sampling_params, stops):
        logits = programs.finish(form, ends, x, handed)
        chosen = choose(
            logits, sampling_params, (rows.prompts, rows.samples, rows.written), sampling_kind
        )
        return programs.advanced(rows, chosen, stops), Written(*(y[None] for y in chosen))

    return jax.jit(one)
