"""Dispatched tasks that the device may not have finished, and waiting for one of them."""

import jax


class Dispatched:
    """The tasks that were dispatched and have not been waited for.

    It holds one result per task, which is ready when the task is over::

        dispatched.note_stage(3, cotangent)    # computed by the stage of task 3
        dispatched.note(3, norm)               # computed by a later kernel of the task
        dispatched.wait_for_stage()            # blocks until `cotangent` is there
        dispatched.wait(3)                     # blocks until `norm` is there
    """

    def __init__(self):
        """Starts with no task."""
        self._results: dict[int, jax.Array | None] = {}
        self._stage_result: jax.Array | None = None

    def note(self, task: int, result: jax.Array | None) -> None:
        """Records a task's newest result; None if its kernel returns nothing."""
        self._results[task] = result

    def note_stage(self, task: int, result: jax.Array | None, *, hold: bool = True) -> None:
        """Records a stage's result like `note`, and keeps it until the next stage's result.

        Args:
            task: The stage's task.
            result: See `note`.
            hold: Whether it may be kept that long; False for a gradient, which an update frees.
        """
        self.note(task, result)
        self._stage_result = result if hold else None

    def wait(self, task: int) -> None:
        """Blocks until the device has finished a task, and all earlier ones."""
        result = self._results.get(task)
        if result is not None and result.is_deleted():
            # A later kernel has reused its memory, so that kernel's result is waited for instead.
            later = (x for i, x in self._results.items() if i > task and x is not None)
            result = next((x for x in later if not x.is_deleted()), None)
        if result is not None:
            result.block_until_ready()
        # The device works in order, so all earlier tasks are over too.
        self._results = {i: x for i, x in self._results.items() if i > task}

    def wait_for_stage(self) -> None:
        """Blocks until the device has finished the last stage; later work may continue."""
        if (
            self._stage_result is None or self._stage_result.is_deleted()
        ):  # a later kernel has its memory
            self.wait_for_all()
        else:
            self._stage_result.block_until_ready()

    def forget_stage(self) -> None:
        """Forgets the last stage: until one is recorded, `wait_for_stage` waits for all tasks."""
        self._stage_result = None

    def wait_for_all(self) -> None:
        """Blocks until the device has finished everything recorded."""
        live = (x for x in reversed(self._results.values()) if x is not None and not x.is_deleted())
        if (last := next(live, None)) is not None:
            last.block_until_ready()
        self.clear()

    def clear(self) -> None:
        """Forgets all tasks."""
        self._results.clear()
        self._stage_result = None
