"""Stop texts of completions, and the text of a completion up to its end."""

import bisect
from collections.abc import Sequence
from typing import Any

from megatrain_jax._src.common.prompts import shown_answer
from megatrain_jax._src.models.generation.batching import OpenText


class StopStrings:
    """Stop texts. They may contain special tokens, which completions don't show."""

    def __init__(self, tokenizer: Any, ends: Sequence[str]):
        """Keeps both.

        Args:
            tokenizer: The tokenizer; None if there are no texts.
            ends: The texts.
        """
        self._tokenizer, self._ends = tokenizer, ends

    def num_kept(self, text: OpenText) -> int | None:
        """Returns the fewest tokens that complete one of the texts; None if none is complete."""
        if not self._ends:
            return None
        ids = text.ids[text.start :]
        if not self._has_end(ids):
            return None
        counts = range(1, len(ids))
        return 1 + bisect.bisect_left(counts, True, key=lambda count: self._has_end(ids[:count]))

    def words(self, text: OpenText) -> str:
        """Returns the text written so far, without special tokens and the stop text."""
        ids = text.ids[text.start :]
        if not text.is_cut:
            shown = ids[:-1] if text.finish == "stop" else ids
            return shown_answer(shown, self._tokenizer)
        whole = self._tokenizer.decode(ids)
        before = min((whole.split(end)[0] for end in self._ends), key=len)
        # The tokens before the stop text, and the part before it of the token in which it starts.
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
