"""A tokenizer: loaded without running code, its special tokens, and its model's vocabulary."""

import re
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32
from tokenizers import Encoding
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from megatrain_jax._src.common.outside import integer
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.lm.common.hf_folder import read_all_json, read_json
from megatrain_jax._src.lm.common.hub import TOKENIZER_FILES, folder_or_download
from megatrain_jax._src.lm.data.report import DataError, InvalidRow
from megatrain_jax._src.lm.data.row_formats import Conversation
from megatrain_jax._src.lm.data.turns import THOUGHTS


def load_tokenizer(given: Any, argument: str = "tokenizer") -> Any:
    """Loads the tokenizer in a folder on disk, as `AutoTokenizer` does.

    No code in the folder is run.

    Args:
        given: The argument `tokenizer`: the folder, or the name of a Hugging Face Hub model.
        argument: Name of the argument, for errors.

    Returns:
        A Transformers tokenizer.

    Raises:
        FileNotFoundError: If there is no such folder, and it can't be downloaded.
        ValueError: If one of its files is damaged or not regular, or Transformers can't load it.
    """
    folder = folder_or_download(argument, given, "a tokenizer (tokenizer.json)", TOKENIZER_FILES)
    values = read_all_json(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder),
            config=_config(values.get("config.json", {})),
            local_files_only=True,
            trust_remote_code=False,
        )
        tokenizer("a")  # some options are read only here
    except Exception as error:  # Transformers' errors for damaged files have no common type
        why = f"Transformers can't load it: {type(error).__name__}: {str(error)[:500]}"
        if "auto_map" in values.get("tokenizer_config.json", {}):
            why = (
                "it asks for code of its own (`auto_map` in tokenizer_config.json), which isn't run"
            )
        raise ValueError(
            f"`{argument}` = {folder}: {why}. A {argument} that you loaded may be passed in place "
            "of its folder"
        ) from error
    return tokenizer


def _config(values: dict[str, Any]) -> PreTrainedConfig:
    """The model's configuration reduced to its type, which determines the tokenizer's class.

    Untrusted numbers are left out: Transformers would list a model's layers, however many.
    """
    kept = {
        key: values[key] for key in ("model_name", "model_type", "tokenizer_class") if key in values
    }
    if kept.get("model_type") == "mistral" and "layer_types" in values:
        kept["model_type"] = "ministral"  # as in AutoConfig
    try:
        return AutoConfig.for_model(**kept)
    except Exception:
        return PreTrainedConfig.from_dict(kept)


_TOKENS_SHOWN = 3


class BeyondVocabulary(InvalidRow):
    """A row with a token that has no embedding in the model."""


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


class FastTokenizer:
    """A fast Transformers tokenizer, with helpers for its special tokens.

    Attributes:
        tokenizer: The tokenizer.
        name: The tokenizer's name in errors.
        config: Path of the configuration of the model in its folder.
        vocabulary: Upper bound of ids: the size of that model's vocabulary; None without one.
    """

    def __init__(self, tokenizer: Any):
        """Takes a tokenizer, or loads one from a folder.

        Raises:
            TypeError: If it is not a fast tokenizer.
            FileNotFoundError: See `load_tokenizer`.
            ValueError: See `load_tokenizer`; or a token's id doesn't fit int32.
        """
        if isinstance(tokenizer, str | PathLike):
            tokenizer = load_tokenizer(tokenizer)
        if not getattr(tokenizer, "is_fast", False):
            raise TypeError(
                "`tokenizer` must be the folder of one, or a fast tokenizer of Transformers (one "
                f"that has a tokenizer.json), but is of type {type(tokenizer).__name__}"
            )
        self.tokenizer = tokenizer
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        integer(self.name, "id of a token", max(tokenizer.get_vocab().values(), default=0))
        self.config = Path(tokenizer.name_or_path) / "config.json"
        self.vocabulary = _size(self.config) if tokenizer.name_or_path else None
        added = {token: str(entry) for token, entry in tokenizer.added_tokens_decoder.items()}
        special = {t for t, entry in tokenizer.added_tokens_decoder.items() if entry.special}
        # In addition to tokens marked special, the tokenizer's own by role, such as end of text.
        special.update(tokenizer.all_special_ids)
        names = [added.get(token, "") for token in special] + list(tokenizer.all_special_tokens)
        # Longest first, because a pattern takes its first matching alternative.
        names = sorted({name for name in names if name}, key=len, reverse=True)
        self._special, self._names = special, tuple(names)
        self._written = re.compile("|".join(map(re.escape, names))) if names else None
        self._is_space: dict[int, bool] = {}

    def encode(self, texts: list[str]) -> list[Encoding]:
        """Tokenises texts, in which special tokens may be spelled out; adds none."""
        return self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        ).encodings

    def fault(self, ids: Int32[np.ndarray, " n"]) -> BeyondVocabulary | None:
        """The fault of a text's tokens, if one is beyond the vocabulary."""
        if self.vocabulary is None or not len(ids) or ids.max() < self.vocabulary:
            return None
        beyond = ids[ids >= self.vocabulary]
        token = self.tokenizer.convert_ids_to_tokens(int(beyond[0]))
        # An id that does not come from the tokenizer may be unknown to it.
        first = f"id {beyond[0]}" if token is None else f"{token!r} ({beyond[0]})"
        return BeyondVocabulary(
            f"a token beyond the {self.vocabulary:,} of {self.config}",
            f"{len(beyond):,} of {len(ids):,}, the first {first}",
        )

    def check_written(self, conversation: Conversation) -> None:
        """Checks that no message spells out a special token, such as the end of a turn.

        Raises:
            InvalidRow: If one does: it would become that token.
        """
        if self._written is None:
            return
        for number, message in enumerate(conversation.messages, 1):
            for field in ("content", *THOUGHTS):
                # Otherwise anyone writing in a chat could end their turn and speak as the
                # assistant.
                found = self._written.search(message.get(field) or "")
                if found:
                    raise InvalidRow(
                        "a special token of the tokenizer is spelled out",
                        f"{found[0]!r} in message {number}",
                    )

    def end_of_turn(self, ids: Int32[np.ndarray, " n"], start: int, stop: int) -> int | None:
        """The end of the turn in ``ids[start:stop]``, including its end-of-turn token.

        Trailing whitespace is left to the template; an end token right after the turn belongs to
        it.

        Returns:
            The end, or None if the turn has no such token.
        """
        end = stop
        while end > start and self._space(int(ids[end - 1])):
            end -= 1
        if end > start and int(ids[end - 1]) in self._special:
            return end
        if stop < len(ids) and int(ids[stop]) in self._special:
            return stop + 1
        return None

    def ends_turn(self, text: str, start: int, stop: int) -> bool:
        """Whether the turn in ``text[start:stop]`` has an end-of-turn token; see `end_of_turn`."""
        return text[start:stop].rstrip().endswith(self._names) or text.startswith(self._names, stop)

    def up_to_special(self, text: str) -> str:
        """A text's beginning up to its first special token; empty if there is text before it."""
        found = self._written and self._written.search(text)
        return text[: found.end()] if found and not text[: found.start()].strip() else ""

    def has_words(self, ids: Int32[np.ndarray, " n"]) -> bool:
        """Whether there is more than special tokens and whitespace among some tokens."""
        return any(i not in self._special and not self._space(i) for i in ids.tolist())

    def ends_of_text(self) -> tuple[Int32[np.ndarray, " first"], Int32[np.ndarray, " last"]]:
        """The tokens before and after a plain text, at most one each.

        Raises:
            DataError: If the tokenizer has no end-of-text token.
        """
        tokenizer = self.tokenizer
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokenizer {self.name} has no `eos_token`, which has to stand between texts; "
                "set `tokenizer.eos_token`"
            )
        first = tokenizer("a").input_ids[:1]
        # A tokenizer may have a beginning token without adding it to texts; a call shows the
        # behaviour.
        starts = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
        begin = np.array(first if starts else [], np.int32)
        return begin, np.array([tokenizer.eos_token_id], np.int32)

    def _space(self, token: int) -> bool:
        if token not in self._is_space:
            text = "" if token in self._special else self.tokenizer.decode([token])
            self._is_space[token] = bool(text) and text.isspace()
        return self._is_space[token]


def load_fast_tokenizer(tokenizer: Any) -> FastTokenizer:
    """Takes or loads a tokenizer, and warns of tokens beyond the vocabulary of its model.

    Raises:
        TypeError: If it is not a fast tokenizer.
        FileNotFoundError: See `load_tokenizer`.
        ValueError: See `load_tokenizer`.
    """
    tokens = FastTokenizer(tokenizer)
    # Models with more rows than the tokenizer has tokens are common and fine.
    ids, size = tokens.tokenizer.get_vocab(), tokens.vocabulary
    beyond = [] if size is None else sorted((ids[one], one) for one in ids if ids[one] >= size)
    # Only a warning, because the data may contain none of them.
    if beyond:
        shown = ", ".join(repr(one) for _, one in beyond[:_TOKENS_SHOWN])
        warn_user(
            f"the tokenizer has {len(beyond):,} tokens ({shown}"
            f"{', ...' if len(beyond) > _TOKENS_SHOWN else ''}) beyond the {size:,} of "
            f"{tokens.config}; rows that have one can't be used",
        )
    return tokens
