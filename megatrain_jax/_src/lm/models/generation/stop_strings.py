"""Stop strings: the end of a completion, and its text up to there."""

import bisect
from collections.abc import Sequence
from typing import Any

from megatrain_jax._src.lm.common.prompts import shown_answer
from megatrain_jax._src.lm.models.generation.batching import OpenText


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
