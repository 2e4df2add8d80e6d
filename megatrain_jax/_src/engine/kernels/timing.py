"""Measures the seconds of compiled functions on their devices, before a run has any state.

Each function is called several times by itself, with arguments made for it. At any
time, the arguments of only one function exist.

Example: a function takes about 4 ms.

    1. it runs once to be loaded, and once more in 4.1 ms
    2. five batches of five calls each: 20.3, 20.1, 20.0, 20.2 and 23.0 ms
    3. the median is 20.2 ms, so a call takes 4.04 ms

A function that takes 60 ms is called twice more, one call at a time, and one that takes 100 ms or
more not again. Of a function that takes two seconds or more, the first call counts, because loading
it takes a few hundredths of that: a block with a million tokens computes for half a minute.

A GPU lowers its clock when products have taken its full power for a while: within a second, an H100
went from 1,980 to about 1,450 MHz, and a layer's backward from 12.1 to 13.1 ms. For a long step,
functions are therefore called for a while first, and timed after that. As in the step, products
don't take power all the time: between its batches of calls, a function pauses for as long as the
step updates or waits. Without pauses, a step that does so for an eighth of its time was planned 4%
too long.

A small function computes a function's arguments on its devices, so nothing large is copied from
the host. Floating-point numbers are pseudo-random, because a GPU multiplies zeros faster than real
data.

A function's time may also depend on its integers: experts take longer the more tokens choose them,
and attention takes longer the longer documents are. So stages take the integers of a real batch.
The step's prologue computes some of them; stages pass on the rest, and so do these stages when they
are timed. Example: a router passes on each token's experts as value 7.

    1. the router is timed, and value 7 is kept
    2. a stage of experts takes value 7; its parameters and tokens are random numbers

The residuals of a backward come from its own forward. Scales of float8 products are residuals, and
with made-up scales all codes would be zeros: a backward took 26.4 ms on an H200 instead of 32.1.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.kernels.stage_kernels import shardings
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.effects import has_side_effects
from megatrain_jax._src.engine.program.loss.stages import Program
from megatrain_jax._src.engine.state.placement import Placement

# The largest absolute value of a random number.
_SCALE = 0.03

Integers = Mapping[int, jax.Array]
"""Integer values of a step on its devices, by id."""


def can_be_made(kernel: Kernel) -> bool:
    """Whether a kernel's arguments can be made; random keys of other generators can't."""
    return kernel.takes is not None and _has_usual_keys(kernel.takes)


def maker(kernel: Kernel, *, has_residuals: bool = False) -> jax.stages.Lowered:
    """The lowered function without arguments that makes a kernel's arguments.

    Args:
        kernel: The kernel.
        has_residuals: Whether its third argument is a stage's residuals, which are left out; see
            `with_residuals`.
    """
    # The square root of a negative second moment would be no number.
    lowest = 0.0 if kernel.name == "update" else -1.0
    assert kernel.takes is not None
    takes = (*kernel.takes[:2], [], *kernel.takes[3:]) if has_residuals else kernel.takes

    def make() -> Any:
        return jax.tree.map(lambda like: _numbers(like, lowest), takes)

    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, takes)).lower()


def integers_of_batch(program: Program, placement: Placement, batch: Any) -> Integers:
    """The integer values that a step's prologue computes from a batch's first rows.

    Args:
        program: The step's program, of one microbatch.
        placement: Placement of the values.
        batch: This process's part of a batch. As many rows are read as a microbatch has.

    Returns:
        The values. There are none if `batch` has shapes instead of arrays, or if the prologue has
        effects or takes a random key of another generator than JAX's default.
    """
    leaves = jax.tree.leaves(batch)
    is_real = not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    # All processes have to compute together.
    if not all(placement.processes.gather("timing with a batch", is_real)):
        return {}
    ids = [i for i in program.prologue_values if _is_integer(program.values[i])]
    first = len(program.prologue_consts)
    data = [jx.shape_of(v.aval) for v in program.prologue.invars[first:]]
    if not ids or has_side_effects(program.prologue) or not _has_usual_keys(data):
        return {}
    num_variables = len(program.state.drawn)
    rows, count = program.examples.number, placement.num_processes
    # One microbatch's part; the first axes may differ if nothing is divided.
    real = {
        number: placement.put_parts(leaf[: data[number].shape[0] // count], placement.batch(rows))
        for number, leaf in enumerate(leaves, num_variables)
        if _is_integer(data[number])
    }

    def compute(real):
        made = [real[n] if n in real else _numbers(x, -1.0) for n, x in enumerate(data)]
        values = jx.evaluate(program.prologue, [*program.prologue_consts, *made])
        by_id = dict(zip(program.prologue_values, values, strict=True))
        return [by_id[i] for i in ids]

    values = jax.jit(compute, out_shardings=shardings(program, placement, ids))(real)
    return dict(zip(ids, values, strict=True))


def with_integers(
    arguments: Sequence[Any], reads: Sequence[int], known: Integers
) -> tuple[Any, ...]:
    """A stage's arguments with its input values of these ids replaced, where they are known."""
    masters, inputs, *rest = arguments
    rows = zip(reads, inputs, strict=True)
    return masters, [known.get(i, made) for i, made in rows], *rest


def with_residuals(arguments: Sequence[Any], forward: Callable[..., Any]) -> tuple[Any, ...]:
    """A backward's arguments with the residuals that its forward saves for the same inputs."""
    masters, inputs, _, *rest = arguments
    _, residuals = forward(masters, inputs)
    return masters, inputs, residuals, *rest


def integers_passed_on(writes: Sequence[int], outputs: Sequence[jax.Array]) -> Integers:
    """The integers among a stage's output values of these ids."""
    return {i: x for i, x in zip(writes, outputs, strict=True) if _is_integer(x)}


def _is_integer(aval: Any) -> bool:
    """Whether values are integers, but not codes of 8 bits such as a picture's."""
    return jnp.issubdtype(aval.dtype, jnp.integer) and aval.dtype.itemsize > 1


def _has_usual_keys(avals: Any) -> bool:
    """Whether all random keys are of JAX's default generator."""
    keys = [x.dtype for x in jax.tree.leaves(avals) if _is_key(x)]
    return all(dtype == _key_dtype() for dtype in keys)


def _key_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0)).dtype


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _numbers(aval: jax.ShapeDtypeStruct, lowest: float) -> jax.Array:
    """Values of a shape and dtype; indices count along the last axis, so they are in bounds."""
    shape, dtype, size = aval.shape, aval.dtype, math.prod(aval.shape)
    if _is_key(aval):
        return jax.random.split(jax.random.key(0), size).reshape(shape)
    if aval.weak_type:  # only weak numbers give a weak array
        return jax.lax.broadcast(jnp.zeros((), dtype).item() + 1, shape)
    if dtype == jnp.bool_:
        return jnp.ones(shape, dtype)
    if _is_integer(aval):
        return (
            jax.lax.broadcasted_iota(dtype, shape, len(shape) - 1) if shape else jnp.ones((), dtype)
        )
    bits = jnp.arange(size, dtype=jnp.uint32) * jnp.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    bits = (bits ^ (bits >> 13)).reshape(shape)
    if jnp.issubdtype(dtype, jnp.integer):  # codes
        return (bits >> 24).astype(dtype)
    share = (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
    return (_SCALE * (lowest + (1 - lowest) * share)).astype(dtype)


# ---- timing

# Seconds per batch of calls, seconds of all batches, and the fewest and most batches. In a batch of
# this length, the wait for its last call hardly counts.
_BATCH, _ALL, _FEWEST, _MOST = 0.02, 0.1, 2, 5
_MOST_CALLS = 50
# Seconds of calls before the first function is timed, and before each later one, to heat the GPU;
# functions shorter than `_HEATING` draw too little power for that.
_FIRST_HEAT, _HEAT, _HEATING = 0.8, 0.4, 1e-3
# A smaller share of a step is taken for this one: the clock is as high then.
_LEAST_SHARE = 0.5
# Seconds from which a function's first call counts.
_LONG = 2.0

Agree = Callable[[float], float]
"""Returns the same seconds in all processes of a run, from each process's own."""


class RepeatedCall:
    """A function with its arguments, to be called again and again.

    Results take the place of donated arguments, as they do in training.
    """

    def __init__(self, function: Callable[..., Any], kernel: Kernel, arguments: tuple[Any, ...]):
        """Owns the arguments; they must not be used anywhere else."""
        self._function, self._donated = function, kernel.donated
        self._arguments = list(arguments)
        self._result: Any = None

    def run(self, times: int) -> None:
        """Calls the function `times` times and waits for the last call."""
        for _ in range(times):
            self._result = None  # frees the memory of the results before the next call
            self._result = self._function(*self._arguments)
            self._give_back(self._result)
        jax.block_until_ready(self._result)

    def outputs(self) -> list[jax.Array]:
        """The values that a stage's forward has returned, without its residuals."""
        result = self._result
        return result[0] if isinstance(result, tuple) else result

    def _give_back(self, result: Any) -> None:
        """Replaces donated arguments by results of the same shapes."""
        left = jax.tree.leaves(result)

        def alike(old: jax.Array) -> jax.Array:
            like = old.shape, old.dtype
            at = next(i for i, new in enumerate(left) if (new.shape, new.dtype) == like)
            return left.pop(at)

        for position in self._donated:
            self._arguments[position] = jax.tree.map(alike, self._arguments[position])


def measured_seconds(call: RepeatedCall, agree: Agree, pause: float = 0.0) -> float:
    """The seconds of one call, without the wait for its end.

    Args:
        call: The call.
        agree: See `Agree`. All processes have to make equally many calls, because they exchange
            values in them.
        pause: Seconds without computation after each batch, for each second of it.
    """
    first = agree(_timed(call, 1))
    if first >= _LONG:
        return first
    about = max(agree(_timed(call, 1)), 1e-6)
    if about >= _ALL:
        return about
    number = _calls_of_batch(about)
    batches = max(_FEWEST, min(_MOST, math.ceil(_ALL / (number * about))))
    return agree(statistics.median(_timed(call, number, pause) for _ in range(batches)) / number)


def _calls_of_batch(seconds: float) -> int:
    return min(_MOST_CALLS, math.ceil(_BATCH / seconds))


def _timed(call: RepeatedCall, times: int, pause: float = 0.0) -> float:
    start = time.perf_counter()
    call.run(times)
    seconds = time.perf_counter() - start
    if pause:
        time.sleep(pause * seconds)
    return seconds


def _heat(call: RepeatedCall, seconds: float, each: float, pause: float) -> None:
    """Computes for some seconds, in batches with pauses; a call takes `each` seconds."""
    number = _calls_of_batch(each)
    for _ in range(math.ceil(seconds / (number * each))):
        _timed(call, number, pause)


class Timed(NamedTuple):
    """A kernel to be timed.

    Attributes:
        kernel: The kernel.
        reads: Ids of the values that a stage's kernel takes as its second argument.
        writes: Ids of the values that a stage's forward returns.
        forward: The forward that saves the residuals which the kernel takes as its third argument.
    """

    kernel: Kernel
    reads: Sequence[int] = ()
    writes: Sequence[int] = ()
    forward: Kernel | None = None

    @property
    def name(self) -> tuple[str, Hashable]:
        """The kernel's name and key, which equal kernels share."""
        return self.kernel.name, self.kernel.key


def time_kernels(
    cache: KernelCache,
    functions: Iterable[Timed],
    agree: Agree = lambda seconds: seconds,
    *,
    integers: Integers | None = None,
    share: float | None = None,
) -> dict[tuple[str, Hashable], float]:
    """Measures the seconds of kernels on the devices in their `takes`.

    Args:
        cache: Cache with the compiled functions.
        functions: The kernels, those of stages in the order of the step; equal ones are measured
            once.
        agree: See `Agree`.
        integers: The known integers of a batch.
        share: The share of a step in which the device computes stages. They are timed at the clock
            that it keeps up in such steps, which takes about two seconds more; None for steps that
            are too short to lower the clock.

    Returns:
        Seconds by a kernel's name and key. Kernels with arguments that can't be made here, such as
        random keys of another generator than JAX's default, are missing.
    """
    different: dict[tuple[str, Hashable], list[Timed]] = {}
    for row in functions:
        if can_be_made(row.kernel):
            different.setdefault(row.name, []).append(row)
    makers = [
        maker(first.kernel, has_residuals=first.forward is not None)
        for first, *_ in different.values()
    ]
    with ThreadPoolExecutor() as pool:  # XLA compiles without Python's lock
        made = pool.map(lambda lowered: lowered.compile(), makers)
        make = dict(zip(different, made, strict=True))
    known = dict(integers or {})
    found, heat = {}, _FIRST_HEAT
    pause = 0.0 if share is None else 1 / max(share, _LEAST_SHARE) - 1
    for name, alike in different.items():
        kernel, reads, _, forward = alike[0]
        arguments = make[name]()
        if reads:
            arguments = with_integers(arguments, reads, known)
        if forward is not None:
            arguments = with_residuals(arguments, cache.get(forward))
        call = RepeatedCall(cache.get(kernel), kernel, arguments)
        del arguments
        found[name] = measured_seconds(call, agree)
        # Updates wait for the memory and take less power.
        if share is not None and kernel.name != "update" and found[name] >= _HEATING:
            # A long function has heated the GPU by itself.
            if found[name] < heat:
                _heat(call, heat, found[name], pause)
                found[name] = measured_seconds(call, agree, pause)
            heat = _HEAT
        for stage in alike:
            if stage.writes:
                known |= integers_passed_on(stage.writes, call.outputs())
        del call  # before the next function's arguments are made
    return found
