"""The tasks that the device may not be through with, and the wait for one of them."""

import jax


class Dispatched:
    """The tasks that were dispatched and have not been waited for.

    Of each it holds one result, which is there when the task is over::

        dispatched.note_stage(3, cotangent)    # the stage of task 3 will have computed it,
        dispatched.note(3, norm)               # and what follows it in the task this one
        dispatched.wait_for_stage()            # blocks until `cotangent` is there
        dispatched.wait(3)                     # blocks until `norm` is there
    """

    def __init__(self):
        """Starts with no task."""
        self._results: dict[int, jax.Array | None] = {}
        self._of_stage: jax.Array | None = None

    def note(self, task: int, result: jax.Array | None) -> None:
        """Notes the last result of a task so far; None if it gives none."""
        self._results[task] = result

    def note_stage(self, task: int, result: jax.Array | None, *, hold: bool = True) -> None:
        """Notes a stage's result, as `note` does, until the next one's.

        Args:
            task: The stage's task.
            result: See `note`.
            hold: Whether it may be held for that long; not a gradient, which an update frees.
        """
        self.note(task, result)
        self._of_stage = result if hold else None

    def wait(self, task: int) -> None:
        """Blocks until the device is through with a task, and with those before it."""
        result = self._results.get(task)
        if result is not None and result.is_deleted():
            # A later kernel has taken its memory over: that one's results tell of this one, too.
            later = (x for i, x in self._results.items() if i > task and x is not None)
            result = next((x for x in later if not x.is_deleted()), None)
        if result is not None:
            result.block_until_ready()
        # The device works in order: what came before this task is over, too.
        self._results = {i: x for i, x in self._results.items() if i > task}

    def wait_for_stage(self) -> None:
        """Blocks until the device is through with the last stage; what follows it may go on."""
        if self._of_stage is None or self._of_stage.is_deleted():  # a later kernel has its memory
            self.wait_for_all()
        else:
            self._of_stage.block_until_ready()

    def forget_stage(self) -> None:
        """Lets the next `wait_for_stage` wait for all, unless a stage is noted before."""
        self._of_stage = None

    def wait_for_all(self) -> None:
        """Blocks until the device is through with all that was noted."""
        live = (x for x in reversed(self._results.values()) if x is not None and not x.is_deleted())
        if (last := next(live, None)) is not None:
            last.block_until_ready()
        self.clear()

    def clear(self) -> None:
        """Forgets all tasks."""
        self._results.clear()
        self._of_stage = None
