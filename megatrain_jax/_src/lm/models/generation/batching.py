"""Continuous batching: a text that is finished makes room for the next prompt."""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.lm.models.generation import programs
from megatrain_jax._src.lm.models.generation.caches import as_page, grown, on_device
from megatrain_jax._src.lm.models.generation.decoding import ResidentDecoding, StreamedDecoding
from megatrain_jax._src.lm.models.generation.programs import LENGTHENING, ModelForm, TextRows
from megatrain_jax._src.lm.models.generation.sampling import SamplingKind, SamplingParams

_NEVER = np.iinfo(np.int32).max
# Minimum size of caches, in tokens, unless no text can become so long.
_FIRST_SIZE = 128
# Maximum number of prompt tokens per prefill.
READ_AT_ONCE = 4096


def bucket(number: int, least: int = 16) -> int:
    """Returns the least size not below a number: 16, 24, 32, 48, 64, 96, ...

    Programs are compiled for these sizes, so there are few of them.
    """
    size = least
    while size < number:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


@dataclass(kw_only=True)
class OpenText:
    """A text that is being generated.

    Attributes:
        prompt: Number of the prompt.
        sample: Number of the sample of this prompt.
        ids: The prompt, and the tokens written so far.
        start: Number of tokens of the prompt.
        log_probs: The log-probabilities of each written token, in the order of `SampledTokens`.
        finish: Reason of the end; None before it.
        is_cut: Whether a stop text ended it, not a stop token.
    """

    prompt: int
    sample: int
    ids: list[int]
    start: int
    log_probs: list[tuple[float, ...]] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    is_cut: bool = False

    @property
    def num_written(self) -> int:
        """Number of tokens written so far."""
        return len(self.ids) - self.start


@dataclass(frozen=True, kw_only=True)
class WritingTask:
    """Options that all texts share.

    Attributes:
        max_tokens: Maximum number of tokens to write.
        sampling_kind: The kind of sampling.
        sampling_params: Its numbers.
        stops: Ids that end a text.
        check: Returns the number of a text's tokens up to the end of a stop text, or None.
        watch: Called with each text that has new tokens.
        num_rows: Number of texts that are written at a time.
        pages: Numbers of the layers with caches in pinned host memory.
        size: Number of tokens of the longest text, prompt included, rounded up.
    """

    max_tokens: int
    sampling_kind: SamplingKind
    sampling_params: SamplingParams
    stops: np.ndarray
    check: Callable[[OpenText], int | None]
    watch: Callable[[OpenText], None]
    num_rows: int
    pages: frozenset[int]
    size: int


class Batch:
    """Texts that are written side by side, each in a row of the caches."""

    def __init__(
        self,
        form: ModelForm,
        decoding: ResidentDecoding | StreamedDecoding,
        task: WritingTask,
        weights: Any,
    ):
        """Makes empty caches.

        Args:
            form: The model's form.
            decoding: The model.
            task: Options of all texts.
            weights: Shapes of the weights outside and in the layers, for the shapes of caches.
        """
        self._form, self._decoding, self._task = form, decoding, task
        self._shapes = shapes_of(form, *weights)
        self._size = 0
        self._caches: list[Any] = []
        self._rows = programs.empty_rows(task.num_rows)
        self._texts: list[OpenText | None] = [None] * task.num_rows

    def write(self, texts: Sequence[OpenText]) -> None:
        """Writes all texts to their ends, in place."""
        waiting = deque(texts)
        while waiting or any(self._texts):
            free = [row for row, text in enumerate(self._texts) if text is None]
            if waiting and free:
                self._admit([(row, waiting.popleft()) for row in free[: len(waiting)]])
            self._make_room(self._longest() + self._decoding.steps)
            steps = min(self._decoding.steps, self._size - self._longest() + 1)
            task = self._task
            self._caches, self._rows, new = self._decoding.write(
                task.sampling_kind,
                self._caches,
                self._rows,
                task.sampling_params,
                task.stops,
                steps,
            )
            waiting.extendleft(reversed(self._collect(new)))

    def _longest(self) -> int:
        """The number of tokens of the longest text in a row."""
        return max((len(text.ids) for text in self._texts if text), default=1)

    def _make_room(self, length: int) -> None:
        """Enlarges the caches for texts of some length."""
        if length <= self._size or self._size == self._task.size:
            return
        size = min(self._task.size, max(bucket(length), bucket(2 * self._size), _FIRST_SIZE))
        shapes = self._shapes(self._task.num_rows, size)
        for i, shape in enumerate(shapes):
            # Layer by layer, so that only one layer's cache exists twice.
            if self._size:
                self._keep(i, grown(on_device(self._caches[i]), shape))
            else:
                self._caches.append(None)
                self._keep(i, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape))
        self._size = size

    def _keep(self, i: int, cache: Any) -> None:
        """Replaces a layer's cache, in pinned host memory if it is paged."""
        self._caches[i] = as_page(cache) if i in self._task.pages else cache
        if i in self._task.pages:
            # At most one page is on the device.
            jax.block_until_ready(self._caches[i])

    def _admit(self, admitted: Sequence[tuple[int, OpenText]]) -> None:
        """Starts texts in free rows: prefills their tokens so far, in groups of similar length."""
        self._make_room(max(len(text.ids) for _, text in admitted) + self._decoding.steps)
        groups: dict[int, list[tuple[int, OpenText]]] = {}
        for row, text in admitted:
            self._texts[row] = text
            groups.setdefault(bucket(len(text.ids) - 1), []).append((row, text))
        for length, members in groups.items():
            # Samples of one prompt share its caches.
            different = list(dict.fromkeys(tuple(text.ids) for _, text in members))
            at_once = max(1, READ_AT_ONCE // length)
            for i in range(0, len(different), at_once):
                chosen = {ids: n for n, ids in enumerate(different[i : i + at_once])}
                rows = [(row, text) for row, text in members if tuple(text.ids) in chosen]
                self._read(length, list(chosen), rows, [chosen[tuple(t.ids)] for _, t in rows])

    def _read(
        self,
        length: int,
        prompts: Sequence[tuple[int, ...]],
        members: Sequence[tuple[int, OpenText]],
        source: Sequence[int],
    ) -> None:
        """Prefills some prompts, and copies their caches to rows."""
        number = _power(len(prompts))
        tokens, lengths = np.zeros((number, length), np.int32), np.ones(number, np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids) - 1], lengths[row] = ids[:-1], len(ids)
        read = self._decoding.read(tokens, lengths)
        count = _power(len(members))
        # Row numbers past the end are dropped.
        at, taken = np.full(count, self._task.num_rows, np.int32), np.zeros(count, np.int32)
        at[: len(members)], taken[: len(members)] = [row for row, _ in members], source
        new = self._new_rows([text for _, text in members], count)
        # Pages one by one, and all remaining caches in one program.
        for i in self._task.pages:
            cache = on_device(self._caches[i])
            self._keep(i, programs.admitting_rows(cache, at, read[i], taken))
        kept = [i for i in range(len(read)) if i not in self._task.pages]
        caches, self._rows = programs.admitting(
            [self._caches[i] for i in kept], self._rows, at, [read[i] for i in kept], taken, new
        )
        for i, cache in zip(kept, caches, strict=True):
            self._caches[i] = cache

    def _new_rows(self, texts: Sequence[OpenText], count: int) -> TextRows:
        rows = programs.empty_rows(count)
        for i, text in enumerate(texts):
            position = len(text.ids) - 1
            rows.tokens[i], rows.positions[i] = text.ids[-1], position
            rows.active[i], rows.written[i] = True, text.num_written
            rows.limits[i], rows.pauses[i] = self._task.max_tokens, self._pause(position)
            rows.prompts[i], rows.samples[i] = text.prompt, text.sample
        return rows

    def _pause(self, position: int) -> int:
        """The next position that changes the wavelengths of all tokens, also of earlier ones."""
        ropes = [layer.rope for layer in self._form.layers if layer.rope]
        changes = [r.original_length or 0 for r in ropes if r.kind == LENGTHENING[1]]
        return min((at for at in changes if at > position), default=_NEVER)

    def _collect(self, new: programs.Written) -> list[OpenText]:
        """Adds new tokens to their texts; returns texts that have to be prefilled again."""
        again, ended = [], []
        rows, new = jax.device_get((self._rows, new))
        for row, text in enumerate(self._texts):
            if text is None:
                continue
            count = int(rows.written[row]) - text.num_written
            tokens, *log_probs = (x[:count, row].tolist() for x in new)
            text.ids += tokens
            text.log_probs += zip(*log_probs, strict=True)
            kept = self._task.check(text)
            if kept is not None:
                del text.ids[text.start + kept :]
                del text.log_probs[kept:]
                text.is_cut = True
            if kept is not None or rows.stopped[row]:
                text.finish = "stop"
            elif text.num_written >= self._task.max_tokens:
                text.finish = "length"
            elif not rows.active[row]:
                again.append(text)
            self._task.watch(text)
            if not rows.active[row] or text.finish:
                self._texts[row] = None
                ended.append(row)
        if any(rows.active[row] for row in ended):
            active = rows.active.copy()
            active[ended] = False
            self._rows = self._rows._replace(active=active)
        return again


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
        return programs.read_prompts(form, ends, layers, tokens, lengths)

    return jax.eval_shape(read, ends, layers, tokens, lengths)


def _power(number: int) -> int:
    """Returns the least power of two not below a number."""
    return 1 << (number - 1).bit_length()
