"""Finds the largest batch, context and model that fit a machine, with few plans.

A plan of a deep model takes seconds, almost all because of its depth. The device memory needed with
the minimum budget hardly depends on depth, so it is searched with a few layers, guided by the
fraction of device memory that each size needs. The plan of the whole model then confirms the
result, or the search continues downwards.
"""

import contextlib
import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrain_jax import Plan
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.lm.cli.catalogue import known_models
from megatrain_jax._src.lm.cli.few_layers import UNKNOWN_LAYERS, with_few_layers
from megatrain_jax._src.lm.cli.plan_settings import rows_of
from megatrain_jax._src.lm.cli.planner import Planner, config_of
from megatrain_jax.models import DecoderConfig

# The first guess of a search: a token takes about this number of bytes for each dimension of its
# queries. With small tiles, only the inputs and outputs of attention are whole.
_BYTES = 36
# For the next guess: fixed memory doesn't grow, and functions that don't fit are tiled. So if a
# size takes half of the memory, about four times that size fits.
_POWER, _LEAST_SHARE, _LEAST_EXCESS = 2, 0.4, 1.1
# Minimum step of the search, as a number of places, before the first doubling.
_STRIDE = 0.25
# If the state takes more than this fraction of the host, activations and gradients may not fit.
_NEARLY_FULL = 0.7
# Host bytes per parameter of two models may differ by this factor.
_SLACK = 1.02
# Layers whose old arrays are in the host while new ones arrive from the device.
_IN_FLIGHT = 3
# Later layers may be this factor smaller than the first ones.
_UNEQUAL = 1.25
# Contexts are multiples of this.
_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size that fits, and its plan.

    Attributes:
        what: The quantity that is maximal: "batch", "context" or "model".
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


def largest_size(
    planner: Planner, what: str, name: str | None, config: DecoderConfig | None
) -> Size | None:
    """The largest batch or context of a model that fits, or the largest known model.

    Args:
        planner: The planner.
        what: "batch", with rows of the settings' length; "context", with the fewest rows; or
            "model", with the fewest rows of the settings' length.
        name: Name of the model, for a batch or context.
        config: Sizes of that model; None for none.

    Returns:
        The size; None if nothing fits.
    """
    rows, length = planner.settings.least_rows, planner.settings.length
    if what == "model":
        found = _largest_model(planner, config, rows, length)
        return found and Size(what=what, model=found[0], rows=rows, length=length, plan=found[1])
    assert name is not None and config is not None
    filled = _part_of_host(planner, config)
    if filled > 1:
        return None

    def shape(n: int) -> tuple[int, int]:
        return (n * rows, length) if what == "batch" else (rows, n * _TOKENS)

    width = config.num_heads * config.head_dim
    tokens = planner.settings.num_gpus * (planner.machine.usable_bytes or 0) / (_BYTES * width)
    first = tokens / math.prod(shape(1))
    best = _largest_of(planner, config, shape, first, may_not_fit=filled > _NEARLY_FULL)
    if best is None:
        return None
    of_rows, of_length = shape(best[0])
    return Size(what=what, model=name, rows=of_rows, length=of_length, plan=best[1])


def _largest_of(
    planner: Planner,
    config: DecoderConfig,
    shape: Callable[[int], tuple[int, int]],
    first: float,
    *,
    may_not_fit: bool,
) -> tuple[int, Plan] | None:
    """The largest number whose shape fits, with its plan; see `largest_size`."""
    few = with_few_layers(config)

    def planned(config: DecoderConfig, n: int, *, least: bool) -> Plan | None:
        try:
            return planner.plan(config, *shape(n), least=least)
        except ValueError:  # for example, too many elements for a kernel
            return None

    @functools.cache
    def whole(n: int) -> Plan | None:
        return planned(config, n, least=False)

    # A few layers say nothing about the whole model's host memory, and no batch changes its state.
    if may_not_fit and not fits(whole(1)):
        return None

    def share(n: int) -> float:
        if (plan := planned(few, n, least=True)) is None:
            return math.inf
        room = plan.hardware and plan.hardware.usable_bytes
        return plan.device_bytes / room if room else float(not plan.fits_device) * math.inf

    return confirmed(whole, largest(share, first))


def _part_of_host(planner: Planner, config: DecoderConfig) -> float:
    """The fraction of the host's memory that a model's state takes; above 1, no batch fits."""
    few = with_few_layers(config)
    try:
        # The whole model takes seconds to plan; a few layers tell whether it may be too large. Each
        # layer counts a part of the model's ends too, so this overestimates.
        small = planner.smallest(few)
        host = _most_state_bytes(small)
        if small.host_bytes * config.num_layers / few.num_layers > host:
            return planner.smallest(config).host_bytes / host
        return (small.host_bytes + _bytes_of_further_layers(small, config)) / host
    except ValueError:  # an error that the search meets as well
        return 0.0


def _most_state_bytes(plan: Plan) -> float:
    """The host memory of a plan's processes beside what they need for themselves, or infinity."""
    each = (plan.host_process_limit or math.inf) - (plan.host_fixed_bytes or 0)
    return plan.num_processes * each


def _largest_model(
    planner: Planner, planned_before: DecoderConfig | None, rows: int, length: int
) -> tuple[str, Plan] | None:
    """The largest known model that fits, with its plan.

    The search starts with the largest model whose state alone fits the host. Larger models take
    more of the host, so few plans find the limit. Device memory depends on a model's widest layer,
    so all smaller models are tried until one fits.

    Args:
        planner: The planner.
        planned_before: Sizes of a model whose few layers are planned already; None for none.
        rows: Rows of a batch.
        length: Tokens of a row.
    """

    def of_few_layers(name: str, *least: int) -> Plan:
        return planner.plan(with_few_layers(config_of(name), *least), rows, 128, least=True)

    settings = planner.settings
    trains_all = settings.trainable is None and settings.lora_rank is None
    small = None
    # If all parameters are trained, they take as many bytes in one model as in another.
    if planned_before is not None and trains_all:
        with contextlib.suppress(ValueError):  # an error of this model alone
            small = planner.smallest(with_few_layers(planned_before))
    small = small or of_few_layers("Llama-3.2-1B", UNKNOWN_LAYERS)
    each = small.host_bytes / small.num_parameters
    filling = _most_state_bytes(small) / each
    by_size = {known.num_parameters: name for name, known in known_models().items()}
    sizes = sorted(size for size in by_size if size <= _SLACK * filling)
    usable = small.hardware and small.hardware.usable_bytes
    if trains_all and settings.disk is None and settings.hosts == 1 and usable:
        room = settings.gpus * usable / each
        moving = {size: _least_moving(config_of(by_size[size]), size, room) for size in sizes}
        sizes = [size for size in sizes if size + moving[size] <= _SLACK * filling]

    @functools.cache
    def planned(size: int) -> Plan:
        return planner.plan(config_of(by_size[size]), rows, length)

    def share(size: int) -> float:
        # The whole model takes seconds to plan; a few layers tell whether its state is too large.
        if _SLACK * size > filling:
            few = of_few_layers(by_size[size])
            if (least := _least_state_bytes(few, size) / _most_state_bytes(few)) > 1:
                return least
        # Schedules adapt to the host's memory: its fraction in use says nothing about the limit.
        return 1.5 if planned(size).fits_host is False else 0.5

    if not sizes or (place := largest(share, sizes[-1], sizes)) is None:
        return None
    # One by one, because a larger model may need less of the device.
    smaller = (size for size in reversed(sizes[: place + 1]) if fits(planned(size)))
    size = next(smaller, None)
    return None if size is None else (by_size[size], planned(size))


def _least_moving(config: DecoderConfig, num_parameters: int, room: float) -> float:
    """The fewest parameters of which the host has two versions at a time while they are updated.

    Args:
        config: Sizes of a model that is trained whole.
        num_parameters: Its parameters.
        room: Parameters with state for which the devices have memory.
    """
    of_ends = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
    layer = max(1.0, (num_parameters - of_ends) / config.num_layers)
    return max(0.0, min(_IN_FLIGHT, config.num_layers - room / layer)) * layer / _UNEQUAL


def _least_state_bytes(few: Plan, num_parameters: int) -> float:
    """The fewest bytes of a model's state at rest, from a plan of a few of its layers."""
    layers = [row for row in few.groups if row.name.startswith("layers.")]
    each = min(row.host_bytes / row.num_parameters for row in layers)
    return few.host_bytes + (num_parameters - few.num_parameters) * each


def fits(plan: Plan | None) -> bool:
    """Whether a plan fits the device, and the host unless its memory is unknown.

    None is a plan that was refused.
    """
    return plan is not None and bool(plan.fits_device) and plan.fits_host is not False


def least_host_bytes(few: Plan, config: DecoderConfig) -> float:
    """The fewest host bytes of a process and its state, from a plan of a few layers."""
    missing = _bytes_of_further_layers(few, config)
    beside = (few.host_process_bytes or 0) - (few.host_pool_bytes or 0)
    return (few.host_bytes + missing / _UNEQUAL) / few.num_processes + beside


def _bytes_of_further_layers(few: Plan, config: DecoderConfig) -> float:
    """The host bytes of the layers that a plan of a few lacks, if all layers are of one size."""
    layers = [row for row in few.groups if row.name.startswith("layers.")]
    number = with_few_layers(config).num_layers
    each = sum(row.count * row.host_bytes for row in layers) / number
    return (config.num_layers - number) * each


def round_number(place: int) -> int:
    """The number at a place in the series 1, 2, 3 and then 4, 5, 6 and 7 times each power of two.

    Functions that don't fit are computed in equal tiles, and numbers outside this series have few
    divisors.

    Examples:
        >>> [round_number(place) for place in range(14)]
        [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24]
    """
    octave, quarter = divmod(place - 3, 4)
    return place + 1 if place < 3 else (4 + quarter) << octave


def largest(
    share: Callable[[int], float], first: float, numbers: Sequence[int] | None = None
) -> int | None:
    """The place of the largest number that fits; None if the first one doesn't.

    Example: a number n takes n / 300 of the capacity. 16 takes 0.05, so 96 is tried, which takes
    0.32, then 512, which takes 1.7 and is too much. By linear interpolation 256 is next, which
    fits; 320, the number after it, doesn't.

    Args:
        share: Fraction of the capacity that a number takes, increasing; expensive. Up to 1 fits.
        first: Number to try first.
        numbers: The numbers, ascending; None for round ones.
    """
    numbers = numbers or _NUMBERS
    low, high = (-1, 0.0), (len(numbers), math.inf)
    place, stride = _place_of(first, numbers), _STRIDE
    while True:
        takes, before = share(numbers[place]), high[0] - low[0]
        low, high = ((place, takes), high) if takes <= 1 else (low, (place, takes))
        if high[0] - low[0] == 1:
            return None if low[0] < 0 else low[0]
        guess = _place_of(_guess(low, high, numbers), numbers)
        place = min(max(guess, low[0] + 1), high[0] - 1)
        # If fixed memory dominates, the fraction says little, so strides double.
        stride *= 2
        if math.isinf(high[1]):
            place = min(max(place, low[0] + int(stride)), high[0] - 1)
        elif low[0] < 0:
            place = max(min(place, high[0] - int(stride)), 0)
        # Where functions are tiled or blocks cut, all that fit take nearly everything.
        elif 2 * (high[0] - low[0]) > before:
            place = (low[0] + high[0]) // 2


def _place_of(number: float, numbers: Sequence[int]) -> int:
    """The place of the largest of the numbers up to the given one."""
    return max(bisect_right(numbers, number) - 1, 0)


def _guess(low: tuple[int, float], high: tuple[int, float], numbers: Sequence[int]) -> float:
    """The next number to try, from the fractions of one that fits and one that doesn't.

    Args:
        low: Place and fraction of a number that fits; place -1 for none.
        high: Place and fraction of a number that doesn't; an infinite fraction for none.
        numbers: The numbers.
    """
    fits = numbers[low[0]] if low[0] >= 0 else 0
    if math.isinf(high[1]):
        return fits / max(low[1], _LEAST_SHARE) ** _POWER
    if not fits:
        return numbers[high[0]] / max(high[1], _LEAST_EXCESS) ** _POWER
    return fits + (numbers[high[0]] - fits) * (1 - low[1]) / (high[1] - low[1])


def confirmed(planned: Callable[[int], Plan | None], place: int | None) -> tuple[int, Plan] | None:
    """The largest round number with a plan that fits, and its plan; None if none fits.

    Args:
        planned: The plan of a number; None if it is refused.
        place: Place of the largest candidate, which may be too large, because the whole model takes
            more than a few layers, mostly of the host; None if there is none.
    """
    if place is None:
        return None
    known = functools.cache(planned)
    numbers = _NUMBERS[: place + 1]
    # Fractions near 1 make the search go down in small steps first: most often the next one fits.
    found = largest(lambda n: 0.99 if fits(known(n)) else 1.01, numbers[-1], numbers)
    plan = None if found is None else known(numbers[found])
    return None if found is None or plan is None else (numbers[found], plan)


# Far beyond any batch, and any context in units of `_TOKENS`.
_NUMBERS = tuple(map(round_number, range(3 + 4 * 20)))
