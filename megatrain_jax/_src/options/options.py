"""The options of a run: records with checks, and their use in functions' signatures.

`fit`, `train`, `Trainer` and `plan` take `**options` and make these records first. So a mistake is
reported before data is drawn, and before anything is traced, made or saved. To add an option, add
its type for callers, its default and its check here, and describe it in the docstrings.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any, Literal, TypedDict, TypeVar, get_args

from jax.sharding import AbstractMesh, Mesh

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.checks import refused
from megatrain_jax._src.options.machine import check_mesh_given, check_products, found_hardware
from megatrain_jax._src.options.precision import Precision, precision_of
from megatrain_jax._src.options.trainable import trainable_of
from megatrain_jax._src.options.unknown_options import unknown_option
from megatrain_jax._src.state.hardware import Hardware

Microbatches = int | Literal["auto"]
DeviceBudget = int | str | None
HostBudget = int | str | None
OnNonfinite = Literal["raise", "skip"]
PrecisionGiven = Precision | Literal["compact", "float32", "bfloat16"]
Trainable = str | Sequence[str] | Callable[[str], bool] | None
EvalData = Iterable[Any] | Callable[[], Iterable[Any]]

# JAX converts a seed to a signed 64-bit integer.
_LEAST_SEED, _MOST_SEED = -(2**63), 2**63 - 1


class RunArguments(TypedDict, total=False):
    """The fields of `Options` as arguments, for type checkers."""

    microbatches: Microbatches
    waves: int | None
    precision: PrecisionGiven
    device_budget: DeviceBudget
    host_budget: HostBudget
    trainable: Trainable
    on_nonfinite: OnNonfinite
    max_skipped: int
    seed: int
    hardware: Hardware | str | None
    mesh: Mesh | AbstractMesh | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run and its steps; see `Trainer`. Integers are stored as Python `int`s.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option's value is not allowed.
    """

    microbatches: Microbatches = 1
    waves: int | None = None
    precision: PrecisionGiven = Precision()
    device_budget: DeviceBudget = None
    host_budget: HostBudget = None
    trainable: Trainable = None
    on_nonfinite: OnNonfinite = "raise"
    max_skipped: int = 10
    seed: int = 0
    hardware: Hardware | str | None = None
    mesh: Mesh | AbstractMesh | None = None

    @property
    def num_devices(self) -> int:
        """The number of devices that share the run; one if no mesh is given."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def least_microbatches(self) -> int:
        """The number of microbatches; 1 if the plan chooses it."""
        return 1 if isinstance(self.microbatches, str) else self.microbatches

    @property
    def host_bytes(self) -> int | None:
        """Bytes of host memory that the process may take; None for all of the machine's."""
        assert not isinstance(self.host_budget, str)
        return self.host_budget

    @property
    def machine(self) -> Hardware | None:
        """The hardware as a record, also if a name was given."""
        assert not isinstance(self.hardware, str)
        return self.hardware

    @property
    def dtypes(self) -> Precision:
        """The precision, which is stored as a record where a name was given."""
        assert not isinstance(self.precision, str)
        return self.precision

    def __post_init__(self) -> None:
        """Checks every option."""
        _store(
            self,
            precision=precision_of("precision", self.precision),
            trainable=trainable_of(self.trainable),
            microbatches=_microbatches(self.microbatches),
            waves=_integer_or_none("waves", self.waves),
            device_budget=checks.num_bytes("device_budget", self.device_budget, "least"),
            host_budget=checks.num_bytes("host_budget", self.host_budget),
            max_skipped=checks.integer("max_skipped", self.max_skipped),
            seed=checks.integer("seed", self.seed, least=_LEAST_SEED, most=_MOST_SEED),
            hardware=found_hardware(self.hardware),
        )
        _check_waves(self.waves, self.microbatches)
        _check_on_nonfinite(self.on_nonfinite)
        check_products(self.dtypes, self.machine)
        check_mesh_given(self.mesh)


class MachineArguments(TypedDict, total=False):
    """The fields of `MachineOptions` as arguments, for type checkers."""

    host_gib: float | None
    num_gpus: int | None


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The options of a plan that change its hardware; see `plan`.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option's value is not allowed.
    """

    host_gib: float | None = None
    num_gpus: int | None = None

    def __post_init__(self) -> None:
        """Checks every option."""
        if self.host_gib is not None:
            _store(self, host_gib=checks.number("host_gib", self.host_gib, above=0))
        _store(self, num_gpus=_integer_or_none("num_gpus", self.num_gpus))

    def applied(self, run: Options) -> Options:
        """The options of a run on the changed hardware.

        Raises:
            ValueError: If there is no hardware to change, or a mesh sets the number of GPUs.
        """
        machine, mesh = run.machine, run.mesh
        if self.host_gib is not None:
            if machine is None:
                raise ValueError(f"`host_gib`={self.host_gib:g} needs `hardware`")
            machine = replace(machine, host_bytes=int(self.host_gib * 2**30))
        if self.num_gpus is not None:
            if mesh is not None:
                raise ValueError(f"`num_gpus`={self.num_gpus} and `mesh` can't both be given")
            mesh = AbstractMesh((self.num_gpus,), ("data",))
        return replace(run, hardware=machine, mesh=mesh)


class PlanArguments(MachineArguments, RunArguments, total=False):
    """All options of `plan`, the union of both records."""


class LoopArguments(TypedDict, total=False):
    """The fields of `LoopOptions` as arguments, for type checkers."""

    steps: int | None
    epochs: int | None
    eval_data: EvalData | None
    eval_every: int | None
    checkpoint_dir: str | PathLike[str] | None
    checkpoint_every: int | None
    keep: int
    callbacks: Sequence[Callable[[Any, dict[str, Any]], None]]
    progress: bool


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """The options of the training loop; see `fit`. Integers are stored as Python `int`s.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option's value is not allowed, or an option that it needs is missing.
    """

    steps: int | None = None
    epochs: int | None = None
    eval_data: EvalData | None = None
    eval_every: int | None = None
    checkpoint_dir: str | PathLike[str] | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    callbacks: Sequence[Callable[[Any, dict[str, Any]], None]] = ()
    progress: bool = True

    def __post_init__(self) -> None:
        """Checks every option."""
        _store(
            self,
            steps=_integer_or_none("steps", self.steps),
            epochs=_integer_or_none("epochs", self.epochs),
            eval_every=_integer_or_none("eval_every", self.eval_every),
            checkpoint_every=_integer_or_none("checkpoint_every", self.checkpoint_every),
            keep=checks.integer("keep", self.keep),
            callbacks=_callbacks(self.callbacks),
            progress=checks.boolean("progress", self.progress),
        )
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"`steps`={self.steps} and `epochs`={self.epochs} can't both be given")
        if self.eval_data is not None:
            _check_eval_data(self.eval_data)
        elif self.eval_every is not None:
            raise ValueError(f"`eval_every`={self.eval_every} needs `eval_data`")
        if self.checkpoint_dir is not None:
            checks.path("checkpoint_dir", self.checkpoint_dir, ", or None")
        elif self.checkpoint_every is not None:
            raise ValueError(f"`checkpoint_every`={self.checkpoint_every} needs a `checkpoint_dir`")
        elif self.keep != LoopOptions.keep:
            raise ValueError(f"`keep`={self.keep} needs a `checkpoint_dir`")

    @property
    def rhythm(self) -> dict[str, Any]:
        """The options that must be equal in all processes of a run, because they act together."""
        return {
            "`steps`": self.steps,
            "`eval_data`": self.eval_data is not None,
            "`eval_every`": self.eval_every,
            "`checkpoint_every`": self.checkpoint_every,
            "`keep`": self.keep,
        }


class FitArguments(LoopArguments, RunArguments, total=False):
    """All options of `fit`, the union of both records."""


_Function = TypeVar("_Function", bound=Callable[..., Any])
_Record = TypeVar("_Record", Options, LoopOptions, MachineOptions)
_TAKERS = (
    (Options, "`Trainer` and `fit` take"),
    (LoopOptions, "`fit` and `train` take"),
    (MachineOptions, "`plan` takes"),
)
_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def shows(*records: type) -> Callable[[_Function], _Function]:
    """A decorator that shows records' fields in a function's signature instead of `**options`.

    So `help`, notebooks, `inspect` and `typing.get_type_hints` show every option, after the
    positional arguments and before the function's own keyword arguments.
    """

    def decorated(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        placed = [p for p in own if p.kind is not _BY_NAME]
        options = [
            inspect.Parameter(f.name, _BY_NAME, default=f.default, annotation=f.type)
            for record in records
            for f in fields(record)
        ]
        shown = [*placed, *options, *own[len(placed) :]]
        function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        returned = {k: v for k, v in function.__annotations__.items() if k == "return"}
        function.__annotations__ = {p.name: p.annotation for p in shown} | returned
        return function

    return decorated


def options_of(
    function: Callable[..., Any], record: type[_Record], given: Mapping[str, Any]
) -> _Record:
    """Makes a record from the options of a function that belong to the record.

    Args:
        function: A function that `shows` the record.
        record: The record's class.
        given: The function's `**options`.

    Raises:
        TypeError: If the function has no such option, or an option has the wrong type.
        ValueError: See the record.
    """
    check_names(function, given)
    # A function may show two records, and each takes its own options.
    own = {field.name for field in fields(record)}
    return record(**{name: value for name, value in given.items() if name in own})


def check_names(function: Callable[..., Any], given: Iterable[str]) -> None:
    """Checks that a function takes keywords of these names.

    Raises:
        TypeError: If it doesn't take one; the message suggests the intended option.
    """
    allowed = inspect.signature(function).parameters
    for name in given:
        if name not in allowed:
            takers = {f.name: words for record, words in _TAKERS for f in fields(record)}
            raise TypeError(unknown_option(function.__qualname__, name, allowed, takers))


def are_batches(value: Any) -> bool:
    """Whether a value looks like an iterable of batches, not like a single batch."""
    # A batch is usually a dict, which is also iterable: over its keys.
    is_one = isinstance(value, Mapping | str | bytes) or getattr(value, "shape", None) == ()
    return isinstance(value, Iterable) and not is_one


def _store(record: Any, **values: Any) -> None:
    for name, value in values.items():
        # The way a frozen dataclass sets its own fields.
        object.__setattr__(record, name, value)


def _integer_or_none(name: str, value: Any) -> int | None:
    return None if value is None else checks.integer(name, value, other=", or None")


def _microbatches(value: Any) -> Microbatches:
    if isinstance(value, str) and value == "auto":
        return "auto"
    return checks.integer("microbatches", value, other=', or "auto"')


def _check_waves(waves: int | None, microbatches: Microbatches) -> None:
    if waves is None or waves == 1:
        return
    if isinstance(microbatches, str):
        raise ValueError(
            f'`waves`={waves} needs a number of `microbatches`: with "auto" the plan chooses both'
        )
    if microbatches % waves:
        raise ValueError(
            f"`waves`={waves} does not divide `microbatches`={microbatches}: each wave has equally "
            "many microbatches"
        )


def _check_on_nonfinite(value: Any) -> None:
    allowed = get_args(OnNonfinite)
    if not isinstance(value, str):
        raise TypeError(refused("on_nonfinite", '"raise" or "skip"', value))
    if value not in allowed:
        raise ValueError(refused("on_nonfinite", '"raise" or "skip"', value))


def _callbacks(value: Any) -> tuple[Callable[..., None], ...]:
    allowed = "a sequence of functions callback(trainer, record)"
    if isinstance(value, Mapping | str | bytes) or not isinstance(value, Iterable):
        hint = "pass [f], a list, for one function f" if callable(value) else ""
        raise TypeError(refused("callbacks", allowed, value, hint))
    callbacks = tuple(value)
    for i, callback in enumerate(callbacks):
        if not callable(callback) or not checks.can_be_called(callback, 2):
            raise TypeError(refused(f"callbacks[{i}]", "a function (trainer, record)", callback))
    return callbacks


def _check_eval_data(value: Any) -> None:
    # Refused now, not at the second evaluation, hours later.
    if isinstance(value, Iterator):
        raise TypeError(
            "`eval_data` is an iterator, which can be used only once, but each evaluation goes "
            "through it anew: pass a list, or a function that returns a new iterator"
        )
    if isinstance(value, list | tuple) and not value:
        raise ValueError("`eval_data` is empty")
    if are_batches(value):
        return
    if isinstance(value, Iterable) or not callable(value):
        raise TypeError(
            "`eval_data` must be an iterable of batches or a function that returns one, but is of "
            f"type {type(value).__name__}"
        )
    if not checks.can_be_called(value, 0):
        raise TypeError(refused("eval_data", "a function without arguments", value))
