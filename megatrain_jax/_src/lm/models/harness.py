"""A run as a model of lm-evaluation-harness: streamed through the device, or on it if it fits."""

import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from megatrain_jax import Trainer
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import needing
from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.generation.generate import bucket, generate
from megatrain_jax._src.lm.models.generation.weight_source import open_source

# Maximum number of positions whose logits are on the device at a time.
_POSITIONS = 512
_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _scores(model: Decoder, batch: dict[str, Array]) -> tuple[Array, Array]:
    """Each row's log-probability of its labels, and whether all of them are the most likely ones.

    Args:
        model: The decoder.
        batch: `tokens`, `segments` and `labels`, (rows, length); negative labels don't count.
    """
    hidden, _ = model.hidden(batch["tokens"], None, batch["segments"])

    def one(at: tuple[Array, Array]) -> tuple[Array, Array]:
        """The same of one position of each row."""
        x, labels = at
        logits = model.logits_of(x[:, None])[:, 0].astype(jnp.float32)
        own = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        counts = labels >= 0
        logs = jnp.where(counts, own - jax.nn.logsumexp(logits, axis=-1), 0)
        return logs, ~counts | (labels == logits.argmax(axis=-1))

    columns = hidden.swapaxes(0, 1), batch["labels"].T
    logs, greedy = jax.lax.map(one, columns, batch_size=max(1, _POSITIONS // len(hidden)))
    return logs.sum(axis=0), greedy.all(axis=0)


class Harness:
    """The methods of `lm_eval_model`; lm-evaluation-harness calls them."""

    def __init__(self, trainer: Trainer, tokenizer: Any, batch_size: int, max_length: int):
        """Keeps the run."""
        super().__init__()
        self.tokenizer = tokenizer
        self._trainer, self._batch_size, self._max_length = trainer, batch_size, max_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        """A name for caches of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        """Returns messages as a text."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Returns a text's tokens; a first token that it has already is not added again."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probabilities of continuations after contexts, both as tokens."""
        longest, rows = self._max_length, []
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= longest:
                allowed = f"at least the {len(continuation)} tokens of each continuation"
                raise ValueError(checks.refused("max_length", allowed, longest))
            text = [*context, *continuation][-longest - 1 :]
            unscored = len(text) - 1 - len(continuation)
            rows.append((text[:-1], [-1] * unscored + text[1 + unscored :]))
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        batches, size = [], self._batch_size
        for first in range(0, len(order), size):
            chosen = [rows[i] for i in order[first : first + size]]
            shape = size, bucket(len(chosen[0][0]))
            batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments")}
            batch["labels"] = np.full(shape, -1, np.int32)
            for row, (tokens, labels) in enumerate(chosen):
                there = slice(len(tokens))
                batch["tokens"][row, there], batch["labels"][row, there] = tokens, labels
                batch["segments"][row, there] = 1
            batches.append(batch)
        if not batches:
            return []
        logs, greedy = self._trainer.predict(batches, _scores)
        found: list[Any] = [None] * len(rows)
        for at, i in enumerate(order):
            found[i] = float(logs[at]), bool(greedy[at])
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, in windows of at most `max_length` tokens."""
        utils = importlib.import_module("lm_eval.utils")
        owners, windows = [], []
        for number, request in enumerate(requests):
            each = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            for window in map(utils.make_disjoint_window, each):
                owners.append(number)
                windows.append((None, *window))
        totals = [0.0] * len(requests)
        for owner, (log, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += log
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Continues texts up to stop strings, by `generate`."""
        normalize = importlib.import_module("lm_eval.models.utils").normalize_gen_kwargs
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        ends = {self.eot_token_id, *open_source(self._trainer).end_tokens}
        found = [""] * len(requests)
        for numbers in groups.values():
            options: dict[str, Any] = dict(normalize(requests[numbers[0]].args[1]))
            until, most = options.pop("until"), options.pop("max_gen_toks")
            del options["do_sample"]  # otherwise `temperature` is 0
            if other := options.keys() - set(_OPTIONS):
                raise ValueError(f"generation has no {', '.join(sorted(other))}")
            room = self._max_length - most
            if room < 1:
                allowed = f"more than the {most} tokens to generate"
                raise ValueError(checks.refused("max_length", allowed, self._max_length))
            texts = generate(
                self._trainer,
                [self.tok_encode(requests[i].args[0])[-room:] for i in numbers],
                tokenizer=self.tokenizer,
                max_tokens=most,
                stop=[*filter(None, until), *ends],
                **options,
            )
            for i, one in zip(numbers, texts, strict=True):
                found[i] = one.text
        return found


def lm_eval_model(
    trainer: Trainer, tokenizer: Any, *, batch_size: int = 16, max_length: int = 2048
) -> Any:
    """A run's model for lm-evaluation-harness: `lm_eval.simple_evaluate(model=...)`.

    Log-likelihoods are computed by `Trainer.predict`, so the model is streamed through the device
    and may be larger than it; texts are written by `generate`.

    Args:
        trainer: A trainer of a `Decoder`; its current parameters are evaluated.
        tokenizer: Its tokenizer, of Transformers.
        batch_size: Number of texts that are scored at a time. More make streaming efficient.
        max_length: Maximum number of tokens of a text; longer contexts lose their beginnings.

    Returns:
        An `lm_eval.api.model.TemplateLM`.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a number is below 1.
        ImportError: If lm_eval is not installed.
    """
    checks.instance("trainer", trainer, Trainer, "a Trainer")
    numbers = checks.integer("batch_size", batch_size), checks.integer("max_length", max_length)
    with needing("models.lm_eval_model needs lm-evaluation-harness: pip install lm_eval"):
        template = importlib.import_module("lm_eval.api.model").TemplateLM
    return type("StreamedLM", (Harness, template), {})(trainer, tokenizer, *numbers)
