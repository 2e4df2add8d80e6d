"""The schedule of a step: its instructions, and the bytes and seconds that they take."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain_jax._src.common.keys import Key
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.schedule.instructions import Instruction
from megatrain_jax._src.engine.schedule.transient_host_bytes import TransientHostBytes


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule:
    """The instructions of each list that can be run, and the device bytes they need.

    The first step runs `cold`, each later one `steady`. After either, `flush` brings everything
    to rest: pending updates are applied, host copies are current, the device is empty, and the
    next step is cold again. `evaluation` runs at rest and ends at rest.

    Attributes:
        cold: A training step that starts at rest.
        steady: A training step that follows a training step.
        flush: The instructions after a training step that bring all to rest.
        evaluation: Every stage's FORWARD, from rest to rest.
        num_tasks: Number of tasks in a cold or steady step; resolves negative task numbers.
        ledger: For "cold", "steady", "flush" and "evaluation", the bytes on the device after each
            instruction. A part that is dropped or consumed counts until the WAIT or LAND for its
            task. Since steady steps and flushes have to be valid after any step, they may hold less
            than that, offload unchanged parts, and wait for tasks that left nothing.
        peak_bytes: The maximum of the ledgers.
        transient: Host bytes of training steps in addition to the state at rest, by part.
        evaluation_bytes: Host bytes of an evaluation in addition to the state at rest.
        resident: Parts that stay on the device: state between steps, and passing parts from their
            creation to their last use.
        kept: Stages that save residuals from forward to backward.
        selective: Whether residuals are only each stage's costliest results, instead of all.
        seconds: Estimate of a steady step's time.
        cautious_seconds: The same if copies take somewhat longer than the clock estimates.
        smallest_bytes: The smallest budget that never makes computation wait for memory.
        limit: Maximum bytes on the device.
        left_out: Number of waves that the lists omit, all equal to the second one; an engine gets
            them from `whole_schedule`.
    """

    cold: tuple[Instruction, ...]
    steady: tuple[Instruction, ...]
    flush: tuple[Instruction, ...]
    evaluation: tuple[Instruction, ...]
    num_tasks: int
    ledger: Mapping[str, tuple[int, ...]]
    peak_bytes: int
    transient: TransientHostBytes
    evaluation_bytes: int
    resident: frozenset[Key]
    kept: frozenset[int]
    selective: bool
    seconds: float
    cautious_seconds: float
    smallest_bytes: int
    limit: int
    left_out: int = 0

    @property
    def transient_bytes(self) -> int:
        """Host bytes of training steps in addition to the state at rest."""
        return self.transient.total

    def __repr__(self) -> str:
        """Returns a line of totals: a deep model's step has thousands of instructions."""
        return (
            f"Schedule(instructions: {len(self.steady)} of a steady step, {len(self.cold)} of a "
            f"cold one, {len(self.flush)} to flush, {len(self.evaluation)} to evaluate; at most "
            f"{sized(self.peak_bytes)} on the device; {self.seconds:.3g} s a step)"
        )


class BudgetError(ValueError):
    """A budget is too small for a step.

    Attributes:
        smallest: Bytes of the smallest budget that works.
    """

    def __init__(self, budget: int | None, smallest: int, reason: str = ""):
        """Makes the error, with a message that names the run's option, and a reason, if known."""
        given = "None" if budget is None else f"{budget} ({sized(budget)})"
        super().__init__(
            f"device_budget={given} is too small for this model, optimizer and precision; the "
            f"smallest that works is {smallest} bytes ({sized(smallest)}). Pass that or more, "
            '"minimum", or None for what the device has left; smaller or shorter batches, or more '
            "`microbatches`, need less" + (reason and f"; {reason}")
        )
        self.smallest = smallest
