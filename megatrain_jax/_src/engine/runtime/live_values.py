"""The values that a step's stages pass to each other, while it is dispatched.

None of this is state of the run: each step starts anew, and only its metrics outlive it. A value is
dropped after the last stage that reads it; a cotangent is removed by the stage that takes it.
"""

import dataclasses

import jax

from megatrain_jax._src.engine.spec.bound_step import BoundStep


@dataclasses.dataclass(kw_only=True)
class LiveValues:
    """Live values of a step; rows and cotangents have one entry per microbatch.

    Attributes:
        step: The step.
        rows: Values that stages pass on, by id, beginning with the prologue's. An activation is
            absent while it is in host memory.
        cotangents: Cotangents, by the ids of their values.
        rounded: Number of sums of gradients that were rounded so far, on the device.
        wave: The wave that is computed now.
        means: Loss and metrics, once they are known: means over the microbatches.
        scalars: The result of each group's *reduce*, once dispatched.
        squares: Squared norms of the groups' gradients.
        group_ok: Groups in the order of their gradients, each with `Store.ok` after its gradient.
    """

    step: BoundStep
    rows: list[dict[int, jax.Array]]
    cotangents: list[dict[int, jax.Array]]
    rounded: jax.Array
    wave: int = 0
    means: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    scalars: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    squares: list[jax.Array] = dataclasses.field(default_factory=list)
    group_ok: list[tuple[int, jax.Array]] = dataclasses.field(default_factory=list)

    @property
    def wave_rows(self) -> list[dict[int, jax.Array]]:
        """The rows of the wave's microbatches."""
        return self.rows[self._wave_slice]

    @property
    def wave_cotangents(self) -> list[dict[int, jax.Array]]:
        """The cotangents of the wave's microbatches."""
        return self.cotangents[self._wave_slice]

    @property
    def _wave_slice(self) -> slice:
        number = self.step.wave_microbatches
        return slice(self.wave * number, (self.wave + 1) * number)
