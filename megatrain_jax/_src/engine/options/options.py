"""The options of a run, as records with checks.

`fit`, `train`, `Trainer` and `plan` make these records from their keywords first. So a mistake is
reported before data is drawn, and before anything is traced, made or saved. An option is declared
here alone: a field, its text, and its check. `python tests/signatures.py` writes it into the calls.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, TypeVar, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.checks import refused
from megatrain_jax._src.common.object_paths import AnyPath, path_of
from megatrain_jax._src.common.sizes import bytes_of, counted, rate_of, read_and_write_rates
from megatrain_jax._src.common.suggestions import did_you_mean
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.adapt.loss_function import EVAL_PREFIX, check_loss
from megatrain_jax._src.engine.options.machine import (
    check_mesh_given,
    check_products,
    found_hardware,
)
from megatrain_jax._src.engine.options.precision import Precision
from megatrain_jax._src.engine.state.drive import ORDINARY_MEMORY
from megatrain_jax._src.engine.state.hardware import Hardware

Microbatches = int | Literal["auto"]
StatePerProcess = bool | Literal["auto"]
DeviceBudget = int | str | None
HostBudget = int | str | None
OnNonfinite = Literal["raise", "skip"]
PrecisionGiven = (
    Precision | Literal["auto", "compact", "two_bytes", "float32", "bfloat16", "float16"]
)
TrainableFilter = (
    str | type | bool | EllipsisType | Callable[[str], bool] | Callable[[Any, Any], bool]
)
DiskRates = float | str | tuple[float, float] | None
DiskDir = str | PathLike[str] | Sequence[str | PathLike[str]] | None
Trainable = TrainableFilter | Sequence[TrainableFilter] | None
EvalData = Iterable[Any] | Callable[[], Iterable[Any]]
Callbacks = Sequence[Callable[[Any, dict[str, Any]], None]]
WhichParams = Literal["trained", "ema"]
EmaDecay = float | Callable[[Any], Any] | None

_Record = TypeVar("_Record", "Options", "MachineOptions", "LoopOptions")
# A smaller number was meant in GiB: no device has 1024 GiB, and any model needs 1024 bytes.
_LEAST_DEVICE_BYTES = 1024
# JAX converts a seed to a signed 64-bit integer.
_LEAST_SEED, _MOST_SEED = -(2**63), 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run and its steps; see `Trainer`. Integers are stored as Python `int`s.

    Attributes:
        microbatches: Number of equal parts that each training batch is split into, or "auto". The
            loss and the gradient are the means over the parts. "auto" lets the plan choose this
            number and the number of waves, by the GPU's memory; it is 1 without a GPU. The loss
            should then be a mean over examples: a sum would depend on the number.
        waves: Number of equal groups of microbatches that go through forward and backward one after
            another. Each wave fetches all weights, and only its own activations exist meanwhile.
            None lets the plan choose; it is 1 if several blocks read a parameter, such as a tied
            embedding, as the sum of its gradients would be rounded differently.
        precision: A `Precision`, or a name: "compact" and "two_bytes" for its methods, "bfloat16",
            "float16" and "float32" for the dtype of the computation, or "auto" for bfloat16, or
            float16 on a GPU without it.
        device_budget: Bytes of device memory for state and activations, or text such as "22GiB",
            "minimum", or None ("auto") for all that compiled functions leave. With a larger budget,
            less is transferred and less is recomputed: results may then differ in the last bits.
            "minimum" is the smallest budget with which no step waits for memory; None is that, too,
            if JAX doesn't report the device's memory.
        host_budget: Maximum bytes of host memory of the process, or text such as "200GiB"; None for
            all that is available at the start, less a reserve. JAX, CUDA, XLA, compilation, reading
            and saving count, too. With less, more is recomputed in backward.
        disk_dir: Folder, or list of folders of different drives, for the part of the state that the
            host's memory can't hold; None for none. It lies there in files without a name, which
            are gone when the process ends, so a run continues from its checkpoints. The drives are
            timed at the start. Each process of a run takes space for its own devices.
        disk_budget: Maximum bytes that the process may take in `disk_dir`, or text such as
            "500GiB"; None for what is free.
        trainable: The parameters to train, as names or a regular expression in their paths, a
            predicate of the path, a filter of `flax.nnx`, or a list of these; None trains all.
            Names such as "head" or "layers/3" are whole ones: "head" does not find
            ``multihead/kernel``. Text with other characters, such as ``"layers/.*/(q|v)_proj"``, is
            an expression, which is searched for in the path as text. A filter is a
            type such as `nnx.LoRAParam`, `nnx.Not(...)`, or a predicate of path and variable. Any
            of a list may choose a parameter. Predicates return Booleans. A parameter made by
            ``nnx.Param(x, trainable=False)`` is never trained. Frozen parameters have
            neither gradients nor optimizer state and are only copied to the device, in
            `precision.frozen` if that is given; the optimizer sees `optax.MaskedNode` in their
            place. Running statistics, as of BatchNorm, are no parameters: those of frozen modules
            change too, unless these are in evaluation mode: `model.backbone.eval()` in NNX,
            `use_running_average=True` in Linen.
        eval_loss_fn: Loss function to evaluate with, called as `loss_fn` is; None for `loss_fn`. A
            Linen module that is called differently in training needs one, as in ``model(x,
            train=False)``; an NNX module is evaluated as after ``.eval()``.
        on_nonfinite: The action if a loss or a gradient is not finite: "raise", or "skip" to leave
            everything but the step number unchanged and continue. Skipping is decided over all
            gradients, so no parameter is updated before all are known. Steps in float16 always
            skip: this is how the scale of the loss is found.
        ema_decay: Decay of an exponential moving average of the trained parameters, or an Optax
            schedule of it; None keeps no average. It begins with the initial parameters. After each
            update it is ``decay * average + (1 - decay) * parameters``. `Trainer.ema_params` has
            it, and `evaluate` computes with it if asked. It is stored and copied like one more
            moment of the optimizer: in fp32, or where `Precision.state` is narrower in bfloat16,
            which is rounded stochastically. Skipped steps don't change it.
        max_skipped: Number of consecutive skipped steps that is an error. In float16 it is an error
            only if the loss is not finite or its scale is already 1.
        seed: Seed of a Linen module's parameters and of the keys for `loss_fn`. An NNX module draws
            from its own `nnx.Rngs`: its dropout depends on their seed.
        hardware: The machine whose rates the schedule and `plan` use, a `Hardware` or a card's name
            such as "H100"; None for this machine, or an H200 without a GPU.
        mesh: The devices to train on; None for all GPUs that JAX sees, or else its first device. It
            is a `jax.sharding.Mesh` with any axes, with equally many devices of each process or
            only of this one. Each device has its share of the state and of the batch. The loss is
            still over the whole batch; each process passes its part.
        state_per_process: Whether each of several processes holds all state on its own devices
            instead of a share ("hybrid sharding"). Gradients then cross the network once per step,
            and weights never, where shared state is gathered for each microbatch; each host needs
            memory for all of it. Each process computes the loss of its own part of the batch, and
            the loss is the mean of these, as over microbatches. Best with one process per host.
            "auto" takes the faster way by the plan's clock, for which a run measures the network.
            `microbatches` are then those of the whole batch, of which each process has an equal
            number, or "auto"; otherwise the state is shared, because steps would differ.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option's value is not allowed.
    """

    microbatches: Microbatches = 1
    waves: int | None = None
    precision: PrecisionGiven = "auto"
    device_budget: DeviceBudget = None
    host_budget: HostBudget = None
    disk_dir: DiskDir = None
    disk_budget: HostBudget = None
    trainable: Trainable = None
    eval_loss_fn: Callable[..., Any] | None = None
    on_nonfinite: OnNonfinite = "raise"
    ema_decay: EmaDecay = None
    max_skipped: int = 10
    seed: int = 0
    hardware: Hardware | str | None = None
    mesh: Mesh | AbstractMesh | None = None
    state_per_process: StatePerProcess = False

    @property
    def num_devices(self) -> int:
        """The number of devices that share the state; one if no mesh is given."""
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
    def disk_folders(self) -> tuple[Path, ...]:
        """The folders for state that the host's memory can't hold."""
        assert isinstance(self.disk_dir, tuple | None)
        return tuple(map(Path, self.disk_dir or ()))

    @property
    def is_disk_memory(self) -> bool:
        """Whether what would rest on disks rests in memory that isn't pinned."""
        return self.disk_folders == (ORDINARY_MEMORY,)

    @property
    def disk_bytes(self) -> int | None:
        """Bytes that the process may take there; None for what is free."""
        assert not isinstance(self.disk_budget, str)
        return self.disk_budget

    @property
    def has_disk(self) -> bool:
        """Whether state may rest on disks: here, or in a plan on the disks of its hardware."""
        on_machine = self.machine is not None and self.machine.disk_read_bytes_per_s is not None
        return self.disk_dir is not None or on_machine

    @property
    def machine(self) -> Hardware | None:
        """The hardware as a record, also if a name was given."""
        assert not isinstance(self.hardware, str)
        return self.hardware

    @property
    def dtypes(self) -> Precision:
        """The precision as a record, also if a name was given, with the machine's compute dtype."""
        assert not isinstance(self.precision, str)
        return self.precision.on(self.machine)

    def on_own_devices(self, mesh: Mesh | AbstractMesh, copies: int) -> "Options":
        """The options of one of several processes that each hold all state, on its own devices."""
        machine = self.machine and replace(self.machine, hosts=1, copies=copies)
        return replace(self, hardware=machine, mesh=mesh, state_per_process=True)

    def __post_init__(self) -> None:
        """Checks every option."""
        _store(
            self,
            precision=Precision.of(self.precision),
            trainable=_trainable(self.trainable),
            microbatches=_or_auto("microbatches", self.microbatches, checks.integer),
            waves=_integer_or_none("waves", self.waves, "None for the plan's choice"),
            device_budget=checks.device_budget(self.device_budget, _LEAST_DEVICE_BYTES),
            host_budget=checks.num_bytes("host_budget", self.host_budget),
            disk_dir=_disk_dir(self.disk_dir),
            disk_budget=checks.num_bytes("disk_budget", self.disk_budget),
            ema_decay=_decay(self.ema_decay),
            max_skipped=checks.integer("max_skipped", self.max_skipped),
            seed=checks.integer("seed", self.seed, least=_LEAST_SEED, most=_MOST_SEED),
            hardware=found_hardware(self.hardware),
            state_per_process=_or_auto("state_per_process", self.state_per_process, checks.boolean),
        )
        if self.disk_budget is not None and self.disk_dir is None:
            raise ValueError(f"`disk_budget`={self.disk_budget} is given without `disk_dir`")
        if self.eval_loss_fn is not None:
            check_loss(self.eval_loss_fn, "eval_loss_fn")
        _check_waves(self.waves, self.microbatches)
        checks.word("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        check_products(self.dtypes, self.machine)
        check_mesh_given(self.mesh)
        if self.machine is not None and self.num_devices % self.machine.hosts:
            raise ValueError(
                f"`mesh` has {counted(self.num_devices, 'device')}, which the "
                f"{self.machine.hosts} hosts of `hardware` can't have equally many of"
            )


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The options of a plan that change its hardware, or measure it; see `plan`.

    Attributes:
        host_gib: Host memory of that machine in GiB, or text with a unit such as "512GiB"; None for
            the host memory of `hardware`.
        num_gpus: Number of GPUs of each host to plan for, instead of `mesh`.
        hosts: Number of such hosts, which share the batch and, unless `state_per_process`, the
            state; None for one.
        network: Rate at which each host receives from the others while it sends as much, in bytes
            per second or as text: "400Gb/s" of bits, "50GB/s" of bytes, "8x400Gb/s" for eight cards
            of a host. None for the rate of `hardware`, or else a network that takes no time.
        disk: Rates of each host's disks, "7GB/s read, 2GB/s write", or one rate for both: state
            that the host's memory can't hold rests there. None for the disks of `hardware`, which a
            known card doesn't have.
        measure: Whether to plan for this machine's GPU, and to compile and time the step's
            functions on it, as the start of a run does: the seconds then come from measured times,
            and the bytes of functions from the compiler. Nothing is measured if the run doesn't fit
            on the GPU.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option's value is not allowed.
    """

    host_gib: float | str | None = None
    num_gpus: int | None = None
    hosts: int | None = None
    network: float | str | None = None
    disk: DiskRates = None
    measure: bool = False

    def __post_init__(self) -> None:
        """Checks every option."""
        if self.host_gib is not None:
            _store(self, host_gib=_gib("host_gib", self.host_gib))
        _store(
            self,
            num_gpus=_integer_or_none("num_gpus", self.num_gpus),
            hosts=_integer_or_none("hosts", self.hosts),
            network=_rate("network", self.network),
            disk=_disk_rates(self.disk),
        )
        checks.boolean("measure", self.measure)
        for name in ("host_gib", "num_gpus", "hosts", "network", "disk"):
            if self.measure and getattr(self, name) is not None:
                raise ValueError(
                    f"`measure`=True times functions on this machine's GPUs, and `{name}` "
                    "describes another machine: leave one of them out (`mesh` chooses GPUs, "
                    "`host_budget` limits host memory)"
                )

    def applied(self, run: Options) -> Options:
        """The options of a run on the changed hardware.

        Raises:
            ValueError: If there is no hardware to change, or a mesh sets the number of GPUs.
        """
        machine, mesh = run.machine, run.mesh
        assert not isinstance(self.host_gib, str)
        read, written = self.disk if isinstance(self.disk, tuple) else (None, None)
        of_host = None if self.host_gib is None else int(self.host_gib * 2**30)
        rows: list[tuple[str, str, Any]] = [
            ("host_gib", "host_bytes", of_host),
            ("hosts", "hosts", self.hosts),
            ("network", "network_bytes_per_s", self.network),
            ("disk", "disk_read_bytes_per_s", read),
            ("disk", "disk_write_bytes_per_s", written),
        ]
        rows = [row for row in rows if row[2] is not None]
        if rows and machine is None:
            option = rows[0][0]
            raise ValueError(f"`{option}`={_plainly(getattr(self, option))} needs `hardware`")
        machine = machine and replace(machine, **{field: value for _, field, value in rows})
        number = 1 if machine is None else machine.hosts
        if self.network is not None and number == 1:
            raise ValueError(f"`network`={_plainly(self.network)} connects hosts: it needs `hosts`")
        if self.num_gpus is not None:
            if mesh is not None:
                raise ValueError(f"`num_gpus`={self.num_gpus} and `mesh` can't both be given")
            mesh = AbstractMesh((number * self.num_gpus,), ("data",))
        if self.hosts is not None and mesh is None:
            mesh = AbstractMesh((number,), ("data",))  # with one GPU each
        run = replace(run, hardware=machine, mesh=mesh)
        if machine is None or number == 1 or not run.state_per_process:
            return replace(run, state_per_process=False)
        if run.state_per_process == "auto":
            return run
        # The plan of one host, with a process of its own.
        return run.on_own_devices(AbstractMesh((run.num_devices // number,), ("data",)), number)


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """The options of the training loop; see `fit`. Integers are stored as Python `int`s.

    Attributes:
        steps: Number of batches to train on, including those before a checkpoint; None trains until
            `data` ends.
        epochs: Number of passes over `data` instead of `steps`. `data` must have a length and be
            iterable anew, as a list is; otherwise give `steps`.
        eval_data: Evaluation batches, iterated anew each time, or a function that returns them. The
            first batch is checked before the first step; a function is called for that, and its
            result serves the first evaluation.
        eval_every: Evaluate after each multiple of this number of steps; None for after each epoch
            of `epochs`, or only at the end. If there is `eval_data`, the end of the run is always
            evaluated, even for a finished run that was not.
        eval_params: "ema" to evaluate averages of the parameters, which `ema_decay` keeps.
        checkpoint_dir: Folder of the run's checkpoints, one subfolder per step, each an ordinary
            Orbax checkpoint. The last step is always saved. On a local or mounted disk, or in an
            object store, as "gs://bucket/folder" or "s3://bucket/folder"; no second
            run can write there at the same time.
        checkpoint_every: Save after each multiple of this number of steps. Training continues while
            a checkpoint is written.
        keep: Number of newest checkpoints to keep.
        callbacks: Called in order as ``callback(trainer, record)`` with each complete record.
            Records are read late, so the trainer may already have dispatched the step after the
            record's. A callback can end the run early by raising `StopTraining`. Methods `begin`
            and `end`, if it has them, are called at the run's begin and end; see
            `megatrain_jax.callbacks.Callback`.
        stall_seconds: In a run of several processes, the seconds after which it ends with an error
            if no process has got on: has computed, compiled, written or read a part, or drawn a
            batch. Each process then prints the stacks of its threads, and the last step is saved if
            no process hangs outside of Python. It is at least three times the longest such pause
            before. None for no limit. A callback, or data, that takes longer needs a larger number.
        progress: Whether to show a progress bar; without it nothing is printed, except that a
            signal ended the run.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option's value is not allowed, or an option that it needs is missing.
    """

    steps: int | None = None
    epochs: int | None = None
    eval_data: EvalData | None = None
    eval_every: int | None = None
    eval_params: WhichParams = "trained"
    checkpoint_dir: str | PathLike[str] | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    callbacks: Callbacks = ()
    stall_seconds: float | None = 600.0
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
            stall_seconds=None
            if self.stall_seconds is None
            else checks.number("stall_seconds", self.stall_seconds, above=0),
            progress=checks.boolean("progress", self.progress),
        )
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"`steps`={self.steps} and `epochs`={self.epochs} can't both be given")
        check_which(self.eval_params, "eval_params")
        if self.eval_data is not None:
            _check_eval_data(self.eval_data)
        elif self.eval_every is not None:
            raise ValueError(f"`eval_every`={self.eval_every} needs `eval_data`")
        elif self.eval_params != "trained":
            raise ValueError(f"`eval_params`={self.eval_params!r} needs `eval_data`")
        if self.checkpoint_dir is not None:
            checks.path("checkpoint_dir", self.checkpoint_dir, ", or None")
        elif self.checkpoint_every is not None:
            raise ValueError(f"`checkpoint_every`={self.checkpoint_every} needs a `checkpoint_dir`")
        elif self.keep != LoopOptions.keep:
            raise ValueError(f"`keep`={self.keep} needs a `checkpoint_dir`")
        self._check_folders()

    def _check_folders(self) -> None:
        """Checks that nobody removes checkpoints of the run, or of another callback.

        Raises:
            ValueError: If two of them use one folder.
        """
        used: list[tuple[str, AnyPath, str]] = []
        if self.checkpoint_dir is not None:
            used.append(("`checkpoint_dir`", _real_path(self.checkpoint_dir), "best"))
        for i, callback in enumerate(self.callbacks):
            if not isinstance(given := getattr(callback, "own_checkpoints", None), str | PathLike):
                continue
            name = f"`callbacks[{i}]`, {type(callback).__name__},"
            folder = _real_path(given)
            for other, there, subfolder in used:
                if _are_mixed(folder, there):
                    raise ValueError(
                        f"{name} with `folder`={os.fspath(given)!r} and {other} with {there} keep "
                        "checkpoints in one folder, and would remove each other's: pass another "
                        f"`folder`, such as {str(there / subfolder)!r}"
                    )
            used.append((name, folder, f"of_{getattr(callback, 'metric', i)}"))

    def check_evaluated(self, length: int | None = None, *, at_end: bool) -> None:
        """Checks that callbacks that decide by an evaluation's metric will see some.

        Args:
            length: Number of the data's batches; None if it is unknown.
            at_end: Whether one evaluation at the end is enough, since the caller may go on.

        Raises:
            ValueError: If a callback would see none.
        """
        for i, callback in enumerate(self.callbacks):
            metric = getattr(callback, "metric", None)
            if not isinstance(metric, str) or not metric.startswith(EVAL_PREFIX):
                continue
            every, steps = self.eval_every, self.steps or length
            is_late = every is None or steps is not None and every > steps
            if self.eval_data is None or is_late and not at_end:
                smaller = f"an `eval_every` smaller than {every}, of {steps} steps"
                lacking = smaller if every else "`eval_every` or `epochs`"
                lacking = "`eval_data`" if self.eval_data is None else lacking
                raise ValueError(
                    f"`callbacks[{i}]`, {type(callback).__name__}, decides by {metric!r}, of "
                    f"evaluations, and there will be none during training: pass {lacking}"
                )

    def decides_by(self, prefix: str) -> bool:
        """Whether a callback decides by a metric with this prefix."""
        metrics = [getattr(callback, "metric", None) for callback in self.callbacks]
        return any(isinstance(metric, str) and metric.startswith(prefix) for metric in metrics)

    def check_metrics(self, names: Sequence[str], prefix: str) -> None:
        """Checks that records will have the metrics by which callbacks decide.

        A callback that doesn't say which metrics it adds, and any after it, is not checked.

        Args:
            names: The metrics of evaluations, or of steps.
            prefix: The prefix in records of the evaluations' metrics; "" for those of steps.

        Raises:
            ValueError: If a callback decides by another metric.
        """
        shown = [prefix + name for name in names]
        for i, callback in enumerate(self.callbacks):
            if (added := getattr(callback, "adds_metrics", None)) is None:
                return
            shown += added
            metric = getattr(callback, "metric", None)
            if not isinstance(metric, str) or metric.startswith(EVAL_PREFIX) != bool(prefix):
                continue
            if metric not in shown:
                kind = "evaluations" if prefix else "steps"
                evaluated = EVAL_PREFIX + _OF_VALIDATION.sub("", metric)
                known = [*shown, *(EVAL_PREFIX + name for name in names)]
                near = did_you_mean(metric, shown)
                if not prefix and evaluated in known:  # as Keras and Lightning call it
                    near = f"; did you mean `{evaluated}`, of `eval_data`?"
                raise ValueError(
                    f"`callbacks[{i}]`, {type(callback).__name__}, has `metric`={metric!r}, but "
                    f"{kind} have {', '.join(shown)}{near}"
                )

    def warn_of_training_metrics(self, evaluated: Sequence[str]) -> None:
        """Warns of callbacks that decide by training batches where evaluations have the metric.

        Args:
            evaluated: The metrics of evaluations.
        """
        for i, callback in enumerate(self.callbacks):
            metric = getattr(callback, "metric", None)
            if isinstance(metric, str) and metric in evaluated:
                warn_user(
                    f"`callbacks[{i}]`, {type(callback).__name__}, decides by {metric!r}, of each "
                    f"training batch; of `eval_data` it is {EVAL_PREFIX + metric!r}"
                )

    @property
    def agreed_options(self) -> dict[str, Any]:
        """The options that must be equal in all processes, which step and save together."""
        return {
            "`steps`": self.steps,
            "`eval_data`": self.eval_data is not None,
            "`eval_every`": self.eval_every,
            "`eval_params`": self.eval_params,
            "`checkpoint_every`": self.checkpoint_every,
            "`keep`": self.keep,
            "`stall_seconds`": self.stall_seconds,
        }


def taken(record: type[_Record], given: Mapping[str, Any]) -> _Record:
    """A record of options, from all arguments of a call."""
    return record(**{field.name: given[field.name] for field in fields(record)})


def _real_path(value: str | PathLike[str]) -> AnyPath:
    with suppress(ValueError, RuntimeError):  # it is refused later
        if not isinstance(path := path_of(os.fspath(value)), Path):
            return path
    return Path(os.path.realpath(os.path.expanduser(value)))


def _are_mixed(one: AnyPath, other: AnyPath) -> bool:
    """Whether two folders of checkpoints are the same, or one has the place of a step of the other.

    Both are real paths.
    """
    pairs = [(one, other)]
    pairs += [(a.parent, b) for a, b in ((one, other), (other, one)) if a.name.isdecimal()]
    for a, b in pairs:
        with suppress(OSError):  # one of them doesn't exist
            if a == b or isinstance(a, Path) and isinstance(b, Path) and a.samefile(b):
                return True
    return False


_OF_VALIDATION = re.compile("^(val|valid|validation|dev|test)_")


def are_batches(value: Any) -> bool:
    """Whether a value looks like an iterable of batches, not like a single batch."""
    # A batch is usually a dict, which is also iterable: over its keys. An array of all examples
    # would be trained on one by one.
    is_one = isinstance(value, Mapping | str | bytes | np.generic | np.ndarray | jax.Array)
    return isinstance(value, Iterable) and not is_one


def _store(record: Any, **values: Any) -> None:
    for name, value in values.items():
        # The way a frozen dataclass sets its own fields.
        object.__setattr__(record, name, value)


def _integer_or_none(name: str, value: Any, none: str = "None") -> int | None:
    return None if value is None else checks.integer(name, value, other=f", or {none}")


def _trainable(value: Any) -> Any:
    """Returns the option `trainable`, a list as a tuple.

    Raises:
        TypeError: If it is neither a pattern, a function, a filter of `flax.nnx`, a list of these
            nor None.
        ValueError: If a pattern is no regular expression.
    """
    listed = tuple(value) if isinstance(value, list | tuple) and value else None
    for one in listed or (() if value is None else (value,)):
        if isinstance(one, str):
            checks.pattern("trainable", one)
        elif not isinstance(one, type | bool | EllipsisType) and not (
            callable(one) and any(checks.can_be_called(one, count) for count in (1, 2))
        ):
            allowed = (
                "a regular expression, a function of a parameter's path, a filter of flax.nnx "
                "(such as nnx.LoRAParam), a list of these, or None"
            )
            is_compiled = isinstance(one, re.Pattern)
            hint = f"pass the text {one.pattern!r}" if is_compiled else ""
            raise TypeError(refused("trainable", allowed, value, hint))
    return listed or value


def check_which(value: Any, name: str = "params") -> None:
    """Checks an argument that says which parameters to read: those trained, or their averages."""
    checks.word(name, value, get_args(WhichParams))


def _decay(value: Any) -> EmaDecay:
    if value is None or callable(value) and checks.can_be_called(value, 1):
        return value
    allowed = "a number from 0 to less than 1, a schedule of it, or None"
    if callable(value):
        raise TypeError(refused("ema_decay", allowed, value, "it is called with a step count"))
    found = checks.number("ema_decay", value, least=0)
    if found >= 1:
        raise ValueError(refused("ema_decay", allowed, value, "1 would never change the average"))
    return found


def _gib(name: str, value: Any) -> float:
    """A number of GiB, from a number or from text with any unit."""
    if isinstance(value, str):
        try:
            value = float(value)  # GiB, as the name of the argument has it
        except ValueError:
            return bytes_of(name, value) / 2**30
    return checks.number(name, value, above=0)


def _rate(name: str, value: Any) -> float | None:
    """Bytes per second, from a number or from text with a unit."""
    if value is None:
        return None
    return rate_of(name, value) if isinstance(value, str) else checks.number(name, value, above=0)


def _disk_rates(value: Any) -> Any:
    """Bytes per second read and written, from a number or from text; None without disks."""
    if value is None:
        return None
    if isinstance(value, str):
        return read_and_write_rates("disk", value)
    pair = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    if None in pair:
        raise TypeError(refused("disk", 'both rates, as in "7GB/s read, 2GB/s write"', value))
    read, written = (_rate("disk", rate) for rate in pair)
    return read, written


def _disk_dir(value: Any) -> tuple[str, ...] | None:
    """The folders, as absolute paths."""
    if value is None:
        return None
    folders = value if isinstance(value, list | tuple) and value else [value]
    paths = [checks.path("disk_dir", x, ", a list of such paths, or None") for x in folders]
    for path in paths:
        if "://" in path:
            raise ValueError(f"`disk_dir`={path!r} is a URL: give a folder of a drive of this host")
    return tuple(os.path.abspath(path) for path in paths)


def _or_auto(name: str, value: Any, check: Callable[..., Any]) -> Any:
    is_auto = isinstance(value, str) and value == "auto"
    return value if is_auto else check(name, value, other=', or "auto"')


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


def _callbacks(value: Any) -> tuple[Callable[..., None], ...]:
    allowed = "a sequence of functions callback(trainer, record)"
    if isinstance(value, Mapping | str | bytes) or not isinstance(value, Iterable):
        hint = "pass [f], a list, for one function f" if callable(value) else ""
        raise TypeError(refused("callbacks", allowed, value, hint))
    callbacks = tuple(value)
    for i, callback in enumerate(callbacks):
        if not callable(callback) or not checks.can_be_called(callback, 2):
            hint = (
                f"pass an instance, {callback.__name__}(...)" if isinstance(callback, type) else ""
            )
            raise TypeError(
                refused(f"callbacks[{i}]", "a function (trainer, record)", callback, hint)
            )
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
        is_one = isinstance(value, Mapping | np.ndarray | jax.Array)
        hint = "; to evaluate on one batch, pass [batch]" if is_one else ""
        raise TypeError(
            "`eval_data` must be an iterable of batches or a function that returns one, but is of "
            f"type {type(value).__name__}{hint}"
        )
    if not checks.can_be_called(value, 0):
        raise TypeError(refused("eval_data", "a function without arguments", value))


def _plainly(value: Any) -> str:
    """A number without needless digits, or a pair of rates."""
    return " and ".join(f"{x:g}" for x in (value if isinstance(value, tuple) else (value,)))
