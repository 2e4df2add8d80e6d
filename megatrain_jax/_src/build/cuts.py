"""Cuts of models and optimizers that runs share which differ in budget, machine or form alone."""

from collections.abc import Callable, Hashable
from typing import Any

from megatrain_jax._src.adapt.adapters import AdaptedModel
from megatrain_jax._src.build.cut import Cut
from megatrain_jax._src.build.options import Options
from megatrain_jax._src.program.loss.trace import TracedLoss


class Cuts:
    """The models adapted, and the losses and optimizers traced and cut, for several plans.

    Tracing takes most of the time of a plan. What is given is known again as an object, so that a
    cache must not outlive the call that it was given for: functions may read other globals later.
    """

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._known: dict[Hashable, tuple[Any, Any]] = {}

    def adapted(self, given: tuple[Any, ...], adapt: Callable[[], AdaptedModel]) -> AdaptedModel:
        """Returns a model as adapted before, or else now.

        Args:
            given: All that it depends on: numbers, and objects of the user.
            adapt: Function that adapts it.
        """
        return self._find("adapted", given, (), adapt)

    def cut(
        self,
        given: tuple[Any, ...],
        options: Options,
        cut: Callable[[], tuple[TracedLoss, Cut]],
    ) -> tuple[TracedLoss, Cut]:
        """Returns a loss and an optimizer as traced and cut before, or else now.

        Args:
            given: The adapted model, loss, optimizer and batch.
            options: Options of the run, of which only some matter here: what the host holds, and
                in which form, is laid out later.
            cut: Function that traces and cuts.
        """
        precision = options.precision
        numbers = (
            options.microbatches,
            options.num_devices,
            options.on_nonfinite,
            str(precision.compute),
            str(precision.update),
        )
        return self._find("cut", (*given, options.trainable), numbers, cut)

    def _find(
        self, kind: str, given: tuple[Any, ...], numbers: Hashable, make: Callable[[], Any]
    ) -> Any:
        key = (kind, *map(id, given), numbers)
        if key not in self._known:
            self._known[key] = make(), given  # held, so that no other object gets its id
        return self._known[key][0]
