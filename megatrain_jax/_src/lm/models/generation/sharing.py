"""Texts that the processes of a run write together: each writes a share, and all get all of them.

If weights are streamed, each pass over the layers gathers them from all processes. So a process
that has written its texts goes on passing over the layers until all have:

    process 0                           process 1, with longer texts
    goes_on(True), a pass               goes_on(True), a pass
    goes_on(False), a pass for nothing  goes_on(True), a pass
    goes_on(False)                      goes_on(False)              both are done
"""

import base64
import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

_Value = TypeVar("_Value")
# Characters of a message to the other processes.
_MESSAGE = 2**20


class Sharing:
    """The processes that write texts together.

    Attributes:
        count: Number of processes.
    """

    def __init__(self, processes: Any = None):
        """Makes the record of the processes.

        Args:
            processes: `Trainer.processes`; None for this process alone.
        """
        self._processes = processes
        self.count: int = 1 if processes is None else processes.count

    def least(self, number: float) -> float:
        """The least of all processes' numbers."""
        return number if self.count == 1 else min(self._gather("the memory to generate in", number))

    def check_equal(self, given: Any) -> None:
        """Checks that all processes write the same texts.

        Raises:
            ValueError: If what they were given differs.
        """
        if self.count == 1:
            return
        digest = hashlib.sha256(repr(given).encode()).hexdigest()
        if len(set(self._gather("the texts to generate", digest))) > 1:
            raise ValueError(
                "`prompts` and all other arguments must be the same in each process of the run, "
                "but differ"
            )

    def own(self, values: Sequence[_Value]) -> list[_Value]:
        """This process's share of values; neighbours, which may be of one prompt, stay together."""
        if self.count == 1:
            return list(values)
        size, index = -(-len(values) // self.count), self._processes.index
        return list(values[index * size : (index + 1) * size])

    def goes_on(self, has_texts: bool) -> bool:
        """Whether a process still has texts to write; each has to ask before each pass."""
        if self.count == 1:
            return has_texts
        return any(self._gather("the next tokens", has_texts))

    def joined(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The concatenations of all processes' arrays along the first axis, in order."""
        if self.count == 1:
            return list(arrays)
        parts = [self._bytes_of_all(array) for array in arrays]
        return [
            np.concatenate([np.frombuffer(x, a.dtype).reshape(-1, *a.shape[1:]) for x in part])
            for a, part in zip(arrays, parts, strict=True)
        ]

    def _bytes_of_all(self, array: np.ndarray) -> list[bytes]:
        text = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        most = max(self._gather("the length of texts", len(text)))
        pieces = [
            self._gather("generated texts", text[at : at + _MESSAGE])
            for at in range(0, most, _MESSAGE)
        ]
        return [base64.b64decode("".join(piece[i] for piece in pieces)) for i in range(self.count)]

    def _gather(self, where: str, value: Any) -> list[Any]:
        return self._processes.gather(where, value)
