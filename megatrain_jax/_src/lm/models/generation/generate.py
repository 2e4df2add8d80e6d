"""`generate`: continues prompts with a decoder; `Generator` keeps its weights on the device."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import jax
import numpy as np

from megatrain_jax import Hardware
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.host_memory import available_bytes
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.lm.common.prompts import check_prompts, prompt_ids
from megatrain_jax._src.lm.models.generation.batching import Batch, OpenText, WritingTask, bucket
from megatrain_jax._src.lm.models.generation.decoding import ResidentDecoding, StreamedDecoding
from megatrain_jax._src.lm.models.generation.generation_memory import GenerationMemory
from megatrain_jax._src.lm.models.generation.generation_plan import GenerationPlan, plan_of
from megatrain_jax._src.lm.models.generation.sampling import (
    SamplingKind,
    SamplingParams,
    check_restriction,
)
from megatrain_jax._src.lm.models.generation.stop_strings import StopStrings
from megatrain_jax._src.lm.models.generation.weight_source import WeightSource, open_source

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
            after temperature, `top_k` and `top_p`, fp32. These are the "processed" ones of vLLM. At
            temperature 0 they are `log_probs`.
        finish: "stop" if a stop token or text ended it, "length" if `max_tokens` did.
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
    ):
        """Opens a model; its weights are read by the first call.

        Args:
            source: See `generate`.
            tokenizer: See `generate`.
            dtype: See `generate`.
            device_budget: See `generate`.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: See `generate`.
        """
        check_prompts([], tokenizer)
        self._source = open_source(source, dtype)
        self._memory = GenerationMemory(self._source, device_budget)
        self._tokenizer = tokenizer
        self._decoding: ResidentDecoding | StreamedDecoding | None = None

    def __enter__(self) -> "Generator":
        """Returns the generator."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        stop: Collection[int | str] | None = None,
        seed: int = 0,
        num_samples: int = 1,
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
        sampling_kind, sampling_params = _sampling(temperature, top_p, top_k, seed)
        config = self._source.config
        stops, ends = _stops(stop, self._tokenizer, self._source)
        shown = StopStrings(self._tokenizer, ends)
        rows = [prompt_ids(prompt, self._tokenizer) for prompt in prompts]
        for ids in rows:
            if max(ids) >= config.vocab_size:
                known = f"below the vocabulary's size, {config.vocab_size}"
                raise ValueError(checks.refused("prompts", f"ids {known}", max(ids)))
        if not rows:
            return []
        _check_count(num_samples, len(rows), max(map(len, rows)))
        texts = [
            OpenText(prompt=i, sample=sample, ids=list(ids), start=len(ids))
            for i, ids in enumerate(rows)
            for sample in range(num_samples)
        ]
        size = bucket(max(map(len, rows)) + max_tokens)
        form = self._memory.choose(size, min(len(texts), max_batch))
        task = WritingTask(
            max_tokens=max_tokens,
            sampling_kind=sampling_kind,
            sampling_params=sampling_params,
            stops=stops,
            check=shown.num_kept,
            watch=lambda text: on_text and on_text(text.prompt, text.sample, shown.words(text)),
            num_rows=form.num_rows,
            pages=form.pages,
            size=size,
        )
        source = self._source
        kind = ResidentDecoding if form.resident else StreamedDecoding
        if not isinstance(self._decoding, kind):
            self._decoding = None  # first, so that its memory is free
            self._decoding = kind(source)
        Batch(source.form, self._decoding, task, self._memory.shapes).write(texts)
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
        )


def generate(
    source: Any,
    prompts: Sequence[Any],
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    stop: Collection[int | str] | None = None,
    seed: int = 0,
    num_samples: int = 1,
    tokenizer: Any = None,
    dtype: Any = None,
    device_budget: int | str | None = None,
    max_batch: int = 256,
    on_text: Callable[[int, int, str], None] | None = None,
) -> list[Completion]:
    """Continues prompts with a decoder, with a cache for each of its layers.

    If weights and caches fit on the device, the weights are copied there once; otherwise they are
    streamed through it layer by layer, once per token of all texts. A text that ends makes room
    for the next prompt. A text doesn't depend on the texts beside it, except for rounding.

    Args:
        source: A `Trainer`, or the result of `fit` or `train`: its current parameters, in the dtype
            that it computes in. Or a `models.Pretrained`, a `models.Lora`, a `models.Decoder`, or a
            pair of a decoder, or a function that builds one, and its parameters, as for `fit`.
        prompts: Each a text, a list of messages (dicts with "role" and "content"), rendered as a
            question in the tokenizer's own chat template, or token ids.
        max_tokens: Maximum number of tokens to write for each.
        temperature: Divisor of the logits before a token is drawn; 0 takes the most likely one.
        top_p: Tokens are drawn from the most likely ones with this probability together; 1 for all.
        top_k: Tokens are drawn from this number of the most likely ones, before `top_p`; None or 0
            for all.
        stop: Ids of tokens, and texts, that end a completion; None for the tokenizer's end-of-text
            token, the ones that the checkpoint names, and the ends of turns that a run has learned.
        seed: Seed of the draws. A draw depends on it, the number of the prompt, the number of the
            sample and the number of the token alone.
        num_samples: Number of completions of each prompt.
        tokenizer: A Transformers tokenizer, or any object with `encode(text)` and `decode(ids)`;
            None if prompts are ids. If its `decode` has the option `skip_special_tokens`, the texts
            have none.
        dtype: The dtype to compute in; None for the run's or the parameters' own.
        device_budget: Maximum bytes of device memory, as a number or as text such as "22 GiB"; None
            for nine tenths of the memory that is free.
        max_batch: Maximum number of texts that are written at a time.
        on_text: A function that is called whenever a text has some new tokens, with the number of
            its prompt, the number of its sample, and the text so far.

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
    given = {"tokenizer": tokenizer, "dtype": dtype, "device_budget": device_budget}
    with Generator(source, **given) as generator:
        return generator.generate(
            prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop=stop,
            seed=seed,
            num_samples=num_samples,
            max_batch=max_batch,
            on_text=on_text,
        )


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
    temperature: Any, top_p: Any, top_k: Any, seed: Any
) -> tuple[SamplingKind, SamplingParams]:
    temperature = checks.number("temperature", temperature, least=0)
    check_restriction(top_p, top_k)
    seed = checks.integer("seed", seed, least=0, most=2**32 - 1)
    greedy = temperature == 0
    sampling_kind = SamplingKind(
        greedy=greedy,
        top_k=None if greedy else top_k or None,
        has_top_p=top_p < 1 and not greedy,
    )
    # A smaller divisor may make logits infinite in fp32; this one draws the most likely token.
    numbers = np.float32(max(temperature, _LEAST_TEMPERATURE)), np.float32(top_p)
    return sampling_kind, SamplingParams(*numbers, jax.random.key(seed))  # type: ignore[arg-type]


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
