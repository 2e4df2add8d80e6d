"""`generate`: continues prompts with a decoder; `Generator` keeps its weights on the device.

Batching is continuous: a text that is finished makes room for the next prompt.
"""

import bisect
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax import Hardware
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.host_memory import available_bytes
from megatrain_jax._src.common.outside import naming
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.lm.common.prompts import check_prompts, ids_and_images, shown_answer
from megatrain_jax._src.lm.models.decoder_options import VisionConfig
from megatrain_jax._src.lm.models.generation.beams import empty_beams, search_params
from megatrain_jax._src.lm.models.generation.caches import as_page, grown, on_device
from megatrain_jax._src.lm.models.generation.decoding import (
    LENGTHENING,
    READ_AT_ONCE,
    ModelForm,
    ResidentDecoding,
    SampledTokens,
    SamplingKind,
    SamplingParams,
    StreamedDecoding,
    TextRows,
    admitting,
    admitting_rows,
    check_sampling,
    empty_rows,
    shapes_of,
)
from megatrain_jax._src.lm.models.generation.generation_memory import (
    GenerationMemory,
    GenerationPlan,
    plan_of,
)
from megatrain_jax._src.lm.models.generation.sharing import Sharing
from megatrain_jax._src.lm.models.generation.weight_source import WeightSource, open_source
from megatrain_jax._src.lm.models.images import FixedImages

_NEVER = np.iinfo(np.int32).max
# Minimum size of caches, in tokens, unless no text can become so long.
_FIRST_SIZE = 128


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
        images: The arrays of the prompt's images; empty if it has none.
        advance: How much further positions go on after them than after so many tokens.
        log_probs: The log-probabilities of each written token, in the order of `SampledTokens`.
        finish: Reason of the end; None before it.
        is_cut: Whether a stop text ended it, not a stop token.
        score: Its score by beam search; None without one.
        samples: All samples of the prompt if one search finds them, of which this is the first.
    """

    prompt: int
    sample: int
    ids: list[int]
    start: int
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    advance: int = 0
    log_probs: list[tuple[float, ...]] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    is_cut: bool = False
    score: float | None = None
    samples: list["OpenText"] = field(default_factory=list)

    @property
    def num_written(self) -> int:
        """Number of tokens written so far."""
        return len(self.ids) - self.start

    @property
    def content(self) -> tuple[Any, ...]:
        """Equal for texts with equal caches: the tokens so far, and the prompt if it has images."""
        return (self.prompt if self.images else None, *self.ids)


@dataclass(frozen=True, kw_only=True)
class WritingTask:
    """Options that all texts share.

    Attributes:
        max_tokens: Maximum number of tokens to write.
        sampling_kind: The kind of sampling.
        sampling_params: Its numbers.
        check: Returns the number of a text's tokens up to the end of a stop text, or None.
        watch: Called with each text that has new tokens.
        num_rows: Number of texts that are written at a time.
        pages: Numbers of the layers with caches in pinned host memory.
        size: Number of tokens of the longest text, prompt included, rounded up.
        num_seen: Size of the vocabulary if repetition is penalised, or 0.
    """

    max_tokens: int
    sampling_kind: SamplingKind
    sampling_params: SamplingParams
    check: Callable[[OpenText], int | None]
    watch: Callable[[OpenText], None]
    num_rows: int
    pages: frozenset[int]
    size: int
    num_seen: int


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
        self._num_beams = task.sampling_kind.num_beams
        self._rows = self._empty_rows(np.arange(task.num_rows, dtype=np.int32))
        self._texts: list[OpenText | None] = [None] * task.num_rows

    def write(self, texts: Sequence[OpenText]) -> None:
        """Writes all texts to their ends, in place."""
        waiting = deque(texts)
        while waiting or any(self._texts):
            free = [row for row, text in enumerate(self._texts) if text is None]
            if waiting and free:
                # Rows of a search are free together.
                count = self._num_beams
                first = [(row, waiting.popleft()) for row in free[::count][: len(waiting)]]
                self._admit([(row + i, text) for row, text in first for i in range(count)])
            self._make_room(self._longest() + self._decoding.steps)
            steps = min(self._decoding.steps, self._size - self._longest() + 1)
            sampling = self._task.sampling_kind, self._task.sampling_params
            self._caches, self._rows, new = self._decoding.write(
                *sampling, self._caches, self._rows, steps
            )
            waiting.extendleft(reversed(self._collect(new)))
        self._decoding.finish()

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
        groups: dict[Any, list[tuple[int, OpenText]]] = {}
        for row, text in admitted:
            self._texts[row] = text
            shapes = tuple((name, _room(x)) for name, x in text.images.items())
            groups.setdefault((bucket(len(text.ids) - 1), shapes), []).append((row, text))
        for (length, _), members in groups.items():
            # Samples of one prompt share its caches.
            different = {text.content: text for _, text in members}
            # A vision part computes many patches for a token.
            at_once = 1 if members[0][1].images else max(1, READ_AT_ONCE // length)
            for i in range(0, len(different), at_once):
                chosen = {x: n for n, x in enumerate([*different][i : i + at_once])}
                rows = [(row, text) for row, text in members if text.content in chosen]
                prompts = [different[content] for content in chosen]
                self._read(length, prompts, rows, [chosen[t.content] for _, t in rows])

    def _read(
        self,
        length: int,
        prompts: Sequence[OpenText],
        members: Sequence[tuple[int, OpenText]],
        source: Sequence[int],
    ) -> None:
        """Prefills some prompts, and copies their caches to rows."""
        number = _power(len(prompts))
        tokens, lengths = np.zeros((number, length), np.int32), np.ones(number, np.int32)
        images = {
            name: np.zeros((number, *_room(x)), x.dtype) for name, x in prompts[0].images.items()
        }
        for row, text in enumerate(prompts):
            tokens[row, : len(text.ids) - 1], lengths[row] = text.ids[:-1], len(text.ids)
            for name, array in text.images.items():
                images[name][row, : len(array)] = array
        read = self._decoding.read(tokens, lengths, images)
        count = _power(len(members))
        # Row numbers past the end are dropped.
        at, taken = np.full(count, self._task.num_rows, np.int32), np.zeros(count, np.int32)
        at[: len(members)], taken[: len(members)] = [row for row, _ in members], source
        new = self._new_rows([text for _, text in members], at)
        # Pages one by one, and all remaining caches in one program.
        for i in self._task.pages:
            cache = on_device(self._caches[i])
            self._keep(i, admitting_rows(cache, at, read[i], taken))
        kept = [i for i in range(len(read)) if i not in self._task.pages]
        caches, self._rows = admitting(
            [self._caches[i] for i in kept], self._rows, at, [read[i] for i in kept], taken, new
        )
        for i, cache in zip(kept, caches, strict=True):
            self._caches[i] = cache

    def _empty_rows(self, at: np.ndarray) -> TextRows:
        """Returns rows without texts, given their numbers."""
        if self._num_beams == 1:
            return empty_rows(len(at), self._task.num_seen)
        beams = empty_beams(at, self._num_beams, bucket(self._task.max_tokens))
        return empty_rows(len(at), self._task.num_seen, beams)

    def _new_rows(self, texts: Sequence[OpenText], at: np.ndarray) -> TextRows:
        rows, changes = self._empty_rows(at), _lengthenings(self._form)
        for i, text in enumerate(texts):
            position = len(text.ids) - 1
            rows.tokens[i], rows.positions[i] = text.ids[-1], position
            rows.active[i], rows.written[i] = True, text.num_written
            rows.limits[i] = self._task.max_tokens
            rows.pauses[i] = min((at for at in changes if at > position), default=_NEVER)
            rows.prompts[i], rows.samples[i] = text.prompt, text.sample
            rows.advances[i] = text.advance
            if self._task.num_seen:
                rows.seen[i, text.ids] = True
        return rows

    def _collect(self, new: SampledTokens) -> list[OpenText]:
        """Adds new tokens to their texts; returns texts that have to be prefilled again."""
        if self._num_beams > 1:
            return self._collect_found()
        again, ended = [], []
        # Without the tokens seen, which may be many.
        rows, new = jax.device_get((self._rows._replace(seen=None), new))  # type: ignore[arg-type]
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

    def _collect_found(self) -> list[OpenText]:
        """Takes the texts of searches that are over, the best ones first."""
        beams, stops = self._rows.beams, self._task.sampling_params.stops
        assert beams is not None and stops is not None
        active, written = jax.device_get((self._rows.active, self._rows.written))
        for row in range(0, len(self._texts), self._num_beams):
            text, there = self._texts[row], slice(row, row + self._num_beams)
            if text is None:
                continue
            # Which tokens they are is known at the end.
            text.ids += [0] * (int(written[row]) - text.num_written)
            if active[row]:
                continue
            found = jax.device_get(jax.tree.map(lambda x, there=there: x[there], beams.found))
            for i, one in enumerate(text.samples):
                ids, log_probs = (x[i, : found.lengths[i]] for x in (found.ids, found.log_probs))
                one.ids[one.start :] = ids.tolist()
                one.log_probs = [(x, x, x) for x in log_probs.tolist()]
                one.finish = "stop" if ids[-1] in stops else "length"
                one.score = float(found.scores[i])
                self._task.watch(one)
            self._texts[there] = [None] * self._num_beams
        return []


def _lengthenings(form: ModelForm) -> list[int]:
    """The positions that change the wavelengths of all tokens, also of earlier ones."""
    ropes = [layer.rope for layer in form.layers if layer.rope]
    return [rope.original_length or 0 for rope in ropes if rope.kind == LENGTHENING[1]]


def _power(number: int) -> int:
    """Returns the least power of two not below a number."""
    return 1 << (number - 1).bit_length()


def _room(array: np.ndarray) -> tuple[int, ...]:
    """Returns the shape of a prompt's array of images with zeros behind it; few differ."""
    return _power(len(array)), *array.shape[1:]


def _patches(vision: VisionConfig | None, images: Mapping[str, np.ndarray]) -> int:
    """The number of patches that a prompt's images are computed with."""
    return vision.num_patches(_room(images["pixel_values"])) if vision and images else 0


class StopStrings:
    """The stop strings of a call. They may contain special tokens; completions show none."""

    def __init__(self, tokenizer: Any, ends: Sequence[str]):
        """Stores tokenizer and strings.

        Args:
            tokenizer: The tokenizer; None if there are no stop strings.
            ends: The stop strings.
        """
        self._tokenizer, self._ends = tokenizer, ends

    def num_kept(self, text: OpenText) -> int | None:
        """Returns the fewest tokens that contain a stop string; None if there is none yet."""
        if not self._ends:
            return None
        ids = text.ids[text.start :]
        if not self._has_end(ids):
            return None
        counts = range(1, len(ids))
        return 1 + bisect.bisect_left(counts, True, key=lambda count: self._has_end(ids[:count]))

    def words(self, text: OpenText) -> str:
        """Returns the text written so far, without special tokens and the stop string."""
        ids = text.ids[text.start :]
        if not text.is_cut:
            shown = ids[:-1] if text.finish == "stop" else ids
            return shown_answer(shown, self._tokenizer)
        whole = self._tokenizer.decode(ids)
        before = min((whole.split(end)[0] for end in self._ends), key=len)
        # The tokens before the stop string, and the beginning of the token where the string starts.
        for count in reversed(range(len(ids))):
            first = self._tokenizer.decode(ids[:count])
            if before.startswith(first):
                break
        else:
            count, first = 0, ""
        return shown_answer(ids[:count], self._tokenizer) + before[len(first) :]

    def _has_end(self, ids: Sequence[int]) -> bool:
        words = self._tokenizer.decode(ids)
        return any(end in words for end in self._ends)


_LEAST_TEMPERATURE = 1e-30
# What Python takes for a completion besides its tokens: an object, two lists and their numbers.
_TEXT_BYTES = 300


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A text that continues a prompt.

    Attributes:
        prompt: Number of the prompt, from 0.
        sample: Number of the sample of this prompt, from 0.
        text: The text without special tokens, and without the token or the text that ended it; ids
            as numbers if there is no tokenizer.
        prompt_ids: Ids of the prompt's tokens, int32.
        ids: Ids of the tokens written, int32; the token that ended the text is the last one.
        log_probs: Log-probability of each of them by the model, at temperature 1 and among all
            tokens, fp32.
        tempered_log_probs: Log-probability of each of them by the logits divided by the
            temperature and among all tokens, fp32. TRL computes these in training. At temperature 0
            they are `log_probs`.
        drawn_log_probs: Log-probability of each of them in the distribution that it was drawn from,
            after `repetition_penalty`, temperature, `top_k`, `top_p` and `min_p`, fp32. These are
            the "processed" ones of vLLM. At temperature 0 they are `log_probs`.
        finish: "stop" if a stop token or text ended it, "length" if `max_tokens` did.
        own: Whether the model wrote each token, bool, False for results of tools; None if it wrote
            all.
        messages: Its turns and the results of tools; None if it was written without tools.
        score: Score of beam search: the sum of its log-probabilities, after `repetition_penalty`,
            divided by its number of tokens to the power of `length_penalty`; None without beams.
    """

    prompt: int
    sample: int
    text: str
    prompt_ids: np.ndarray
    ids: np.ndarray
    log_probs: np.ndarray
    tempered_log_probs: np.ndarray
    drawn_log_probs: np.ndarray
    finish: Literal["stop", "length"]
    own: np.ndarray | None = None
    messages: list[dict[str, Any]] | None = None
    score: float | None = None


class Generator:
    """A decoder on the device that continues prompts, until it is closed.

    `generate` makes one for a single call. In a `with` statement it is closed at the end.
    """

    def __init__(
        self,
        source: Any,
        *,
        tokenizer: Any = None,
        dtype: Any = None,
        device_budget: int | str | None = None,
        params: Literal["trained", "ema"] = "trained",
    ):
        """Opens a model; its weights are read by the first call.

        Args:
            source: See `generate`.
            tokenizer: See `generate`.
            dtype: See `generate`.
            device_budget: See `generate`.
            params: See `generate`.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: See `generate`.
        """
        check_prompts([], tokenizer)
        self._source = open_source(source, dtype, params)
        self._memory = GenerationMemory(self._source, device_budget)
        self._tokenizer = tokenizer
        self._decoding: ResidentDecoding | StreamedDecoding | None = None

    def __enter__(self) -> "Generator":
        """Returns the generator."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the generator."""
        self.close()

    def close(self) -> None:
        """Frees the device's memory; another call reads the weights again."""
        self._decoding = None

    def plan(self, length: int, num_texts: int, hardware: Hardware | str) -> GenerationPlan:
        """Plans a decode: its form, its bytes, and its rate at best.

        Args:
            length: Number of tokens of each text, prompt included.
            num_texts: Number of texts to write at a time, if they fit.
            hardware: The machine whose memory and rates count, a `Hardware` or the name of a
                card such as "RTX 4090". Its memory is used as `device_budget` says, if it
                was given.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If a number is below 1, or no card of that name is known.
            MemoryError: If not even one text fits on the device.
        """
        length = checks.integer("length", length)
        return plan_of(self._memory, hardware, length, checks.integer("num_texts", num_texts))

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Collection[int | str] | None = None,
        seed: int = 0,
        num_samples: int = 1,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        max_batch: int = 256,
        on_text: Callable[[int, int, str], None] | None = None,
    ) -> list[Completion]:
        """Continues prompts; see the function `generate` for arguments and errors."""
        if on_text is not None and not callable(on_text):
            raise TypeError(checks.refused("on_text", "a function, or None", on_text))
        check_prompts(prompts, self._tokenizer)
        max_tokens = checks.integer("max_tokens", max_tokens)
        num_samples = checks.integer("num_samples", num_samples)
        max_batch = checks.integer("max_batch", max_batch)
        given = {"min_p": min_p, "repetition_penalty": repetition_penalty}
        sampling_kind, sampling_params = _sampling(temperature, top_p, top_k, seed, **given)
        config = self._source.config
        stops, ends = _stops(stop, self._tokenizer, self._source)
        search = search_params(num_beams, length_penalty, early_stopping)
        if num_beams > 1:
            sampling_kind = replace(sampling_kind, num_beams=num_beams)
            if num_beams > (most := config.vocab_size - (stops >= 0).sum()):
                allowed = f"at most {most}, the number of tokens that don't end a text"
                raise ValueError(checks.refused("num_beams", allowed, num_beams))
            _check_search(num_beams, num_samples, max_batch, temperature, ends)
        shown = StopStrings(self._tokenizer, ends)
        opened = [ids_and_images(prompt, self._tokenizer) for prompt in prompts]
        rows = [ids for ids, _ in opened]
        for ids, images in opened:
            if max(ids) >= config.vocab_size:
                known = f"below the vocabulary's size, {config.vocab_size}"
                raise ValueError(checks.refused("prompts", f"ids {known}", max(ids)))
            _check_images(config.vision, ids, images)
            for length in _lengthenings(self._source.form) if num_beams > 1 else ():
                if len(ids) <= length < len(ids) + max_tokens - 1:
                    raise ValueError(
                        f"`num_beams`={num_beams:,} is not supported for texts that grow beyond "
                        f"{length:,} tokens, where the model's rotary embeddings change"
                    )
        numbers = (max_tokens, num_samples, max_batch, seed, float(temperature), top_p, top_k)
        numbers += (*given.values(), num_beams, length_penalty, early_stopping)
        ending = None if stop is None else sorted(map(repr, stop))
        shares = self._source.sharing.count > 1  # otherwise, pixels aren't copied
        pixels = [[x.tobytes() for x in images.values()] for _, images in opened if shares]
        self._source.sharing.check_equal((rows, numbers, ending, pixels))
        if not rows:
            return []
        _check_count(num_samples, len(rows), max(map(len, rows)))
        texts = _texts(opened, config.vision, num_samples)
        size = bucket(max(map(len, rows)) + max_tokens)
        sharing = self._source.sharing
        patches = (_patches(config.vision, images) for _, images in opened)
        memory = self._memory.with_images(max(patches))
        # One search finds all samples of a prompt.
        searched = num_samples if num_beams > 1 else 1
        groups = [texts[i : i + searched] for i in range(0, len(texts), searched)]
        wanted = min(-(-len(groups) // sharing.count), max_batch // num_beams)
        form = memory.with_beams(num_beams).choose(size, wanted * num_beams)
        task = WritingTask(
            max_tokens=max_tokens,
            sampling_kind=sampling_kind,
            sampling_params=sampling_params._replace(stops=stops, search=search),  # type: ignore
            check=shown.num_kept,
            watch=lambda text: on_text and on_text(text.prompt, text.sample, shown.words(text)),
            num_rows=form.num_rows,
            pages=form.pages,
            size=size,
            num_seen=config.vocab_size if sampling_kind.penalises else 0,
        )
        source = self._source
        kind = ResidentDecoding if form.resident else StreamedDecoding
        if not isinstance(self._decoding, kind):
            self._decoding = None  # first, so that its memory is free
            self._decoding = kind(source)
        own = sharing.own(groups)
        for group in own if num_beams > 1 else ():
            group[0].samples = group
        batch = Batch(source.form, self._decoding, task, self._memory.shapes)
        batch.write([group[0] for group in own])
        if sharing.count > 1:
            _join(sharing, texts, [text for group in own for text in group])
        return [self._completion(text, shown.words(text)) for text in texts]

    def _completion(self, text: OpenText, words: str) -> Completion:
        assert text.finish is not None
        ids = text.ids[text.start :]
        plain, tempered, drawn = np.array(text.log_probs, np.float32).T
        return Completion(
            prompt=text.prompt,
            sample=text.sample,
            text=words,
            prompt_ids=np.array(text.ids[: text.start], np.int32),
            ids=np.array(ids, np.int32),
            log_probs=plain,
            tempered_log_probs=tempered,
            drawn_log_probs=drawn,
            finish=text.finish,
            score=text.score,
        )


def _check_images(
    vision: VisionConfig | None, ids: list[int], images: Mapping[str, np.ndarray]
) -> None:
    """Checks that a prompt has as many images as placeholders.

    Raises:
        ValueError: If it hasn't, or the model has no vision part.
    """
    count = 0 if vision is None else sum(map(vision.is_placeholder, ids))
    if count and not images:
        raise ValueError(
            f"`prompts` have one with {count:,} placeholders of images and without images: "
            "data.image_prompts opens them"
        )
    if vision is None:
        if images:
            hint = "read the checkpoint with load_pretrained(folder, images=True)"
            raise ValueError(
                f"`prompts` have {', '.join(images)}, but the decoder has no vision part: {hint}"
            )
        return
    if vision.is_placeholder(ids[-1]):
        raise ValueError("`prompts` have one that ends in an image: a token has to follow")
    with naming("`prompts`"):
        vision.check_batch(
            {"tokens": np.array([ids], np.int32)} | {name: x[None] for name, x in images.items()}
        )
    if images and isinstance(vision, FixedImages):
        # Rows of a batch have zeros in unused places.
        used = count // vision.tokens_per_image
        if images["pixel_values"][used:].any():
            raise ValueError(f"`prompts` have one with more images than the {used:,} of its tokens")


def _texts(
    opened: Sequence[tuple[list[int], Mapping[str, np.ndarray]]],
    vision: VisionConfig | None,
    num_samples: int,
) -> list[OpenText]:
    """The samples of prompts with their images, before anything is written."""
    return [
        OpenText(
            prompt=i,
            sample=sample,
            ids=list(ids),
            start=len(ids),
            images=images,
            advance=vision.advance(images) if vision is not None and images else 0,
        )
        for i, (ids, images) in enumerate(opened)
        for sample in range(num_samples)
    ]


_FINISHES: tuple[Literal["stop", "length"], ...] = ("stop", "length")


def _join(sharing: Sharing, texts: Sequence[OpenText], own: Sequence[OpenText]) -> None:
    """Completes texts that other processes have written, from what each has written."""
    ends = [
        (text.num_written, _FINISHES.index(text.finish or "length"), text.is_cut) for text in own
    ]
    tokens = [token for text in own for token in text.ids[text.start :]]
    numbers = [row for text in own for row in text.log_probs]
    found = sharing.joined(
        [
            np.array(ends, np.int32).reshape(-1, 3),
            np.array(tokens, np.int32),
            np.array(numbers, np.float32).reshape(-1, 3),
            np.array([text.score for text in own], np.float32),
        ]
    )
    at = 0
    each = zip(texts, found[0].tolist(), found[3].tolist(), strict=True)
    for text, (count, finish, is_cut), score in each:
        written = slice(at, at + count)
        text.ids[text.start :] = found[1][written].tolist()
        text.log_probs = list(map(tuple, found[2][written].tolist()))
        text.finish, text.is_cut = _FINISHES[finish], bool(is_cut)
        text.score = None if np.isnan(score) else score
        at += count


def generate(
    source: Any,
    prompts: Sequence[Any],
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Collection[int | str] | None = None,
    seed: int = 0,
    num_samples: int = 1,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    tokenizer: Any = None,
    dtype: Any = None,
    device_budget: int | str | None = None,
    max_batch: int = 256,
    on_text: Callable[[int, int, str], None] | None = None,
    params: Literal["trained", "ema"] = "trained",
) -> list[Completion]:
    """Continues prompts with a decoder, with a cache for each of its layers.

    If weights and caches fit on the device, the weights are copied there once; otherwise they are
    streamed through it layer by layer, once per token of all texts. A text that ends makes room
    for the next prompt. A text doesn't depend on the texts beside it, except for rounding.

    If several processes share the run, all call this with the same arguments. Each writes a share
    of the texts on its first device, and gets all of them.

    Args:
        source: A `Trainer`, or the result of `fit` or `train`: its current parameters, in the dtype
            that it computes in. Or a `models.Pretrained`, a `models.Lora`, a `models.Decoder`, or a
            pair of a decoder, or a function that builds one, and its parameters, as for `fit`.
        prompts: Each a text, a list of messages (dicts with "role" and "content"), rendered as a
            question in the tokenizer's own chat template, or token ids. For a model with a vision
            part also a mapping from `data.image_prompts`, with the ids in `tokens` and the images.
        max_tokens: Maximum number of tokens to write for each.
        temperature: Divisor of the logits before a token is drawn; 0 takes the most likely one.
        top_p: Tokens are drawn from the most likely ones with this probability together; 1 for all.
        top_k: Tokens are drawn from this number of the most likely ones, before `top_p`; None or 0
            for all.
        min_p: Tokens are drawn from those with at least this fraction of the most likely one's
            probability, after `top_p`; 0 for all.
        repetition_penalty: Divisor of the positive logits, and factor of the negative ones, of
            tokens that the prompt or the completion has already; 1 for none. It counts at
            temperature 0, too.
        stop: Ids of tokens, and texts, that end a completion; None for the tokenizer's end-of-text
            token, the ones that the checkpoint names, and the ends of turns that a run has learned.
        seed: Seed of the draws. A draw depends on it, the number of the prompt, the number of the
            sample and the number of the token alone.
        num_samples: Number of completions of each prompt.
        num_beams: Number of beams that look for the most likely completion, at temperature 0, by
            the rules of Transformers; 1 for none. `num_samples` completions, at most as many as
            beams, are the best ones that are found, best first.
        length_penalty: Beams compare completions by their log-probability divided by this power of
            their numbers of tokens: a larger one prefers longer ones.
        early_stopping: When beam search ends: True once there are as many completions as beams,
            False if then no beam seems to become better, and "never" if none can.
        tokenizer: A Transformers tokenizer, or any object with `encode(text)` and `decode(ids)`;
            None if prompts are ids. If its `decode` has the option `skip_special_tokens`, the texts
            have none.
        dtype: The dtype to compute in; None for the run's or the parameters' own.
        device_budget: Maximum bytes of device memory, as a number or as text such as "22 GiB"; None
            for nine tenths of the memory that is free.
        max_batch: Maximum number of texts that are written at a time, by each process; each beam
            is one.
        on_text: A function that is called whenever a text has some new tokens, with the number of
            its prompt, the number of its sample, and the text so far; in the process that writes
            it. Beam search calls it with the whole text.
        params: "ema" for the averages that a run with `ema_decay` keeps of its parameters.

    Returns:
        A `Completion` of each sample: all samples of the first prompt, then of the second, and so
        on.

    Raises:
        TypeError: If an argument has a wrong type, or the model is not a `models.Decoder`.
        ValueError: If a number is out of range, an id is not in the vocabulary, texts lack a
            tokenizer, the model has a score head, or generation has no cache for a kind of layers.
        MemoryError: If not even one text fits on the device, or the completions don't fit in host
            memory.
    """
    given = dict(locals())  # a copy, as debuggers update the original
    of_generator = ("source", "tokenizer", "dtype", "device_budget", "params")
    with Generator(**{name: given.pop(name) for name in of_generator}) as generator:
        return generator.generate(**given)


def _check_count(num_samples: int, num_prompts: int, length: int) -> None:
    """Refuses more completions than host memory has room for; their lists come before any token.

    Raises:
        MemoryError: If there are more.
    """
    count = num_samples * num_prompts
    least, free = count * (_TEXT_BYTES + 8 * length), available_bytes()
    if least > free:
        raise MemoryError(
            f"`num_samples`={num_samples:,} for {num_prompts:,} prompts are {count:,} completions, "
            f"which take at least {sized(least)} of host memory, of which {sized(free)} are free: "
            "pass fewer, and call this several times, with another `seed` each time"
        )


def _sampling(
    temperature: Any, top_p: Any, top_k: Any, seed: Any, min_p: Any, repetition_penalty: Any
) -> tuple[SamplingKind, SamplingParams]:
    temperature = checks.number("temperature", temperature, least=0)
    check_sampling(top_p, top_k, min_p, repetition_penalty)
    seed = checks.integer("seed", seed, least=0, most=2**32 - 1)
    greedy = temperature == 0
    sampling_kind = SamplingKind(
        greedy=greedy,
        top_k=None if greedy else top_k or None,
        has_top_p=top_p < 1 and not greedy,
        has_min_p=min_p > 0 and not greedy,
        penalises=repetition_penalty != 1,
    )
    # A smaller divisor may make logits infinite in fp32; this one draws the most likely token.
    numbers = np.float32(max(temperature, _LEAST_TEMPERATURE)), np.float32(top_p)
    sampling_params = SamplingParams(*numbers, jax.random.key(seed))  # type: ignore[arg-type]
    return sampling_kind, sampling_params._replace(
        min_p=jnp.float32(min_p), repetition_penalty=jnp.float32(repetition_penalty)
    )


def _check_search(
    num_beams: int, num_samples: int, max_batch: int, temperature: float, ends: Sequence[str]
) -> None:
    """Checks that other options fit beam search.

    Raises:
        ValueError: If one doesn't.
    """
    for name, value, fits, allowed in (
        ("temperature", temperature, temperature == 0, "0"),
        ("num_samples", num_samples, num_samples <= num_beams, f"at most {num_beams}"),
        ("max_batch", max_batch, max_batch >= num_beams, f"at least {num_beams}"),
        ("stop", ends, not ends, "token ids"),
    ):
        if not fits:
            raise ValueError(checks.refused(name, f"{allowed} with `num_beams`={num_beams}", value))


def _stops(stop: Any, tokenizer: Any, source: WeightSource) -> tuple[np.ndarray, list[str]]:
    """Returns the ids and the texts that end a completion."""
    if stop is None:
        end = getattr(tokenizer, "eos_token_id", None)
        given: list[Any] = ([] if end is None else [int(end)]) + list(source.end_tokens)
    elif isinstance(stop, str) or not isinstance(stop, Collection):
        raise TypeError(checks.refused("stop", "a collection of token ids and texts", stop))
    else:
        given = list(stop)
    ends = [end for end in given if isinstance(end, str)]
    if ends and tokenizer is None:
        hint = "to stop at texts, pass `tokenizer`"
        raise ValueError(checks.refused("stop", "token ids", stop, hint))
    if "" in ends:
        raise ValueError(checks.refused("stop", "texts of one character at least", stop))
    most = None if stop is None else source.config.vocab_size - 1
    ids = {checks.integer("stop", i, least=0, most=most) for i in given if not isinstance(i, str)}
    # -1 is no token; padded, so that few programs are compiled.
    padded = np.full(bucket(max(len(ids), 1), 4), -1, np.int32)
    padded[: len(ids)] = sorted(ids)
    return padded, ends
