"""Grows the vocabulary of a checkpoint: new rows of its embedding and its head."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.pretrained import Pretrained, with_config

# Variance of new rows around the mean, in units of the old rows' covariance, as in Transformers.
_VARIANCE = 1e-9
_ROWS = 4096


def resize_vocabulary(pretrained: Pretrained, vocabulary: Any, *, seed: int = 0) -> Pretrained:
    """Returns a checkpoint with more rows in its embedding and in its head, for new tokens.

    The new rows are drawn around the mean of the old rows, with a billionth of their covariance, as
    by Transformers' `resize_token_embeddings`. A tied head stays tied. `save_pretrained` writes
    the new size into `config.json`; pass it the folder of the new tokenizer as `source`.

    Args:
        pretrained: The checkpoint.
        vocabulary: The number of rows, at least as many as now; or a tokenizer with the new tokens,
            for as many rows as its largest id needs, and never fewer than now.
        seed: Seed of the new rows.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If the number is smaller than now, or the family has further embeddings.
    """
    if not isinstance(pretrained, Pretrained):
        raise TypeError(checks.refused("pretrained", "from models.load_pretrained", pretrained))
    old, seed = pretrained.config.vocab_size, checks.integer("seed", seed, least=0)
    if hasattr(vocabulary, "get_vocab"):
        size = max(old, 1 + max(vocabulary.get_vocab().values()))
    else:
        size = checks.integer("vocabulary", vocabulary, least=old, other="or a tokenizer")
    if size == old:
        return pretrained
    if "embed_tokens_per_layer" in pretrained.params:
        raise ValueError(
            f"`pretrained` is a {pretrained.config.family}, which has more embeddings than that of "
            "its inputs: its vocabulary can't grow"
        )
    params = dict(pretrained.params)
    for name in ("embed_tokens", "lm_head"):
        if name in params:
            # The head gets rows of its own, not the embedding's draws.
            draws = np.random.SeedSequence([seed, name == "lm_head"])
            module: Mapping[str, Any] = params[name]
            params[name] = {key: ResizedArray(array, size, draws) for key, array in module.items()}
    original = pretrained.config.original
    if original is not None:
        values = json.loads(original)
        values.get("text_config", values)["vocab_size"] = size
        original = json.dumps(values)
    config = replace(pretrained.config, vocab_size=size, original=original)
    return with_config(replace(pretrained, params=params), config)


class ResizedArray:
    """A matrix or vector with new rows, computed when it is converted to an array.

    Attributes:
        shape: Its shape.
        dtype: The dtype of the old rows.
        source_files: Paths of the files with the old rows, which a run may read ahead.
    """

    def __init__(self, old: Any, size: int, draws: np.random.SeedSequence):
        """Refers to the old rows."""
        self._old, self._draws = old, draws
        self.shape, self.dtype = (size, *old.shape[1:]), np.dtype(old.dtype)
        self.source_files = getattr(old, "source_files", ())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the old rows and draws the new ones; nothing is kept here."""
        if copy is False:
            raise ValueError("a resized array can't be had without making it")
        old = np.asarray(self._old)
        new = _new_rows(old, self.shape[0] - len(old), np.random.default_rng(self._draws))
        whole = np.concatenate([old, new.astype(self.dtype)])
        return whole if dtype is None else whole.astype(dtype, copy=False)


def _new_rows(old: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows around the mean of the old ones, (count, *axes), in fp32."""
    starts = range(0, len(old), _ROWS)
    total = np.zeros(old.shape[1:])
    for at in starts:
        total += old[at : at + _ROWS].astype(np.float32).sum(0, dtype=np.float64)
    mean = total / len(old)
    new = np.zeros((count, *old.shape[1:]))
    for at in starts:
        rows = old[at : at + _ROWS].astype(np.float32) - mean.astype(np.float32)
        # Random combinations of centred rows have the rows' covariance; its matrix is never formed.
        new += np.tensordot(rng.standard_normal((count, len(rows)), np.float32), rows, 1)
    return (mean + (_VARIANCE / len(old)) ** 0.5 * new).astype(np.float32)
