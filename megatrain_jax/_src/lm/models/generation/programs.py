"""The compiled programs of generation: prefill of prompts, admission to rows, decoding of tokens.

They are pure functions of the weights, the caches and the rows' numbers. A resident model has one
program for all of its layers; a streamed one has a program for each kind of layer.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from megatrain_jax._src.lm.models.generation.caches import (
    DecodePast,
    PrefillPast,
    rows_of,
    with_rows,
)
from megatrain_jax._src.lm.models.generation.sampling import (
    SampledTokens,
    SamplingKind,
    SamplingParams,
    choose,
)
from megatrain_jax._src.lm.models.rotary import Rope, Rotation, rotation

# Maximum number of tokens of a row that one call writes before it returns to Python.
STEPS = 16
# Rotary embeddings that depend on the length of the text.
LENGTHENING = ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class LayerForm:
    """A layer without its arrays.

    Attributes:
        graph: Its modules.
        kind: The name of its class.
        rope: Its rotary embedding; None if it has none.
        borrows: Number of the layer with the keys and values that it uses; None for its own.
    """

    graph: nnx.GraphDef
    kind: str
    rope: Rope | None
    borrows: int | None


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """A decoder without its arrays.

    Attributes:
        ends: The decoder without layers.
        layers: Its layers.
    """

    ends: nnx.GraphDef
    layers: tuple[LayerForm, ...]


class TextRows(NamedTuple):
    """The texts being written, one in each row; all arrays are (rows,).

    Attributes:
        tokens: The last token; no cache holds it yet.
        positions: Its position: the number of tokens in the caches.
        active: Whether the row is continued.
        written: Number of tokens written so far.
        limits: Number of tokens to write.
        pauses: Position at which the text has to be prefilled again.
        stopped: Whether a token ended the text.
        prompts: Number of the prompt.
        samples: Number of the sample of this prompt.
    """

    tokens: Int[Array, " rows"]
    positions: Int[Array, " rows"]
    active: Bool[Array, " rows"]
    written: Int[Array, " rows"]
    limits: Int[Array, " rows"]
    pauses: Int[Array, " rows"]
    stopped: Bool[Array, " rows"]
    prompts: Int[Array, " rows"]
    samples: Int[Array, " rows"]


def empty_rows(number: int) -> TextRows:
    """Returns rows without texts, on the host."""
    flags = ("active", "stopped")
    arrays: Any = [
        np.zeros(number, bool if name in flags else np.int32) for name in TextRows._fields
    ]
    return TextRows(*arrays)


def rotations(
    ropes: Iterable[Rope | None], positions: Int[Array, "rows length"], lengths: Int[Array, " rows"]
) -> dict[Rope | None, Rotation | None]:
    """Returns the rotary embedding of some positions, for each kind of layer.

    Args:
        ropes: The layers' kinds.
        positions: The positions.
        lengths: Length of each row's text.
    """

    def by_length(rope: Rope) -> Rotation:
        # Each row has the wavelengths of its own length.
        def one(row: Array, length: Array) -> Rotation:
            extended = jnp.append(jnp.minimum(row, length - 1), length - 1)[None]
            return jax.tree.map(lambda x: x[0, :-1], rotation(rope, extended))

        return jax.vmap(one)(positions, lengths)

    return {
        rope: rope and (by_length(rope) if rope.kind in LENGTHENING else rotation(rope, positions))
        for rope in dict.fromkeys(ropes)
    }


def begin(
    form: ModelForm, ends: Any, tokens: Int[Array, "rows length"]
) -> tuple[Float[Array, "rows length width"], list[Any]]:
    """Returns the first layer's hidden states, and the values that layers pass on beside them."""
    model = nnx.merge(form.ends, ends)
    x = model.embed(tokens)
    return x, [] if model.config.memory is None else [model.memory(tokens, x)]


def finish(
    form: ModelForm, ends: Any, x: Float[Array, "rows 1 width"], handed: list[Any]
) -> Float[Array, "rows vocab_size"]:
    """Returns the logits of one token per row, from the last layer's results."""
    model = nnx.merge(form.ends, ends)
    return model.logits_of(model.finish(x, *handed))[:, 0]


def read_layer(
    layer: LayerForm,
    weights: Any,
    x: Array,
    turn: Rotation | None,
    handed: list[Any],
    lengths: Int[Array, " rows"],
) -> tuple[Array, list[Any], Any]:
    """Passes prompts through a layer; returns its result, the values passed on, and its cache."""
    past = PrefillPast(layer.kind, lengths, borrows=layer.borrows is not None)
    x, _, *handed = nnx.merge(layer.graph, weights)(x, turn, past, *handed)
    _check_kept(layer, past.kept)
    return x, handed, past.kept


def write_layer(
    layer: LayerForm,
    weights: Any,
    x: Array,
    turn: Rotation | None,
    handed: list[Any],
    cache: Any,
    rows: TextRows,
) -> tuple[Array, list[Any], Any]:
    """Passes one token of each row through a layer; see `read_layer`."""
    borrows = layer.borrows is not None
    past = DecodePast(layer.kind, cache, rows.positions, rows.active, borrows=borrows)
    x, _, *handed = nnx.merge(layer.graph, weights)(x, turn, past, *handed)
    return x, handed, past.kept


def _check_kept(layer: LayerForm, kept: Any) -> None:
    if layer.borrows is None and not jax.tree.leaves(kept):
        raise ValueError(f"generation knows no cache for layers of kind {layer.kind} yet")


def read_prompts(
    form: ModelForm,
    ends: Any,
    layers: list[Any],
    tokens: Int[Array, "rows length"],
    lengths: Int[Array, " rows"],
) -> list[Any]:
    """Returns the caches of prompts, without each one's last token.

    Args:
        form: The model's form.
        ends: The weights outside its layers.
        layers: The weights of its layers.
        tokens: The prompts' tokens but the last, padded at the end.
        lengths: Length of each prompt, the last token included.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    turns = rotations([layer.rope for layer in form.layers], positions, lengths)
    x, handed = begin(form, ends, tokens)
    caches = []
    for layer, weights in zip(form.layers, layers, strict=True):
        turn = turns[layer.rope]
        x, handed, kept = read_layer(layer, weights, x, turn, handed, lengths - 1)
        caches.append(kept)
    return caches


def write_token(
    form: ModelForm, ends: Any, layers: list[Any], caches: list[Any], rows: TextRows
) -> tuple[Float[Array, "rows vocab_size"], list[Any]]:
    """Returns the logits of each row's next token, and the caches with its last one."""
    positions = rows.positions[:, None]
    turns = rotations([layer.rope for layer in form.layers], positions, rows.positions + 1)
    x, handed = begin(form, ends, rows.tokens[:, None])
    caches = list(caches)
    for i, (layer, weights) in enumerate(zip(form.layers, layers, strict=True)):
        cache = caches[i if layer.borrows is None else layer.borrows]
        turn = turns[layer.rope]
        x, handed, kept = write_layer(layer, weights, x, turn, handed, cache, rows)
        caches[i] = kept
    return finish(form, ends, x, handed), caches


def advanced(rows: TextRows, chosen: SampledTokens, stops: Int[Array, " stops"]) -> TextRows:
    """Returns the rows with their next tokens."""
    active = rows.active
    written, positions = rows.written + active, rows.positions + active
    stopped = rows.stopped | (active & (chosen.tokens[:, None] == stops).any(-1))
    going = ~stopped & (written < rows.limits) & (positions < rows.pauses)
    return rows._replace(
        tokens=jnp.where(active, chosen.tokens, rows.tokens),
        positions=positions,
        written=written,
        stopped=stopped,
        active=active & going,
    )


class Written(NamedTuple):
    """The tokens that a call has written, in its first steps; all arrays are (steps, rows).

    Attributes:
        tokens: The tokens.
        log_probs: See `SampledTokens`.
        tempered_log_probs: See `SampledTokens`.
        drawn_log_probs: See `SampledTokens`.
    """

    tokens: Int[Array, "steps rows"]
    log_probs: Float[Array, "steps rows"]
    tempered_log_probs: Float[Array, "steps rows"]
    drawn_log_probs: Float[Array, "steps rows"]


def write_tokens(
    form: ModelForm,
    sampling_kind: SamplingKind,
    ends: Any,
    layers: list[Any],
    caches: list[Any],
    rows: TextRows,
    sampling_params: SamplingParams,
    stops: Int[Array, " stops"],
    steps: Int[Array, ""],
) -> tuple[list[Any], TextRows, Written]:
    """Writes up to `steps` tokens of each row, until no row is active."""
    number = rows.tokens.shape[0]
    floats = jnp.zeros((STEPS, number), jnp.float32)
    written = Written(jnp.zeros((STEPS, number), jnp.int32), floats, floats, floats)

    def body(carry):
        step, caches, rows, written = carry
        logits, caches = write_token(form, ends, layers, caches, rows)
        draws = rows.prompts, rows.samples, rows.written
        chosen = choose(logits, sampling_params, draws, sampling_kind)
        written = Written(*(x.at[step].set(new) for x, new in zip(written, chosen, strict=True)))
        return step + 1, caches, advanced(rows, chosen, stops), written

    def going(carry):
        return (carry[0] < steps) & carry[2].active.any()

    _, caches, rows, written = jax.lax.while_loop(
        going, body, (jnp.int32(0), caches, rows, written)
    )
    return caches, rows, written


def admitted_rows(cache: Any, at: Int[Array, " new"], read: Any, source: Int[Array, " new"]) -> Any:
    """Returns a layer's cache with some new rows; see `admitted`."""
    return with_rows(cache, at, rows_of(read, source))


def admitted(
    caches: list[Any],
    rows: TextRows,
    at: Int[Array, " new"],
    read: list[Any],
    source: Int[Array, " new"],
    new: TextRows,
) -> tuple[list[Any], TextRows]:
    """Returns caches and rows with some new texts.

    Args:
        caches: The caches of all rows.
        rows: All rows.
        at: The rows that get a new text; numbers past the end are dropped.
        read: The caches of prompts.
        source: The prompt of each new text, as a row of these caches.
        new: The new texts.
    """
    pairs = zip(caches, read, strict=True)
    caches = [admitted_rows(old, at, new_rows, source) for old, new_rows in pairs]
    return caches, TextRows(*(x.at[at].set(y, mode="drop") for x, y in zip(rows, new, strict=True)))


@functools.lru_cache(maxsize=32)
def reading(form: ModelForm) -> Callable[..., Any]:
    """Returns the compiled `read_prompts` of a model."""
    return jax.jit(functools.partial(read_prompts, form))


@functools.lru_cache(maxsize=32)
def writing(form: ModelForm, sampling_kind: SamplingKind) -> Callable[..., Any]:
    """Returns the compiled `write_tokens` of a model."""
    return jax.jit(functools.partial(write_tokens, form, sampling_kind), donate_argnums=(2, 3))


admitting = jax.jit(admitted, donate_argnums=(0, 1))
admitting_rows = jax.jit(admitted_rows, donate_argnums=0)
