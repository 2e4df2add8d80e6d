"""Decoding: compiled programs, and two forms of a decode that call them.

The programs prefill prompts, admit them to rows and decode tokens. They are pure functions of the
weights, the caches and the rows' numbers. A resident model, with all weights on the device, has one
program for all of its layers; a streamed one, whose weights pass through it layer by layer, has a
program for each kind of layer.

Each next token is the most likely one, drawn after Transformers' warpers, or one of a beam search.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Float, Int

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.decoder_options import Placed
from megatrain_jax._src.lm.models.generation.beams import Beams, SearchParams, continued
from megatrain_jax._src.lm.models.generation.caches import (
    DecodePast,
    PrefillPast,
    as_page,
    is_page,
    moved_rows,
    on_device,
    rows_of,
    with_rows,
)
from megatrain_jax._src.lm.models.generation.weight_source import LayerForm, ModelForm, WeightSource
from megatrain_jax._src.lm.models.rotary import Rope, Rotation, rotation

Logits = Float[Array, "rows vocab_size"]
PerRow = Int[Array, " rows"]
Hidden = Float[Array, "rows 1 width"]
Tokens = Int[Array, "rows length"]
NewRows = Int[Array, " new"]


def check_sampling(top_p: Any, top_k: Any, min_p: Any, repetition_penalty: Any) -> None:
    """Checks options of sampling; see `models.generate`.

    Raises:
        TypeError: If one is no number.
        ValueError: If one is out of range.
    """
    checks.number("top_p", top_p, above=0, most=1)
    if top_k is not None:
        checks.integer("top_k", top_k, least=0, other=", or None")
    checks.number("min_p", min_p, least=0, most=1)
    checks.number("repetition_penalty", repetition_penalty, above=0)


@dataclass(frozen=True, kw_only=True)
class SamplingKind:
    """The parts of sampling that are compiled in.

    Attributes:
        greedy: Whether the most likely token is taken.
        top_k: Number of tokens that can be drawn; None for all.
        has_top_p: Whether tokens outside the nucleus are left out.
        has_min_p: Whether tokens far less likely than the most likely one are left out.
        penalises: Whether tokens that are in the text already are made less likely.
        num_beams: Number of beams of each text's search; 1 for none.
    """

    greedy: bool
    top_k: int | None
    has_top_p: bool
    has_min_p: bool = False
    penalises: bool = False
    num_beams: int = 1


class SamplingParams(NamedTuple):
    """The parts of sampling that may change without a compilation.

    Attributes:
        temperature: Divisor of the logits.
        top_p: Probability of the nucleus.
        key: The key of all draws.
        stops: Ids that end a text.
        min_p: Least probability, as a fraction of the most likely token's.
        repetition_penalty: Divisor of positive logits, and factor of negative ones.
        search: The rules of beam search; None without one.
    """

    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    key: Array
    stops: Int[Array, " stops"] | None = None
    min_p: Float[Array, ""] | float = 0.0
    repetition_penalty: Float[Array, ""] | float = 1.0
    search: SearchParams | None = None


class SampledTokens(NamedTuple):
    """The next token of each row (rows,), or all that a call has written (steps, rows).

    Attributes:
        tokens: The tokens.
        log_probs: Their log-probabilities by the logits, in fp32.
        tempered_log_probs: The same by the logits divided by the temperature.
        drawn_log_probs: Their log-probabilities in the distribution that they are drawn from.
    """

    tokens: Int[Array, "*steps rows"]
    log_probs: Float[Array, "*steps rows"]
    tempered_log_probs: Float[Array, "*steps rows"]
    drawn_log_probs: Float[Array, "*steps rows"]


def choose(
    logits: Logits,
    sampling_params: SamplingParams,
    draws: tuple[PerRow, ...],
    sampling_kind: SamplingKind,
    seen: Bool[Array, "rows vocab_size"] | None = None,
) -> SampledTokens:
    """Chooses the next token of each row.

    Args:
        logits: The logits.
        sampling_params: Temperature, nucleus and key.
        draws: For each row, the numbers that identify its draw; they are folded into the key. So a
            draw doesn't depend on the rows beside it.
        sampling_kind: The kind of sampling.
        seen: The tokens in each row's text, if repetition is penalised.
    """
    logits = scores = logits.astype(jnp.float32)
    plain = jax.nn.log_softmax(logits, axis=-1)
    if sampling_kind.penalises:
        assert seen is not None
        scores = _penalised(logits, seen, sampling_params.repetition_penalty)
    if sampling_kind.greedy:
        tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        found = _at(plain, tokens)
        return SampledTokens(tokens, found, found, found)
    warped = jax.nn.log_softmax(warp(scores, sampling_params, sampling_kind), axis=-1)

    def draw(row: Array, *numbers: Array) -> Array:
        key = sampling_params.key
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return jax.random.categorical(key, row)

    tokens = jax.vmap(draw)(warped, *draws).astype(jnp.int32)
    tempered = jax.nn.log_softmax(logits / sampling_params.temperature, axis=-1)
    return SampledTokens(tokens, *(_at(x, tokens) for x in (plain, tempered, warped)))


def _penalised(scores: Array, seen: Array, penalty: Any) -> Array:
    return jnp.where(seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


def warp(logits: Logits, sampling_params: SamplingParams, sampling_kind: SamplingKind) -> Logits:
    """Returns the logits of the distribution that is drawn from.

    They are changed by temperature, top-k, top-p and min-p, in this order, which is Transformers',
    as are the rules for ties.
    """
    scores = logits / sampling_params.temperature
    if sampling_kind.top_k is not None and sampling_kind.top_k < scores.shape[-1]:
        least = jax.lax.top_k(scores, sampling_kind.top_k)[0][:, -1:]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    if sampling_kind.has_top_p:
        order = jnp.argsort(scores, axis=-1)
        ascending = jnp.take_along_axis(scores, order, axis=-1)
        sums = jnp.cumsum(jax.nn.softmax(ascending, axis=-1), axis=-1)
        # The most likely token always stays.
        removed = (sums <= 1 - sampling_params.top_p).at[:, -1].set(False)
        kept = jnp.where(removed, -jnp.inf, ascending)
        scores = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
    if sampling_kind.has_min_p:
        odds = jax.nn.softmax(scores, axis=-1)
        least = sampling_params.min_p * odds.max(axis=-1, keepdims=True)
        scores = jnp.where(odds < least, -jnp.inf, scores)
    return scores


def _at(values: Logits, tokens: PerRow) -> Array:
    return jnp.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]


# Maximum number of prompt tokens per prefill.
READ_AT_ONCE = 4096
# Maximum number of tokens of a row that one call writes before it returns to Python.
STEPS = 16
# Rotary embeddings that depend on the length of the text.
LENGTHENING = ("dynamic", "longrope")


class TextRows(NamedTuple):
    """The texts being written, one in each row; all arrays before `seen` are (rows,).

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
        advances: How much further positions of rotary embeddings go than `positions`, by images.
        seen: The tokens in the text, if repetition is penalised; otherwise (rows, 0).
        beams: The texts of beam search; None without one.
    """

    tokens: PerRow
    positions: PerRow
    active: Bool[Array, " rows"]
    written: PerRow
    limits: PerRow
    pauses: PerRow
    stopped: Bool[Array, " rows"]
    prompts: PerRow
    samples: PerRow
    advances: PerRow
    seen: Bool[Array, "rows tokens"]
    beams: Beams | None = None


def empty_rows(number: int, num_seen: int, beams: Any = None) -> TextRows:
    """Returns rows without texts, on the host; `num_seen` is the width of `seen`."""
    flags = ("active", "stopped")
    arrays: Any = [
        np.zeros(number, bool if name in flags else np.int32) for name in TextRows._fields[:-2]
    ]
    seen: Any = np.zeros((number, num_seen), bool)
    return TextRows(*arrays, seen=seen, beams=beams)


def rotations(
    ropes: Iterable[Rope | None], positions: Int[Array, "rows length *pairs"], lengths: PerRow
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
    form: ModelForm, ends: Any, tokens: Tokens, positions: Tokens, images: dict[str, Array]
) -> tuple[Placed, list[Any]]:
    """Returns what the first layer reads, and the values that layers pass on beside it.

    Args:
        form: The model's form.
        ends: The weights outside its layers.
        tokens: The tokens.
        positions: Their positions if there are no images.
        images: The arrays of the rows' images; empty if there are none.
    """
    model = nnx.merge(form.ends, ends)
    placed = Placed(model.embed(tokens), None, positions)
    if images:
        placed = model.config.vision.place(model, tokens, placed, images)
    return placed, [] if model.config.memory is None else [model.memory(tokens, placed.x)]


def finish(form: ModelForm, ends: Any, x: Hidden, handed: list[Any]) -> Logits:
    """Returns the logits of one token per row, from the last layer's results."""
    model = nnx.merge(form.ends, ends)
    return model.logits_of(model.finish(x, *handed))[:, 0]


def read_layer(
    layer: LayerForm,
    weights: Any,
    x: Array,
    turn: Rotation | None,
    handed: list[Any],
    lengths: PerRow,
    images: Any,
    added: Any,
) -> tuple[Array, list[Any], Any]:
    """Passes prompts through a layer.

    Args:
        layer: The layer's form.
        weights: Its weights.
        x: The hidden states.
        turn: The rotary embedding.
        handed: The values that the layer before passed on.
        lengths: Number of tokens of each row.
        images: `segments` of `Placed`.
        added: An array that is added to the result; None for nothing.

    Returns:
        The layer's result, the values passed on, and its cache.
    """
    borrows = layer.borrows is not None
    past = PrefillPast(layer.kind, lengths, borrows=borrows, images=images)
    module = nnx.merge(layer.graph, weights)
    x, _, *handed = module(x, turn, past, *handed)
    x = x if added is None else x + added
    needs_cache = layer.borrows is None and getattr(module, "mixes_tokens", True)
    if needs_cache and not jax.tree.leaves(past.kept):
        raise ValueError(f"generation knows no cache for layers of kind {layer.kind} yet")
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
    if rows.beams is not None and not borrows:
        cache = moved_rows(cache, rows.beams.parents)
    past = DecodePast(layer.kind, cache, rows.positions, rows.active, borrows=borrows)
    x, _, *handed = nnx.merge(layer.graph, weights)(x, turn, past, *handed)
    return x, handed, past.kept


def read_prompts(
    form: ModelForm,
    ends: Any,
    layers: list[Any],
    tokens: Tokens,
    lengths: PerRow,
    images: dict[str, Array],
) -> list[Any]:
    """Returns the caches of prompts, without each one's last token.

    Args:
        form: The model's form.
        ends: The weights outside its layers.
        layers: The weights of its layers.
        tokens: The prompts' tokens but the last, padded at the end.
        lengths: Length of each prompt, the last token included.
        images: The arrays of the prompts' images; empty if there are none.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    (x, segments, positions, added), handed = begin(form, ends, tokens, positions, images)
    turns = rotations([layer.rope for layer in form.layers], positions, lengths)
    caches = []
    for layer, weights, more in zip(form.layers, layers, _of_layers(form, added), strict=True):
        given = handed, lengths - 1, segments, more
        x, handed, kept = read_layer(layer, weights, x, turns[layer.rope], *given)
        caches.append(kept)
    return caches


def _of_layers(form: ModelForm, added: Iterable[Array]) -> list[Array | None]:
    """Returns `added` of `Placed` for each layer; None for most."""
    added = list(added)
    return [*added, *[None] * (len(form.layers) - len(added))]


def write_token(
    form: ModelForm, ends: Any, layers: list[Any], caches: list[Any], rows: TextRows
) -> tuple[Logits, list[Any]]:
    """Returns the logits of each row's next token, and the caches with its last one."""
    positions = (rows.positions + rows.advances)[:, None]
    turns = rotations([layer.rope for layer in form.layers], positions, positions[:, 0] + 1)
    (x, *_), handed = begin(form, ends, rows.tokens[:, None], positions, {})
    caches = list(caches)
    for i, (layer, weights) in enumerate(zip(form.layers, layers, strict=True)):
        cache = caches[i if layer.borrows is None else layer.borrows]
        turn = turns[layer.rope]
        x, handed, kept = write_layer(layer, weights, x, turn, handed, cache, rows)
        caches[i] = kept
    return finish(form, ends, x, handed), caches


def chosen_tokens(
    sampling_kind: SamplingKind, logits: Array, sampling_params: SamplingParams, rows: TextRows
) -> tuple[TextRows, SampledTokens]:
    """Chooses each row's next token; returns the rows with it, and the tokens."""
    if rows.beams is not None:
        return searched_tokens(sampling_kind, logits, sampling_params, rows)
    draws = rows.prompts, rows.samples, rows.written
    chosen = choose(logits, sampling_params, draws, sampling_kind, rows.seen)
    active, seen = rows.active, rows.seen
    if sampling_kind.penalises:
        seen = seen.at[jnp.arange(len(seen)), chosen.tokens].set(True)
    written, positions = rows.written + active, rows.positions + active
    ended = (chosen.tokens[:, None] == sampling_params.stops).any(-1)
    stopped = rows.stopped | (active & ended)
    going = ~stopped & (written < rows.limits) & (positions < rows.pauses)
    rows = rows._replace(
        tokens=jnp.where(active, chosen.tokens, rows.tokens),
        positions=positions,
        written=written,
        stopped=stopped,
        active=active & going,
        seen=seen,
    )
    return rows, chosen


def searched_tokens(
    sampling_kind: SamplingKind, logits: Array, sampling_params: SamplingParams, rows: TextRows
) -> tuple[TextRows, SampledTokens]:
    """Continues beams; see `chosen_tokens`."""
    beams, search, stops = rows.beams, sampling_params.search, sampling_params.stops
    assert beams is not None and search is not None and stops is not None
    plain = scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    seen, active = rows.seen, rows.active
    if sampling_kind.penalises:
        scores = _penalised(plain, seen, sampling_params.repetition_penalty)
    given = plain, scores, stops, rows.written, rows.limits
    new, tokens, going = continued(beams, sampling_kind.num_beams, *given, search)
    if sampling_kind.penalises:
        seen = seen[new.parents].at[jnp.arange(len(seen)), tokens].set(True)
    # A search that has ended keeps its texts.
    beams = jax.tree.map(
        lambda x, old: jnp.where(active.reshape(-1, *[1] * (x.ndim - 1)), x, old), new, beams
    )
    rows = rows._replace(
        tokens=tokens,
        positions=rows.positions + active,
        written=rows.written + active,
        active=active & going,
        seen=seen,
        beams=beams,
    )
    # The log-probabilities are in the beams.
    none = jnp.zeros(len(tokens), jnp.float32)
    return rows, SampledTokens(tokens, none, none, none)


def sample(
    form: ModelForm,
    sampling_kind: SamplingKind,
    ends: Any,
    x: Hidden,
    handed: list[Any],
    sampling_params: SamplingParams,
    rows: TextRows,
) -> tuple[TextRows, SampledTokens]:
    """Chooses each row's next token from the last layer's results, as one step."""
    logits = finish(form, ends, x, handed)
    rows, chosen = chosen_tokens(sampling_kind, logits, sampling_params, rows)
    return rows, jax.tree.map(lambda x: x[None], chosen)


def write_tokens(
    form: ModelForm,
    sampling_kind: SamplingKind,
    ends: Any,
    layers: list[Any],
    caches: list[Any],
    rows: TextRows,
    sampling_params: SamplingParams,
    steps: Int[Array, ""],
) -> tuple[list[Any], TextRows, SampledTokens]:
    """Writes up to `steps` tokens of each row, until no row is active."""
    number = rows.tokens.shape[0]
    floats = jnp.zeros((STEPS, number), jnp.float32)
    written = SampledTokens(jnp.zeros((STEPS, number), jnp.int32), floats, floats, floats)

    def body(carry):
        step, caches, rows, written = carry
        logits, caches = write_token(form, ends, layers, caches, rows)
        rows, chosen = chosen_tokens(sampling_kind, logits, sampling_params, rows)
        written = jax.tree.map(lambda x, new: x.at[step].set(new), written, chosen)
        return step + 1, caches, rows, written

    def going(carry):
        return (carry[0] < steps) & carry[2].active.any()

    _, caches, rows, written = jax.lax.while_loop(
        going, body, (jnp.int32(0), caches, rows, written)
    )
    return caches, rows, written


def admitted_rows(cache: Any, at: NewRows, read: Any, source: NewRows) -> Any:
    """Returns a layer's cache with some new rows; see `admitted`."""
    return with_rows(cache, at, rows_of(read, source))


def admitted(
    caches: list[Any], rows: TextRows, at: NewRows, read: list[Any], source: NewRows, new: TextRows
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
    return caches, jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), rows, new)


# Layers with equal forms share a program.
@functools.lru_cache(maxsize=256)
def program(function: Callable[..., Any], *forms: Any, donate: tuple[int, ...] = ()) -> Any:
    """Returns a compiled function of the arguments after `forms`, of which some are donated."""
    return jax.jit(functools.partial(function, *forms), donate_argnums=donate)


admitting = jax.jit(admitted, donate_argnums=(0, 1))
admitting_rows = jax.jit(admitted_rows, donate_argnums=0)


class ResidentDecoding:
    """A decode with all weights on the device.

    Attributes:
        steps: Maximum number of tokens of a row that one call of `write` writes.
    """

    steps = STEPS

    def __init__(self, source: WeightSource):
        """Reads all weights onto the device, layer by layer."""
        # Looked up once: hashing a form takes as long as computing a layer.
        self._read = program(read_prompts, source.form)
        self._write = functools.cache(
            functools.partial(program, write_tokens, source.form, donate=(2, 3))
        )
        self._ends = source.weights(source.ends)
        self._layers = []
        for part in source.layers:
            self._layers.append(source.weights(part))
            # One layer at a time: at most one group of masters is on the device beside the weights.
            jax.block_until_ready(self._layers[-1])

    def read(
        self, tokens: np.ndarray, lengths: np.ndarray, images: dict[str, np.ndarray]
    ) -> list[Any]:
        """Returns the caches of prompts; see `read_prompts`."""
        return self._read(self._ends, self._layers, tokens, lengths, images)

    def write(
        self, kind: SamplingKind, params: SamplingParams, caches: Any, rows: TextRows, steps: int
    ) -> tuple[list[Any], TextRows, SampledTokens]:
        """Writes some tokens of each row; see `write_tokens`."""
        write = self._write(kind)
        return write(self._ends, self._layers, caches, rows, params, np.int32(steps))

    def finish(self) -> None:
        """Ends the writing of some texts."""


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
        self._embedding_program = program(begin, source.form)
        self._prefill_program = [program(read_layer, layer) for layer in layers]
        # A layer's own cache is donated.
        self._decode_program = [
            program(write_layer, x, donate=(4,) if x.borrows is None else ()) for x in layers
        ]
        self._sampling_program = functools.cache(functools.partial(program, sample, source.form))
        self._ahead: Any = None  # the weights of the next layer
        # Weights that are not in pinned memory are copied there once, in the dtype of the device.
        self._pinned = (
            []
            if source.bytes_at_rest
            else [self._put(source.weights(part), "pinned_host") for part in source.layers]
        )

    def read(
        self, tokens: np.ndarray, lengths: np.ndarray, images: dict[str, np.ndarray]
    ) -> list[Any]:
        """See `ResidentDecoding`."""
        self._source.sharing.goes_on(True)
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        placed, handed = self._embedding_program(self._ends, tokens, positions, images)
        x, segments, positions, added = placed
        turns = self._rotation_program(positions, lengths)
        caches = []
        for i, (layer, more) in enumerate(
            zip(self._form.layers, _of_layers(self._form, added), strict=True)
        ):
            weights, given = self._weights(i, x), (handed, lengths - 1, segments, more)
            x, handed, kept = self._prefill_program[i](weights, x, turns[layer.rope], *given)
            del weights
            caches.append(kept)
        return caches

    def write(
        self, kind: SamplingKind, params: SamplingParams, caches: Any, rows: TextRows, steps: int
    ) -> tuple[list[Any], TextRows, SampledTokens]:
        """See `ResidentDecoding`; writes one token of each row."""
        self._source.sharing.goes_on(True)
        positions = (rows.positions + rows.advances)[:, None]
        turns = self._rotation_program(positions, positions[:, 0] + 1)
        (x, *_), handed = self._embedding_program(self._ends, rows.tokens[:, None], positions, {})
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
                x, handed, cache = self._decode_program[i](weights, x, turn, handed, cache, rows)
                caches[i] = as_page(cache) if is_paged else cache
            else:
                lent = caches[layer.borrows]
                x, handed, _ = self._decode_program[i](weights, x, turn, handed, lent, rows)
            del weights, cache
        caches.pop()
        rows, written = self._sampling_program(kind)(self._ends, x, handed, params, rows)
        return caches, rows, written

    def finish(self) -> None:
        """Ends the writing of some texts, once all processes have written theirs."""
        while self._source.sharing.goes_on(False):
            for i in range(len(self._form.layers)):
                jax.block_until_ready(self._weights(i, None))

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
        return self._put(self._pinned[i], "device")

    def _put(self, weights: Any, kind: str) -> Any:
        to = SingleDeviceSharding(self._source.device, memory_kind=kind)
        return jax.device_put(weights, to)


@functools.lru_cache(maxsize=32)
def _rotation_program(ropes: tuple[Any, ...]) -> Callable[..., Any]:
    # JAX can't sort rotary embeddings as keys of a dict, so they leave the program in order.
    kinds = tuple(dict.fromkeys(ropes))

    @jax.jit
    def turns(positions, lengths):
        found = rotations(kinds, positions, lengths)
        return [found[kind] for kind in kinds]

    return lambda *args: dict(zip(kinds, turns(*args), strict=True))


def shapes_of(form: ModelForm, ends: Any, layers: Any) -> Callable[[int, int], list[Any]]:
    """Returns a function from numbers of rows and tokens to the shapes of caches."""
    leaves, treedef = jax.tree.flatten((ends, layers))
    return functools.partial(_cache_shapes, form, tuple(leaves), treedef)


# Cached: a trace of the whole model takes as long as generating many tokens.
@functools.lru_cache(maxsize=128)
def _cache_shapes(
    form: ModelForm, leaves: tuple[Any, ...], treedef: Any, rows: int, size: int
) -> list[Any]:
    tokens = jax.ShapeDtypeStruct((rows, size), jnp.int32)
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
    ends, layers = jax.tree.unflatten(treedef, leaves)

    def read(ends, layers, tokens, lengths):
        return read_prompts(form, ends, layers, tokens, lengths, {})

    return jax.eval_shape(read, ends, layers, tokens, lengths)
