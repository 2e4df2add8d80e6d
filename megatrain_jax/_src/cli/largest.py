"""The largest batch, context and model that fit a machine, found with few plans.

A plan of a deep model takes seconds, and nearly all of that is its depth. Whether the device has
room in the least budget hardly depends on it, so that is searched with a few layers. The plan of
the whole model then confirms what was found, or the search goes on below that.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatrain_jax import Plan
from megatrain_jax._src.cli.catalogue import KNOWN_MODELS
from megatrain_jax._src.cli.planner import Planner, config_of, rows_of
from megatrain_jax._src.common.sizes import sized
from megatrain_jax.models import DecoderConfig

# More than the longest period of layers that differ, of which Gemma 3 has six.
_LAYERS = 7
# Where a search begins, and the factor by which it goes up and down until it has both bounds.
_FIRST, _STEP = 16, 4
# Far above any batch, and any context in units of `_TOKENS`.
_MOST = 2**22
# A model may need so much less of the host for each parameter than the small one of the guess.
_SLACK = 1.15
# Contexts are multiples of this.
_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size that fits, and the plan that says so.

    Attributes:
        what: The word for what is as large as it can be: "batch", "context" or "model".
        model: Name of the model.
        rows: Rows of a batch.
        length: Tokens of a row.
        plan: The plan.
    """

    what: str
    model: str
    rows: int
    length: int
    plan: Plan

    def __str__(self) -> str:
        """Returns a line with sizes, rates and memory."""
        plan, seconds = self.plan, self.plan.seconds_per_step or 0.0
        rate = f"{self.rows * self.length / seconds:,.0f} tokens/s" if seconds else ""
        host = sized(plan.host_process_bytes or plan.host_peak_bytes)
        bound = "nothing in particular" if plan.bound == "neither" else plan.bound
        return (
            f"{self.what:8} {self.model}, {rows_of(self.rows, self.length)}: {rate}, {seconds:.3g} "
            f"s a step; {sized(plan.device_bytes)} of the GPU, {host} of the host; bound by {bound}"
        )


def largest_sizes(
    planner: Planner, name: str | None, config: DecoderConfig | None
) -> Iterator[Size]:
    """Gives the largest batch and context of a model that fit, then the largest known model.

    The batch has rows of the settings' length, the context is that of the fewest rows, and the
    model is planned with the fewest rows of the settings' length.
    """
    rows, length = planner.settings.least_rows, planner.settings.length
    if config is not None and name is not None:
        for what, shape in (
            ("batch", lambda n: (n * rows, length)),
            ("context", lambda n: (rows, n * _TOKENS)),
        ):
            found = _largest_of(planner, config, shape)
            if found is not None:
                number, plan = found
                at = shape(number)
                yield Size(what=what, model=name, rows=at[0], length=at[1], plan=plan)
    model = _largest_model(planner, rows, length)
    if model is not None:
        yield Size(what="model", model=model[0], rows=rows, length=length, plan=model[1])


def _largest_of(
    planner: Planner, config: DecoderConfig, shape: Callable[[int], tuple[int, int]]
) -> tuple[int, Plan] | None:
    few = shallow(config)
    number = largest(lambda n: bool(planner.plan(few, *shape(n), least=True).fits_device))
    return confirmed(lambda n: planner.plan(config, *shape(n)), number)


def _largest_model(planner: Planner, rows: int, length: int) -> tuple[str, Plan] | None:
    """The largest known model that fits, with its plan.

    Plans begin with models somewhat larger than what would just fit if host memory grew with
    parameters as that of a small model does.
    """
    small = planner.plan(shallow(config_of("Llama-3.2-1B")), rows, 128, least=True)
    host = planner.host_bytes or math.inf
    most = _SLACK * host * small.num_parameters / small.host_peak_bytes
    by_size = {known.num_parameters: name for name, known in KNOWN_MODELS.items()}
    for size in sorted((size for size in by_size if size <= most), reverse=True):
        plan = planner.plan(config_of(by_size[size]), rows, length)
        if fits(plan):
            return by_size[size], plan
    return None


def fits(plan: Plan) -> bool:
    """Whether a plan fits the device, and the host unless its memory is unknown."""
    return bool(plan.fits_device) and plan.fits_host is not False


def shallow(config: DecoderConfig) -> DecoderConfig:
    """The configuration with only a few layers, of each kind that it has."""
    if config.num_layers <= _LAYERS:
        return config
    experts = config.experts
    if experts is not None:
        kept = tuple(layer for layer in experts.layers if layer < _LAYERS)
        experts = replace(experts, layers=kept) if kept else None
    windows = config.windows[:_LAYERS]
    return replace(config, num_layers=_LAYERS, windows=windows, experts=experts)


def largest(is_in: Callable[[int], bool]) -> int:
    """The largest number that fits, to an eighth; 0 if 1 doesn't.

    An example, where numbers up to 300 fit: 16, 64 and 256 do, 1024 doesn't; between the last two,
    512, 362 and 304 don't, and 278 does, which is within an eighth of 304.

    Args:
        is_in: Whether a number fits, and with it all smaller ones; expensive.
    """
    low, high, probe = 0, _MOST, _FIRST
    while probe:
        low, high = (probe, high) if is_in(probe) else (low, probe)
        if high - low <= 1 + low // 8:
            break
        if high == _MOST:
            probe = min(_STEP * low, (low + _MOST) // 2)
        else:
            probe = max(low + 1, math.isqrt(low * high)) if low else high // _STEP or high // 2
    return low


def confirmed(planned: Callable[[int], Plan], found: int) -> tuple[int, Plan] | None:
    """The largest number up to one that was found whose plan fits, to an eighth; None for none.

    Args:
        planned: The plan of a number.
        found: Number that may be too large.
    """
    best, fails = None, found + 1
    probe = found
    while probe:
        plan = planned(probe)
        if fits(plan):
            best = (probe, plan)
        else:
            fails = probe
        low = best[0] if best else 0
        if fails - low <= 1 + low // 8:
            break
        probe = (low + fails) // 2
    return best
