"""The largest batch, context and model that fit a machine, found with few plans.

A plan of a deep model takes seconds, and nearly all of that is its depth. The device's need in the
least budget doesn't depend on it, so it is searched for with a few layers. The plan of the whole
model then confirms what was found, or the search goes on below that.
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
# The search ends where so much of the limit is used, or the bounds are as close as that.
_CLOSE = 1 / 16
# The next probe is at most so many times the largest number that fits.
_FAR = 64
# Share of the device's memory that an automatic budget uses.
_USED = 0.95
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
    usable = planner.machine.usable_bytes
    if usable is None:
        raise ValueError(f"the memory of {planner.machine.name} isn't known: say --tokens")
    number = largest(
        lambda n: planner.plan(few, *shape(n), least=True).device_bytes / usable, _USED
    )
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


def largest(need: Callable[[int], float], limit: float) -> int:
    """The largest number whose need is within a limit, to a sixteenth; 0 if 1 is too much.

    The need rises about linearly, so each probe is where a line through the last two meets the
    limit. An example, with a need of 10 + 3n and a limit of 100: n = 1 needs 13 and n = 2 needs 16;
    their line meets 100 at n = 30, which is within a sixteenth of the limit, and the search ends.

    Args:
        need: The need of a number, which rises with it; expensive.
        limit: Most that may be needed.
    """
    low, at_low = 1, need(1)
    if at_low > limit:
        return 0
    high, at_high = 0, 0.0  # the least number known to be too much; 0 for none yet
    probe = 2
    while limit - at_low > _CLOSE * limit and (not high or high - low > 1 + _CLOSE * low):
        needed = need(probe)
        other, at_other = low, at_low
        if needed <= limit:
            low, at_low = probe, needed
        else:
            high, at_high = probe, needed
        if high:
            other, at_other = high, at_high
        slope = (at_other - at_low) / (other - low)
        step = int((limit - at_low) / slope) if slope > 0 else _FAR * low
        # Between the bounds; where there is no upper one, not too far off at once.
        probe = min(low + max(1, step), high - 1 if high else _FAR * low)
        if probe <= low:
            break
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
