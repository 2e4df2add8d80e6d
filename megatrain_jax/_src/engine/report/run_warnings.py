"""Warnings about parts of a run that perform badly, reported at the user's own line."""

from collections.abc import Callable, Iterable
from types import EllipsisType
from typing import Any

import numpy as np
from flax import nnx

from megatrain_jax._src.common.sizes import counted, sized
from megatrain_jax._src.common.trees import path_name
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.adapt.adapters import is_frozen
from megatrain_jax._src.engine.adapt.loss_function import of_user, takes_rng
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.options.precision_values import NF4
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.flops import count_flops, is_product
from megatrain_jax._src.engine.program.loss.stage_warnings import WORTH_CUTTING
from megatrain_jax._src.engine.program.loss.stages import Stage
from megatrain_jax._src.engine.program.primitives import LAYOUT
from megatrain_jax._src.engine.spec.codecs import coded_differences, stored_dtype
from megatrain_jax._src.engine.spec.run_spec import RunSpec

# Fraction of the parameters from which on a stage counts as most of the model.
_MOST = 3 / 4
# With fewer operations in a step, float32 products take a GPU only milliseconds, or less time than
# Python takes to dispatch the step.
_WORTH_NARROWING = 1e12


class PlanWarning(UserWarning):
    """The category of warnings about a run's performance; `Plan.warnings` has the texts.

    Examples:
        To silence them:

        >>> import warnings
        >>> warnings.simplefilter("ignore", PlanWarning)
    """


def warn_of(texts: Iterable[str]) -> None:
    """Warns of each text at the innermost line outside this package."""
    for text in texts:
        warn_user(text, PlanWarning)


def find_warnings(spec: RunSpec) -> tuple[str, ...]:
    """The texts of a run's warnings, beginning with warnings of cutting the loss."""
    own = (
        *(_no_bfloat16, _one_stage, _wide_products),
        *(_no_float8, _coded_differences, _coded_frozen, _no_nf4, _nothing_frozen),
        _frozen_statistics,
    )
    return (*spec.first.program.warnings, *(text for find in own for text in find(spec)))


def _no_bfloat16(spec: RunSpec) -> list[str]:
    """Warns if the GPU has no bfloat16 and the user chose bfloat16, or float16 replaces it."""
    machine, given = spec.options.machine, spec.options.precision
    if machine is not None and not machine.has_bfloat16 and spec.precision.compute == "bfloat16":
        return [
            "this GPU has no bfloat16: products in it are slow, and the plan counts them at the "
            'rate of float16. Leave `compute` out, or use precision="float16"'
        ]
    was_chosen = not isinstance(given, str) and given.compute is None
    if not was_chosen or not spec.precision.scales_loss:
        return []
    return ["this GPU has no bfloat16; computing in float16 with dynamic loss scaling"]


def _one_stage(spec: RunSpec) -> list[str]:
    """Warns if most of the model is one stage, so that little is streamed by block."""
    sizes = [*map(jx.num_elements, spec.leaves)]
    stages = [bound.stage for bound in spec.first.stages]
    whole, held = sum(sizes), [[sizes[i] for i in stage.leaves] for stage in stages]
    if whole < WORTH_CUTTING or not held:
        return []
    at = max(range(len(held)), key=lambda s: sum(held[s]))
    name, mine = stages[at].name, held[at]
    # A single array, such as an embedding, would be as large in any stage.
    large = sum(mine) > _MOST * whole and sum(mine) - max(mine, default=0) > (1 - _MOST) * whole
    has_blocks = any(stage.is_block for stage in stages)
    if has_blocks and not large:
        return []
    # Already reported, with a specific reason.
    if any(f"stage {name} holds" in text or "can't be separated" in text
           for text in spec.first.program.warnings):  # fmt: skip
        return []
    parameters = f"{sized(4 * sum(mine))} of fp32 parameters"
    if has_blocks:
        said = (
            f"little of this model is streamed block by block: its stage {name} holds {parameters} "
            f"of {sized(4 * whole)}, as no list of layers was found in it. These"
        )
    else:
        said = (
            "nothing of this model is streamed block by block, because no blocks were found: its "
            + parameters
        )
    return [
        f"{said} have to be on the device together, with their gradients and optimizer state. Keep "
        "layers that run one after another in a list (`layers/3`), name them by number "
        "(`Block_3`), or scan over stacked ones"
    ]


def products_line(spec: RunSpec) -> str:
    """The dtype of matrix products, and how to change it; "" without products, or if warned of."""
    wide, every = _wide_flops(spec)
    if not every or _wide_products(spec):
        return ""
    if found := _much_is_wide(spec, wide, every) or _much_is_narrow(spec, every):
        return f"{found[0].upper()}{found[1:]}."
    coded = "float8 and " if spec.first.program.in_float8 else ""
    return f"Matrix products are computed in {coded}{np.dtype(spec.precision.compute).name}."


def _frozen_statistics(spec: RunSpec) -> list[str]:
    """Warns of running statistics of frozen modules that change in training."""
    traced = spec.traced
    jaxpr, first = traced.traced.jaxpr, len(traced.traced.consts) + traced.num_parameters
    before = jaxpr.invars[first : first + traced.num_variables]
    after = jaxpr.outvars[len(jaxpr.outvars) - traced.num_variables :]
    paths = spec.adapted.paths
    trained = [False] * len(paths)
    for leaf in spec.leaves:
        trained[leaf.parameter] = leaf.is_trainable
    names = []
    for path, old, new in zip(spec.adapted.variable_paths, before, after, strict=True):
        # In Linen, the name of a collection comes first.
        modules = path[:-1], path[1:-1]
        if old is not new and jx.is_float(old.aval):
            if any(is_frozen(module, paths, trained) for module in modules):
                names.append(path_name(path))
    if not names:
        return []
    shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
    return [
        f"`trainable` freezes parameters, not running statistics: {shown} of frozen modules change "
        "in training. To keep them, put these modules into evaluation mode: by .eval() in NNX, by "
        "use_running_average=True in Linen"
    ]


def unused_seed(spec: RunSpec) -> str:
    """That `seed` was given though nothing in the run draws from it, or "".

    The model is none of Linen, whose parameters are drawn from it.
    """
    options, precision = spec.options, spec.precision
    functions = [of_user(f) for f in (spec.loss_fn, options.eval_loss_fn) if f is not None]
    fp32 = np.dtype("float32")
    rounds = precision.rounding == "stochastic" and (
        (precision.master, precision.sums) != (fp32, fp32) or precision.state not in (None, fp32)
    )
    if options.seed == Options.seed or rounds or any(map(takes_rng, functions)):
        return ""
    return (
        f"`seed`={options.seed} changes nothing here: `loss_fn` takes no `rng`, and a model with "
        f"dropout has random numbers of its own, as of nnx.Rngs({options.seed})"
    )


def _much_is_wide(spec: RunSpec, wide: int, every: int) -> str:
    """The share of products wider than the compute dtype, its reason and a remedy, or ""."""
    name = np.dtype(spec.precision.compute).name
    # A router or a loss in fp32 is intended, and takes only a few percent of the operations.
    if wide <= every / 10:
        return ""
    beside = ", and none of these can be in float8" if spec.precision.asks_for_float8 else ""
    return (
        f"{wide / every:.0%} of the matrix products have operands wider than {name}, the compute "
        f"dtype{beside}{_widened_by(spec)}. A layer that fixes its dtype when it is built "
        "(nnx.Embed does), a wide array in the batch, or a cast in the loss widens all that "
        f"follow: give it the compute dtype, as in nnx.Embed(..., dtype=jnp.{name}), or ask for "
        'the wider one, as in precision="float32"'
    )


def _much_is_narrow(spec: RunSpec, every: int) -> str:
    """The share of products in another dtype no wider than the compute dtype, and why, or ""."""
    compute = np.dtype(spec.precision.compute)
    flops = {
        name: _flops(spec, lambda e, name=name: is_product(e) and _widest(e) == name)
        for name in ("bfloat16", "float16")
        if name != compute.name
    }
    name = max(flops, key=flops.__getitem__)
    if flops[name] <= every / 10:
        return ""
    return (
        f"{flops[name] / every:.0%} of the matrix products are computed in {name}, not in "
        f"{compute.name}, the compute dtype: a layer with a dtype of its own, as in "
        f"nnx.Linear(..., dtype=jnp.{name}), or a cast in the loss makes them so"
    )


def _wide_products(spec: RunSpec) -> list[str]:
    """Warns of much computation outside the compute dtype, which users rarely intend."""
    given = spec.options.precision
    wide, every = _wide_flops(spec)
    # Who asks for a dtype learns that most products are not in it, even if they take little time.
    is_asked = not isinstance(given, str) and given.compute is not None
    is_asked = is_asked or spec.precision.asks_for_float8
    # Forward, its recomputation, and backward.
    costs_time = 4 * spec.microbatches * wide >= _WORTH_NARROWING
    is_told = costs_time or is_asked and wide > every / 2
    return [text] if is_told and (text := _much_is_wide(spec, wide, every)) else []


def _wide_flops(spec: RunSpec) -> tuple[int, int]:
    """Operations of a forward's products wider than the compute dtype, and of all products."""
    itemsize = np.dtype(spec.precision.compute).itemsize
    return _flops(spec, lambda e: _is_wide(e, itemsize)), _flops(spec, is_product)


def _flops(spec: RunSpec, counts: Callable[[Any], bool]) -> int:
    """Operations of a forward's equations that count."""
    return sum(count_flops(bound.stage.jaxpr, counts) for bound in spec.first.stages)


def _widest(product: Any) -> str:
    """The dtype of a product's wider operand, in which it computes."""
    return max((v.aval.dtype for v in product.invars[:2]), key=lambda d: d.itemsize).name


def _widened_by(spec: RunSpec) -> str:
    """A clause on what makes the operands of wide products wide; empty if unknown."""
    itemsize = np.dtype(spec.precision.compute).itemsize
    search = _Widening(spec, itemsize)
    causes = dict.fromkeys(
        search.cause(stage, eqn)
        for stage in search.stages
        for eqn in stage.jaxpr.eqns
        if jx.contains(eqn, lambda e: _is_wide(e, itemsize))
    )
    first, *others = [cause for cause in causes if cause] or [""]
    # Whoever mends the first place alone would see no change.
    further = counted(len(others), "further place")
    more = f", and numbers become as wide at {further}" if others else ""
    return f": {first}{more}" if first else ""


class _Widening:
    """A search for the places where numbers become wider than `itemsize` bytes."""

    def __init__(self, spec: RunSpec, itemsize: int):
        self.spec, self.itemsize = spec, itemsize
        self.stages = [bound.stage for bound in spec.first.stages]
        self.program = spec.first.program
        self.makers = {value: stage for stage in self.stages for value in stage.outputs}
        self.made = {id(stage): _makers(stage.jaxpr) for stage in self.stages}
        self.prologue = _makers(self.program.prologue)

    def cause(self, stage: Stage, eqn: Any) -> str:
        """A clause on the place that makes an equation's first wide operand wide; "" if unknown.

        The operand is followed back, from stage to stage, to the equation or the input where
        numbers become wide.
        """
        at = stage, eqn
        while at is not None:
            stage, eqn = at
            made = self.made[id(stage)]
            while wide := [v for v in jx.variables(eqn.invars) if _width(v) > self.itemsize]:
                # Beside a wide operand, JAX casts the narrow ones: these casts are no cause.
                wide.sort(key=lambda v: self._is_cast(stage, v))
                if wide[0] not in made:
                    break
                eqn = made[wide[0]]
            if not wide:  # narrow operands: this one widens
                parameter = _parameter(stage, eqn, made, self.spec)
                what = f"`{parameter}` is" if parameter else "numbers are"
                widest = max(eqn.outvars, key=_width).aval.dtype.name
                return f"{what} cast to {widest} in stage {stage.name}"
            place = list(stage.jaxpr.invars).index(wide[0]) - len(stage.consts)
            value = stage.inputs[place - len(stage.leaves)] if place >= len(stage.leaves) else None
            if value not in self.makers:
                if value is not None:
                    what = self._data(value)
                elif place < 0:
                    what = "a constant"
                else:
                    what = f"`{path_name(self.spec.leaves[stage.leaves[place]].path)}`"
                return f"{what} is {wide[0].aval.dtype.name} in stage {stage.name}"
            stage = self.makers[value]
            result = stage.jaxpr.outvars[stage.outputs.index(value)]
            at = next(((stage, e) for e in stage.jaxpr.eqns if result in e.outvars), None)
        return ""

    def _is_cast(self, stage: Stage, variable: Any) -> bool:
        """Whether a value is a cast of a narrow one, as it is or rearranged."""
        first = len(stage.consts) + len(stage.leaves)
        inputs = dict(zip(stage.jaxpr.invars[first:], stage.inputs, strict=True))
        eqn, source = _maker(self.made[id(stage)], variable)
        if not jx.is_literal(source) and inputs.get(source) in self.program.prologue_values:
            eqn, _ = _maker(self.prologue, self._from_prologue(inputs[source]))
        if eqn is None or eqn.primitive.name != "convert_element_type":
            return False
        return all(_width(v) <= self.itemsize for v in jx.variables(eqn.invars))

    def _from_prologue(self, value: int) -> Any:
        return self.program.prologue.outvars[self.program.prologue_values.index(value)]

    def _data(self, value: int) -> str:
        """What a value is that no stage makes, and that depends on no parameter."""
        _, source = _maker(self.prologue, self._from_prologue(value))
        data = self.program.prologue.invars[len(self.program.prologue_consts) :]
        if source not in data:
            return "what the loss computes without parameters"
        paths, number = self.spec.adapted.variable_paths, data.index(source)
        return f"`{path_name(paths[number])}`" if number < len(paths) else "an array of the batch"


def _makers(jaxpr: Any) -> dict[Any, Any]:
    return {variable: eqn for eqn in jaxpr.eqns for variable in eqn.outvars}


def _maker(made: dict[Any, Any], variable: Any) -> tuple[Any, Any]:
    """The equation that makes a value's numbers, None for an input, and where they are then."""
    while not jx.is_literal(variable):
        eqn = made.get(variable)
        if eqn is None or eqn.primitive.name not in LAYOUT:
            return eqn, variable
        variable = eqn.invars[0]
    return None, variable


def _width(atom: Any) -> int:
    """Bytes of a floating-point number of a variable; 0 for other dtypes."""
    return atom.aval.dtype.itemsize if jx.is_float(atom.aval) else 0


def _parameter(stage: Stage, eqn: Any, made: dict[Any, Any], spec: RunSpec) -> str | None:
    """The path of the parameter that an equation reads, as it is or rearranged; None if none."""
    leaves = dict(zip(stage.jaxpr.invars[len(stage.consts) :], stage.leaves, strict=False))
    for operand in jx.variables(eqn.invars):
        _, variable = _maker(made, operand)
        if not jx.is_literal(variable) and variable in leaves:
            return path_name(spec.leaves[leaves[variable]].path)
    return None


def _is_wide(eqn: Any, itemsize: int) -> bool:
    """Whether an equation is a product of operands wider than `itemsize` that could be narrower."""
    if not is_product(eqn, itemsize):
        return False
    # The narrowest complex numbers have 8 bytes.
    return not np.issubdtype(eqn.outvars[0].aval.dtype, np.complexfloating)


def _no_float8(spec: RunSpec) -> list[str]:
    """Warns if float8 was asked for, in all or by a pattern, and no product is computed in it."""
    precision, reached = spec.precision, spec.first.program.in_float8
    if not precision.asks_for_float8:
        return []
    wide, every = _wide_flops(spec)
    if not reached and wide > every / 2:  # `_wide_products` says it
        return []
    if not reached:
        return [
            "`precision` asks for float8, but no product of this model is computed in it: see the "
            "page Float8 for the products that stay as they are. Products with small parameters, "
            'such as narrower than 1,024, have to be named, as in Precision(products={"*": '
            '"float8"})'
        ]
    patterns: dict[str, bool] = {}
    for i, leaf in enumerate(spec.leaves):
        if (pattern := precision.float8_pattern(path_name(leaf.path))) is not None:
            patterns[pattern] = patterns.get(pattern, False) or i in reached
    unused = [repr(pattern) for pattern, is_used in patterns.items() if not is_used]
    if not unused:
        return []
    return [
        f"Precision(products=...) asks for float8 by {', '.join(unused)}, but no product with "
        "these parameters is computed in it: see the page Float8 for the products that stay as "
        "they are"
    ]


def _coded_differences(spec: RunSpec) -> list[str]:
    """Warns of coded state that can turn parameters into NaN."""
    counts = [len(rows) for rows in spec.grouping.leaves]
    paths = coded_differences(spec.precision, spec.optimizer, counts)
    if not paths:
        return []
    return [
        "the optimizer takes roots of differences of state that `precision` holds in fewer bits, "
        f"{', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''}: rounded, a difference may "
        "fall below zero, and parameters become NaN. Map these paths to float32 in "
        "Precision(state={...})"
    ]


def _coded_frozen(spec: RunSpec) -> list[str]:
    """Warns of frozen parameters that are rounded because masters are held in codes."""
    precision = spec.precision
    # With `frozen` or a mapping, the user chose the dtype of these parameters.
    if precision.frozen is not None or isinstance(precision.master, tuple):
        return []
    frozen = [leaf for leaf in spec.leaves if not leaf.is_trainable]
    coded = [leaf for leaf in frozen if stored_dtype(precision, leaf) == np.dtype("int8")]
    if not coded:
        return []
    return [
        f"{sum(map(jx.num_elements, coded)):,} parameters that are not trained are held in 8 bits "
        "like the masters, each rounded by at most 1/254 of the largest number in its block of "
        '128. Precision(frozen="bfloat16") or frozen="float32" holds them more exactly, and '
        'frozen="int8" silences this warning'
    ]


def _no_nf4(spec: RunSpec) -> list[str]:
    """Warns if frozen parameters were to be stored in NF4, and none is."""
    frozen = [leaf for leaf in spec.leaves if not leaf.is_trainable]
    if spec.precision.frozen != NF4 or any(stored_dtype(spec.precision, x) == NF4 for x in frozen):
        return []
    return [
        'Precision(frozen="nf4") stores matrices of the model\'s blocks that are not trained in 4 '
        'bits, but this run has none, and its frozen parameters are bfloat16. frozen="int8" codes '
        "parameters outside of blocks, too"
    ]


def _nothing_frozen(spec: RunSpec) -> list[str]:
    """Warns if a choice of trained parameters chooses all of them."""
    given = spec.options.trainable
    is_meant = given is None or isinstance(given, bool | EllipsisType) or given is nnx.Param
    if is_meant or not all(leaf.is_trainable for leaf in spec.leaves):
        return []
    return [f"`trainable`={given!r} chooses all parameters, so none is frozen: leave it out"]
