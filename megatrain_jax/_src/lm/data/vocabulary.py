"""Checks that the model beside a tokenizer has an embedding row for each of its ids."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.lm.common.hf_folder import read_json
from megatrain_jax._src.lm.data.report import InvalidRow

_TOKENS_SHOWN = 3


class BeyondVocabulary(InvalidRow):
    """A row with a token that has no embedding in the model."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The vocabulary of the model in the tokenizer's folder.

    Attributes:
        tokenizer: The tokenizer.
        size: Upper bound of ids; None if the folder has no model.
        config: Path of the configuration with this size.
    """

    tokenizer: Any
    size: int | None
    config: Path

    @classmethod
    def beside(cls, tokenizer: Any) -> "Vocabulary":
        """Reads the `config.json` in the tokenizer's folder."""
        config = Path(tokenizer.name_or_path) / "config.json"
        size = _size(config) if tokenizer.name_or_path else None
        return cls(tokenizer=tokenizer, size=size, config=config)

    def warn(self) -> None:
        """Warns of tokens beyond the vocabulary; the data may or may not contain them.

        Models with more rows than the tokenizer has tokens are common and fine.
        """
        if self.size is None:
            return
        ids = self.tokenizer.get_vocab()
        beyond = sorted((token for token in ids if ids[token] >= self.size), key=ids.__getitem__)
        # Only a warning, because the data may contain none of them.
        if beyond:
            shown = ", ".join(map(repr, beyond[:_TOKENS_SHOWN]))
            warn_user(
                f"the tokenizer has {len(beyond):,} tokens ({shown}"
                f"{', ...' if len(beyond) > _TOKENS_SHOWN else ''}) beyond the {self.size:,} of "
                f"{self.config}; rows that have one can't be used",
            )

    def fault(self, ids: Int32[np.ndarray, " n"]) -> BeyondVocabulary | None:
        """The fault of a text's tokens, if one is beyond the vocabulary."""
        if self.size is None or not len(ids) or ids.max() < self.size:
            return None
        beyond = ids[ids >= self.size]
        token = self.tokenizer.convert_ids_to_tokens(int(beyond[0]))
        # An id that does not come from the tokenizer may be unknown to it.
        first = f"id {beyond[0]}" if token is None else f"{token!r} ({beyond[0]})"
        return BeyondVocabulary(
            f"a token beyond the {self.size:,} of {self.config}",
            f"{len(beyond):,} of {len(ids):,}, the first {first}",
        )


def _size(config: Path) -> int | None:
    try:
        values = read_json(config)
    except (OSError, ValueError):
        # A faulty configuration is reported when the model is loaded.
        return None
    text = values.get("text_config")  # in multimodal models
    for part in (values, text if isinstance(text, dict) else {}):
        size = part.get("vocab_size")
        if type(size) is int and size > 0:
            return size
    return None
