"""Configurations with fewer layers: for plans of a few layers, and for faster plans of all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatrain_jax.models import DecoderConfig

# A first layer, a last one, and two between them, because these are scheduled differently.
_LAYERS = 4
# For families with kinds of layers that `DecoderConfig` doesn't list: more than their period.
UNKNOWN_LAYERS = 7


class FewLayers(NamedTuple):
    """A configuration with fewer layers, and those that are there more often in the whole one.

    Attributes:
        config: The configuration.
        first: Number of the first of these layers.
        period: Number of these layers, before and after which there are others like them.
        times: Number of times that the whole model has them in addition.
    """

    config: DecoderConfig
    first: int
    period: int
    times: int


def with_few_layers(config: DecoderConfig, least: int = _LAYERS) -> DecoderConfig:
    """The configuration with only its first layers: `least`, or more to have each kind of layer."""
    kinds = _kinds(config)
    if config.options is not None:
        least = UNKNOWN_LAYERS
    num = max(least, 1 + max(kinds.index(one) for one in set(kinds)))
    return _with_layers(config, min(config.num_layers, num))


def repeated_layers(config: DecoderConfig) -> FewLayers | None:
    """The few layers that all layers repeat; None if there are none or it isn't known.

    Example: of 26 layers, every sixth has no window. The first six may differ otherwise, as the
    first one reads the embedding. So layers 6 to 11 are repeated, at least one after them shows
    that they can be, and the last one ends the model: of 14 layers, 6 to 11 are there twice more.
    """
    # With experts, the loss reads a tally of every layer.
    if config.options is not None or config.experts is not None:
        return None
    kinds, number = _kinds(config), config.num_layers
    for period in range(1, number // 4 + 1):
        start = _start_of_period(kinds, period)
        times = (number - start - 2 * period - 2) // period
        if times > 0:
            few = _with_layers(config, number - times * period)
            return FewLayers(few, start + period, period, times)
    return None


def _start_of_period(kinds: Sequence[object], period: int) -> int:
    """The number of the first layer from which on kinds repeat."""
    differing = [i for i in range(len(kinds) - period) if kinds[i] != kinds[i + period]]
    return differing[-1] + 1 if differing else 0


def _kinds(config: DecoderConfig) -> list[tuple[object, ...]]:
    """The kind of each layer, as far as the configuration tells."""
    sparse = () if config.experts is None else config.experts.layers

    def kind(layer: int) -> tuple[object, ...]:
        window = config.windows[layer] if config.windows else None
        return window, layer in sparse, layer in config.unrotated

    return [kind(layer) for layer in range(config.num_layers)]


def _with_layers(config: DecoderConfig, num: int) -> DecoderConfig:
    """The configuration with only its first layers."""
    experts = config.experts
    if experts is not None:
        kept = tuple(layer for layer in experts.layers if layer < num)
        experts = replace(experts, layers=kept) if kept else None
    return replace(
        config,
        num_layers=num,
        windows=config.windows[:num],
        unrotated=tuple(layer for layer in config.unrotated if layer < num),
        experts=experts,
    )
