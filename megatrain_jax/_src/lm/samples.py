"""Samples of a run: the streamed model continues prompts during training."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from megatrain_jax import Trainer, models
from megatrain_jax._src.callbacks.callback import Callback
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.progress import tqdm
from megatrain_jax._src.lm.common.prompts import (
    check_prompts,
    ids_and_images,
    shown_answer,
    shown_prompt,
)

Logits = Callable[[Any, Mapping[str, Any]], jax.Array]


def choose(logits: jax.Array, temperatures: ArrayLike, draws: ArrayLike) -> jax.Array:
    """The next token of each row: the most likely one, or one drawn from the distribution.

    A draw u in [0, 1) selects the first token at which cumulative probabilities reach 1 - u. With
    the probabilities 0.25, 0 and 0.75, a draw of 0.8 selects token 0, and a draw of 0.7 token 2.

    Args:
        logits: The logits, (rows, vocabulary).
        temperatures: Divisors of the logits, (rows,); 0 for the most likely token.
        draws: Numbers drawn from [0, 1), (rows,).

    Returns:
        Integers (rows,).
    """
    logits = logits.astype(jnp.float32)
    temperatures = jnp.asarray(temperatures)[:, None]
    scaled = logits / jnp.where(temperatures > 0, temperatures, 1)
    sums = jnp.cumsum(jax.nn.softmax(scaled, axis=-1), axis=-1)
    # Scaled by the actual sum instead of 1, so some token always reaches it.
    wanted = (1 - jnp.asarray(draws)[:, None]) * sums[:, -1:]
    drawn = (sums >= wanted).argmax(-1)
    return jnp.where(temperatures[:, 0] > 0, drawn, logits.argmax(-1))


def next_tokens_by(logits: Logits) -> Callable[..., jax.Array]:
    """A function for `Trainer.predict` that returns the next token of each row.

    Args:
        logits: Function that returns logits of the batch, (rows, length, vocabulary), or only the
            logits at `last`, (rows, vocabulary).
    """

    def next_tokens(model: Any, batch: Mapping[str, Any]) -> jax.Array:
        found = logits(model, batch)
        rows, length = batch["tokens"].shape
        shape = getattr(found, "shape", None)
        if shape is None or (shape[:-1] != (rows,) and shape[:-1] != (rows, length)):
            allowed = f"({rows}, {length}, vocabulary) or, at `last`, ({rows}, vocabulary)"
            given = f"shape {shape}" if shape is not None else type(found).__name__
            raise ValueError(f"`logits` must return an array of shape {allowed}, but gave {given}")
        if len(shape) == 3:
            found = jnp.take_along_axis(found, batch["last"][:, None, None], axis=1)[:, 0]
        return choose(found, batch["temperatures"], batch["draws"])

    return next_tokens


_EVAL_PREFIX = "eval_"


class Samples(Callback):
    """Continues prompts with the current model at evaluations, and shows the texts.

    The record gets them as ``"samples"``, a list of dicts with "prompt", "temperature" and "text",
    so they are in the history, and later callbacks that log write them too.

    A `models.Decoder` writes with `models.generate`. For any model with `logits`, nothing is cached
    between tokens, so each token costs a forward pass over whole rows, in which the model is
    streamed through the device once. All prompts, at all temperatures, share this pass. Rows have
    the length of the longest prompt plus `num_tokens`, and are compiled once. Draws are the same at
    each evaluation, so differences come from the model.

    Examples:
        >>> def logits(model, batch):
        ...     return model(batch["tokens"])
        >>> Samples([[1, 2, 3]], logits=logits).num_rows
        1
    """

    adds_metrics = ()

    def __init__(
        self,
        prompts: Sequence[Any],
        tokenizer: Any = None,
        *,
        logits: Logits | None = None,
        num_tokens: int = 32,
        temperatures: Sequence[float] = (0.0,),
        seed: int = 0,
        stop: Collection[int] | None = None,
        every: int | None = None,
        show: bool = True,
        params: Literal["trained", "ema"] = "trained",
    ):
        """Continues nothing yet.

        Args:
            prompts: The prompts, each a text, a list of messages (dicts with "role" and "content"),
                rendered as a question in the tokenizer's own chat template, or token ids; for a
                `models.Decoder` also the mappings of `data.image_prompts`.
            tokenizer: A Transformers tokenizer, or any object with `encode(text)` and
                `decode(ids)`; None if prompts are ids, which are then shown as numbers.
            logits: Function ``(model, batch)`` that returns the logits of ``batch["tokens"]``
                (rows, length), which is padded after ``batch["last"]`` (rows,), the place of each
                row's last token: (rows, length, vocabulary), or only those at `last`, (rows,
                vocabulary). No token may attend to later ones. None for a `models.Decoder`.
            num_tokens: Maximum number of tokens of a continuation.
            temperatures: Divisors of the logits before a token is drawn; 0 takes the most likely
                one. Each prompt is continued at each of them.
            seed: Seed of the draws.
            stop: Ids of tokens that end a continuation; None for the tokenizer's end-of-text token,
                the ends of turns that the run learns and, with a `models.Decoder`, the ones that
                its checkpoint names.
            every: Number of steps between samples; None for each evaluation.
            show: Whether to print the samples.
            params: "ema" for the averages that a run with `ema_decay` keeps of its parameters.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If there is no prompt or one has no token, texts lack a tokenizer, or a
                number is out of range.
        """
        check_prompts(prompts, tokenizer)
        if logits is not None and not callable(logits):
            raise TypeError(checks.refused("logits", "a function (model, batch)", logits))
        if isinstance(temperatures, str) or not isinstance(temperatures, Sequence):
            raise TypeError(checks.refused("temperatures", "a sequence of numbers", temperatures))
        self._tokenizer = tokenizer
        rates = [checks.number("temperatures", x, least=0) for x in temperatures]
        opened = [
            (shown_prompt(prompt, tokenizer), *ids_and_images(prompt, tokenizer))
            for prompt in prompts
        ]
        if logits is not None and any(images for *_, images in opened):
            raise ValueError("`prompts` have images, which `logits` doesn't get: leave it out")
        given: list[tuple[str, Any]] = [
            (text, {"tokens": ids, **images} if images else ids) for text, ids, images in opened
        ]
        self._rows = [(text, row, rate) for text, row in given for rate in rates]
        if not self._rows:
            empty = "temperatures" if prompts else "prompts"
            raise ValueError(f"`{empty}` must not be empty")
        self._num_tokens = checks.integer("num_tokens", num_tokens)
        self._seed = checks.integer("seed", seed, least=0, most=2**32 - 1)
        self._every = None if every is None else checks.integer("every", every)
        self._show = checks.boolean("show", show)
        checks.word("params", params, ("trained", "ema"))
        self._params: Literal["trained", "ema"] = params
        self._stop, self._has_stop = _stop(stop, tokenizer), stop is not None
        self._next_tokens = None if logits is None else next_tokens_by(logits)

    @property
    def num_rows(self) -> int:
        """Number of continuations: one for each prompt and temperature."""
        return len(self._rows)

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Continues the prompts if this is due, and adds the samples to the record."""
        evaluated = any(name.startswith(_EVAL_PREFIX) for name in record)
        due = evaluated if self._every is None else record["step"] % self._every == 0
        if due:
            record["samples"] = self.draw(trainer)
            if self._show and trainer.processes.is_first:
                shown = [_printed(sample) for sample in record["samples"]]
                tqdm.write("\n".join([f"samples after step {trainer.num_steps}", *shown]))

    def draw(self, trainer: Trainer) -> list[dict[str, Any]]:
        """Continues the prompts with the trainer's model, during a run or after it.

        If several processes share a run, all must call this with the same prompts.

        Args:
            trainer: The trainer.

        Returns:
            A dict for each prompt and temperature, in this order, with "prompt" and "text", as
            texts, and "temperature". Texts are without special tokens, as in `models.generate`.

        Raises:
            TypeError: If the model is not a `models.Decoder` and `logits` is None.
            ValueError: If `logits` returns an array with a wrong shape.
        """
        if self._next_tokens is None:
            if not isinstance(trainer.compute_copy(self._params).model, models.Decoder):
                allowed = (
                    "a function (model, batch) -> logits for a model that is no models.Decoder"
                )
                raise TypeError(checks.refused("logits", allowed, None))
            return self._generated(trainer)
        lengths = np.array([len(row) for _, row, _ in self._rows], np.int32)
        tokens = np.zeros((self.num_rows, lengths.max() + self._num_tokens), np.int32)
        for row, (_, ids, _) in zip(tokens, self._rows, strict=True):
            row[: len(ids)] = ids
        rates = np.array([rate for *_, rate in self._rows], np.float32)
        stop = self._stop if self._has_stop else [*self._stop, *trainer.end_tokens]
        rng, ends = np.random.default_rng(self._seed), lengths.copy()
        going = np.ones(self.num_rows, bool)
        for _ in range(self._num_tokens):
            batch = {
                "tokens": tokens,
                "last": ends - 1,
                "temperatures": rates,
                # One draw for each row, even if the row has ended, so that a row's draws don't
                # depend on the rest.
                "draws": rng.random(self.num_rows, np.float32),
            }
            found = trainer.predict([batch], self._next_tokens, params=self._params).tolist()
            # All processes go on with the first one's tokens; their own may be rounded differently.
            chosen = np.array(trainer.processes.gather("the next tokens", found)[0], np.int32)
            going &= ~np.isin(chosen, stop)
            if not going.any():
                break
            # A new array, because the device may still be reading the previous one.
            tokens = tokens.copy()
            tokens[going, ends[going]] = chosen[going]
            ends = ends + going
        return [
            {"prompt": text, "temperature": rate, "text": self._decoded(row[start:end])}
            for (text, _, rate), row, start, end in zip(
                self._rows, tokens, lengths, ends, strict=True
            )
        ]

    def _generated(self, trainer: Trainer) -> list[dict[str, Any]]:
        """The continuations by a decoder, which keeps its caches from token to token."""
        texts: dict[int, str] = {}
        given: Any = {"tokenizer": self._tokenizer, "params": self._params}
        with models.Generator(trainer, **given) as generator:
            for rate in dict.fromkeys(rate for *_, rate in self._rows):
                numbers = [i for i, (*_, own) in enumerate(self._rows) if own == rate]
                found = generator.generate(
                    [self._rows[i][1] for i in numbers],
                    max_tokens=self._num_tokens,
                    temperature=rate,
                    stop=self._stop if self._has_stop else None,
                    seed=self._seed,
                )
                texts |= {i: one.text for i, one in zip(numbers, found, strict=True)}
        return [
            {"prompt": text, "temperature": rate, "text": texts[i]}
            for i, (text, _, rate) in enumerate(self._rows)
        ]

    def _decoded(self, ids: np.ndarray) -> str:
        return shown_answer(ids.tolist(), self._tokenizer)


def _stop(stop: Any, tokenizer: Any) -> list[int]:
    """The ids that end a continuation."""
    if stop is None:
        end = getattr(tokenizer, "eos_token_id", None)
        return [] if end is None else [int(end)]
    if isinstance(stop, str) or not isinstance(stop, Collection):
        raise TypeError(checks.refused("stop", "a collection of token ids", stop))
    return [checks.integer("stop", i, least=0) for i in stop]


def _printed(sample: Mapping[str, Any]) -> str:
    text = f"{sample['prompt']}▸{sample['text']}".replace("\n", "\n    ")
    return f"  at temperature {sample['temperature']:g}\n    {text}"
