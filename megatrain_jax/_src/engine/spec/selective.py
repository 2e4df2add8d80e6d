"""Selective residuals: the results of a stage that are the most expensive to recompute per byte.

On long sequences, recomputing attention's output takes far longer per byte than recomputing a
product of an MLP. If memory can't hold all residuals of all stages, saving the costliest results of
many stages may save more time than saving all results of a few; the clock decides.

Example: a layer of Qwen2.5-7B on 131,072 tokens in bfloat16, with an H200's rates::

    result                 GiB        ms to recompute    ms a GiB
    attention with its    0.89                    232         260    selective
      statistics
    queries               0.87                    4.6         5.3
    gate, up              9.25                     49         5.3
    all residuals         12.1                    292          24

Only attention's results are saved then: a GiB of them saves more than twice the time of an average
GiB.
"""

from collections import Counter
from collections.abc import Hashable
from typing import Any

from megatrain_jax._src.engine.kernels.bound_stage import Residuals, find_residuals, is_kept
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.flops import flops_by_kind
from megatrain_jax._src.engine.program.loss.stages import Stage
from megatrain_jax._src.engine.state.hardware import Hardware

# A result is costly if it saves this many times the average seconds per byte.
_COSTLY = 2.0
# Equations that pass a saved result on, possibly rounded.
_HANDS_ON = ("copy", "name", "reduce_precision")


def selective_residuals(
    stage: Stage, every: Residuals | None, hardware: Hardware
) -> Residuals | None:
    """The residuals of a stage that saves only its costliest results; None if none stand out.

    Args:
        stage: The stage.
        every: All its residuals that are worth saving.
        hardware: The machine; its rates determine the costs.
    """
    costs = {} if every is None else seconds_per_byte(stage, every, hardware)
    costly = {kind for kind, (_, is_costly) in costs.items() if is_costly}
    # Nothing stands out if all results are costly, or none.
    if not costly or len(costly) == len(costs):
        return None

    def keeps(primitive: Any, *avals: Any, **params: Any) -> bool:
        return is_kept(primitive, *avals, **params) and _kind(primitive, avals) in costly

    return find_residuals(stage, keeps, selective=True)


def seconds_per_byte(
    stage: Stage, every: Residuals, hardware: Hardware
) -> dict[Hashable, tuple[float, bool]]:
    """Seconds that a saved byte of each kind of result saves, and whether that is costly.

    Results have the same kind if the same primitive makes them from operands of the same shapes and
    dtypes.
    """
    # The bytes of residuals by the kind of the equation that made them.
    jaxpr = every.traced.jaxpr
    num_bytes: Counter[Hashable] = Counter()
    # A set, because an array may appear in the pullback several times but is saved once.
    for v in set(jx.variables(jaxpr.outvars[every.num_outputs :])):
        maker = _maker(jaxpr, v)
        if maker is not None and is_kept(
            maker.primitive, *(a.aval for a in maker.invars), **maker.params
        ):
            num_bytes[_kind_of(maker)] += jx.num_bytes(v.aval)
    seconds: dict[Hashable, float] = {}
    for kind in num_bytes:
        # All equations of a kind are counted together, like their bytes.
        of = flops_by_kind(stage.jaxpr, lambda eqn, kind=kind: _kind_of(eqn) == kind)
        seconds[kind] = hardware.compute_seconds(
            of.total, of.attention, float8=of.float8, float32=of.float32
        )
    least = _COSTLY * sum(seconds.values()) / max(1, sum(num_bytes.values()))
    found = {kind: seconds[kind] / size for kind, size in num_bytes.items()}
    return {kind: (cost, cost >= least) for kind, cost in found.items()}


def _maker(jaxpr: Any, result: Any) -> Any | None:
    """The equation that makes a variable, also inside calls; None if it is an input."""
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    while not jx.is_literal(result) and result in makers:
        eqn = makers[result]
        if inner := jx.called(eqn):
            return _maker(inner.jaxpr, inner.jaxpr.outvars[eqn.outvars.index(result)])
        if eqn.primitive.name not in _HANDS_ON:
            return eqn
        result = eqn.invars[0]
    return None


def _kind_of(eqn: Any) -> Hashable:
    return _kind(eqn.primitive, [a.aval for a in eqn.invars])


def _kind(primitive: Any, avals: Any) -> Hashable:
    """The kind of a result, without parameters, which differ between forward and gradient."""
    return primitive.name, tuple((a.shape, a.dtype) for a in avals)
