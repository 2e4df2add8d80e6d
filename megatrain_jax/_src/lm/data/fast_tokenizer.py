"""A tokenizer, with helpers for its special tokens."""

import re
from os import PathLike
from typing import Any

import numpy as np
from jaxtyping import Int32
from tokenizers import Encoding

from megatrain_jax._src.common.outside import integer
from megatrain_jax._src.lm.data.report import DataError, InvalidRow
from megatrain_jax._src.lm.data.row_formats import Conversation
from megatrain_jax._src.lm.data.tokenizer import load_tokenizer
from megatrain_jax._src.lm.data.turns import THOUGHTS
from megatrain_jax._src.lm.data.vocabulary import Vocabulary


class FastTokenizer:
    """A fast Transformers tokenizer, with helpers for its special tokens.

    Attributes:
        tokenizer: The tokenizer.
        name: The tokenizer's name in errors.
        vocabulary: The vocabulary of the model in its folder.
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
        self.vocabulary = Vocabulary.beside(tokenizer)
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
    tokens.vocabulary.warn()
    return tokens
