"""`Trainer`: one run, which initialises its state, steps, evaluates, and returns the model."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.progress import tell, tell_phase, tqdm
from megatrain_jax._src.common.suggestions import ExplainedAttributes
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.adapt.adapters import adapt, needs_batch, unbound
from megatrain_jax._src.engine.checkpoint.given_parameters import with_given_parameters
from megatrain_jax._src.engine.checkpoint.save import Saving
from megatrain_jax._src.engine.checkpoint.saved_settings import with_saved_parts
from megatrain_jax._src.engine.history import History
from megatrain_jax._src.engine.kernels.bound_stage import BoundStage
from megatrain_jax._src.engine.options.batch_checks import check_batch, num_rows
from megatrain_jax._src.engine.options.inputs import check_order, check_parts
from megatrain_jax._src.engine.options.options import (
    DeviceBudget,
    DiskDir,
    EmaDecay,
    HostBudget,
    Microbatches,
    OnNonfinite,
    Options,
    PrecisionGiven,
    StatePerProcess,
    Trainable,
    WhichParams,
    taken,
)
from megatrain_jax._src.engine.report.make_plan import make_plan
from megatrain_jax._src.engine.report.plan import Plan
from megatrain_jax._src.engine.report.run_warnings import products_line, unused_seed
from megatrain_jax._src.engine.report.table import aligned, html_box, html_table
from megatrain_jax._src.engine.run_state import RunState
from megatrain_jax._src.engine.runtime.compute_copy import ComputeCopy
from megatrain_jax._src.engine.runtime.training import StepMetrics, with_memory_advice
from megatrain_jax._src.engine.schedule.schedule import Schedule
from megatrain_jax._src.engine.spec.run_spec import exact_dtypes
from megatrain_jax._src.engine.start import Prepared, local_run_spec, on_this_machine, start
from megatrain_jax._src.engine.state.hardware import Hardware
from megatrain_jax._src.engine.state.processes import Processes


class Trainer(ExplainedAttributes):
    """Trains one model whose parameters and optimizer state live in pinned host memory.

    Every read of the state first applies pending updates and moves all of it to the host. A trainer
    prints as a table of its model, its progress and its budget.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        sample_batch: Any,
        *,
        params: Any = None,
        continues: str | PathLike[str] | None = None,
        progress: bool = True,
        microbatches: Microbatches = 1,
        waves: int | None = None,
        precision: PrecisionGiven = "auto",
        device_budget: DeviceBudget = None,
        host_budget: HostBudget = None,
        disk_dir: DiskDir = None,
        disk_budget: HostBudget = None,
        trainable: Trainable = None,
        eval_loss_fn: Callable[..., Any] | None = None,
        on_nonfinite: OnNonfinite = "raise",
        ema_decay: EmaDecay = None,
        max_skipped: int = 10,
        seed: int = 0,
        hardware: Hardware | str | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        state_per_process: StatePerProcess = False,
    ):
        """Cuts the model, checks that it fits, and initialises its state in host memory.

        Args:
            model: An `nnx.Module`, a function without arguments that builds one, a
                `flax.linen.Module`, or a pytree of arrays.
            loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``, returning a scalar
                loss or ``(loss, metrics)``.
            optimizer: An Optax gradient transformation.
            sample_batch: A batch, or its `jax.ShapeDtypeStruct`s. Every array has a leading axis of
                examples; without microbatches, on one device, these axes may differ in size.
            params: Parameters to start from instead of the model's own: a tree of arrays under the
                model's paths (objects with a shape, a dtype and `__array__`, such as memory-mapped
                files, are read one by one), or the folder of a checkpoint that Orbax can read, or
                of a run, which stands for its newest checkpoint. Their dtype may be narrower than
                the masters', not wider. The model's statistics, as of BatchNorm, are taken from
                there, too; a warning names those that a folder lacks. Other variables are ignored,
                and a tree must contain nothing else.
            continues: Folder of the checkpoints that `train` will resume from, if there are any:
                with `microbatches` "auto", the numbers of microbatches and waves are those of the
                newest one, if they divide a batch.
            progress: Whether to show a progress bar while the state is made or restored.
            microbatches: Number of equal parts that each training batch is split into, or "auto".
                The loss and the gradient are the means over the parts. "auto" lets the plan choose
                this number and the number of waves, by the GPU's memory; it is 1 without a GPU. The
                loss should then be a mean over examples: a sum would depend on the number.
            waves: Number of equal groups of microbatches that go through forward and backward one
                after another. Each wave fetches all weights, and only its own activations exist
                meanwhile. None lets the plan choose; it is 1 if several blocks read a parameter,
                such as a tied embedding, as the sum of its gradients would be rounded differently.
            precision: A `Precision`, or a name: "compact" and "two_bytes" for its methods,
                "bfloat16", "float16" and "float32" for the dtype of the computation, or "auto" for
                bfloat16, or float16 on a GPU without it.
            device_budget: Bytes of device memory for state and activations, or text such as
                "22GiB", "minimum", or None ("auto") for all that compiled functions leave. With a
                larger budget, less is transferred and less is recomputed: results may then differ
                in the last bits. "minimum" is the smallest budget with which no step waits for
                memory; None is that, too, if JAX doesn't report the device's memory.
            host_budget: Maximum bytes of host memory of the process, or text such as "200GiB"; None
                for all that is available at the start, less a reserve. JAX, CUDA, XLA, compilation,
                reading and saving count, too. With less, more is recomputed in backward.
            disk_dir: Folder, or list of folders of different drives, for the part of the state that
                the host's memory can't hold; None for none. It lies there in files without a name,
                which are gone when the process ends, so a run continues from its checkpoints. The
                drives are timed at the start. Each process of a run takes space for its own
                devices.
            disk_budget: Maximum bytes that the process may take in `disk_dir`, or text such as
                "500GiB"; None for what is free.
            trainable: The parameters to train, as names or a regular expression in their paths, a
                predicate of the path, a filter of `flax.nnx`, or a list of these; None trains all.
                Names such as "head" or "layers/3" are whole ones: "head" does not find
                ``multihead/kernel``. Text with other characters, such as
                ``"layers/.*/(q|v)_proj"``, is an expression, which is searched for in the path as
                text. A filter is a type such as `nnx.LoRAParam`, `nnx.Not(...)`, or a predicate of
                path and variable. Any of a list may choose a parameter. Predicates return Booleans.
                A parameter made by ``nnx.Param(x, trainable=False)`` is never trained. Frozen
                parameters have neither gradients nor optimizer state and are only copied to the
                device, in `precision.frozen` if that is given; the optimizer sees
                `optax.MaskedNode` in their place. Running statistics, as of BatchNorm, are no
                parameters: those of frozen modules change too, unless these are in evaluation mode:
                `model.backbone.eval()` in NNX, `use_running_average=True` in Linen.
            eval_loss_fn: Loss function to evaluate with, called as `loss_fn` is; None for
                `loss_fn`. A Linen module that is called differently in training needs one, as in
                ``model(x, train=False)``; an NNX module is evaluated as after ``.eval()``.
            on_nonfinite: The action if a loss or a gradient is not finite: "raise", or "skip" to
                leave everything but the step number unchanged and continue. Skipping is decided
                over all gradients, so no parameter is updated before all are known. Steps in
                float16 always skip: this is how the scale of the loss is found.
            ema_decay: Decay of an exponential moving average of the trained parameters, or an Optax
                schedule of it; None keeps no average. It begins with the initial parameters. After
                each update it is ``decay * average + (1 - decay) * parameters``.
                `Trainer.ema_params` has it, and `evaluate` computes with it if asked. It is stored
                and copied like one more moment of the optimizer: in fp32, or where
                `Precision.state` is narrower in bfloat16, which is rounded stochastically. Skipped
                steps don't change it.
            max_skipped: Number of consecutive skipped steps that is an error. In float16 it is an
                error only if the loss is not finite or its scale is already 1.
            seed: Seed of a Linen module's parameters and of the keys for `loss_fn`. An NNX module
                draws from its own `nnx.Rngs`: its dropout depends on their seed.
            hardware: The machine whose rates the schedule and `plan` use, a `Hardware` or a card's
                name such as "H100"; None for this machine, or an H200 without a GPU.
            mesh: The devices to train on; None for all GPUs that JAX sees, or else its first
                device. It is a `jax.sharding.Mesh` with any axes, with equally many devices of each
                process or only of this one. Each device has its share of the state and of the
                batch. The loss is still over the whole batch; each process passes its part.
            state_per_process: Whether each of several processes holds all state on its own devices
                instead of a share ("hybrid sharding"). Gradients then cross the network once per
                step, and weights never, where shared state is gathered for each microbatch; each
                host needs memory for all of it. Each process computes the loss of its own part of
                the batch, and the loss is the mean of these, as over microbatches. Best with one
                process per host. "auto" takes the faster way by the plan's clock, for which a run
                measures the network. `microbatches` are then those of the whole batch, of which
                each process has an equal number, or "auto"; otherwise the state is shared, because
                steps would differ.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If an option is out of range, or model, loss, batch, parameters and options
                are inconsistent.
            CheckpointError: If `params` is a folder that Orbax can't read.
            MemoryError: If host or device memory is too small, or `host_budget`.
        """
        run = taken(Options, locals())
        order = "Trainer(model, loss_fn, optimizer, sample_batch)"
        check_order(order, optimizer, "sample_batch", sample_batch)
        prepared = prepare(
            model, loss_fn, optimizer, sample_batch, params, continues, progress, run
        )
        self._start(prepared)

    def _start(self, prepared: Prepared) -> None:
        spec, engine, seconds = start(prepared)
        self._end_tokens: tuple[int, ...] = ()
        self._startup = dict(seconds)
        self._state = RunState(spec, engine, prepared.sample_batch, prepared.progress)

    def __repr__(self) -> str:
        """Returns the model, the step and the budget as a plain text table."""
        return "Trainer\n" + aligned(self._state.cells())

    def _repr_html_(self) -> str:
        return html_box(html_table(self._state.cells()))

    @with_memory_advice()
    def step(self, batch: Any) -> StepMetrics:
        """Dispatches one training step, and adds its record to the history.

        Args:
            batch: A batch like the sample; each new shape is traced and compiled once.

        Returns:
            The loss, the loss function's metrics and the global norm of the gradients, as scalar
            device arrays: means over the microbatches, and the sum of a metric called "weight". The
            step may still be running; `read` waits for it.

        Raises:
            ValueError: If the batch does not fit.
            FloatingPointError: If an earlier step had a number that is not finite.
        """
        self._state.record(keep=1)  # completed steps; at most one step is in flight
        return self._state.train(batch, by_hand=True)

    @with_memory_advice()
    def dispatch(self, batch: Any) -> StepMetrics:
        """Dispatches one training step like `step`, but leaves its record to the caller."""
        return self._state.train(batch, by_hand=False)

    def check_batch(self, batch: Any) -> None:
        """Checks a batch like `step`, preferably while it is on the host.

        Raises:
            TypeError: If it is not a pytree of arrays.
            ValueError: If it differs from the sample, can't be cut into microbatches, or fails the
                model's own `check_batch`.
        """
        self._state.check(batch)

    def check_eval_batch(self, batch: Any, *, params: WhichParams = "trained") -> tuple[str, ...]:
        """Checks a batch like `evaluate`, but computes nothing; a large one is also scheduled.

        Args:
            batch: A batch.
            params: See `evaluate`.

        Returns:
            The names of the loss and the metrics that `evaluate` would return.
        """
        return self._state.check_evaluation(batch, params)

    @with_memory_advice()
    def read(self, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """Waits for a step and returns its metrics as Python numbers.

        If steps may be skipped, a metric "skipped" tells whether this one was.

        Raises:
            FloatingPointError: If its loss or a gradient was not finite, or an unread earlier
                step's, and such steps are not skipped. The message lists the updates that were made
                nevertheless; the step and later ones are no longer counted, and training can
                continue with the next batch. Also if too many consecutive steps were skipped.
        """
        return self._state.read(metrics)

    @with_memory_advice()
    def evaluate(
        self,
        batches: Iterable[Any],
        loss_fn: Callable[..., Any] | None = None,
        *,
        params: WhichParams = "trained",
    ) -> dict[str, float]:
        """Computes loss and metrics of batches without training on them.

        NNX modules run as after ``.eval()``. Pending updates are applied first.

        Args:
            batches: An iterable of batches.
            loss_fn: A loss function to use instead of the run's `eval_loss_fn` or training loss.
            params: "ema" to compute with the averages that `ema_decay` keeps. They are copied to
                the devices in the parameters' place, so this takes no further memory.

        Returns:
            Means over all batches. Each batch, and each of its microbatches, is weighted by the
            loss's metric "weight", or else by its number of examples. "weight" itself is the sum.

        Raises:
            TypeError: If `batches` is not an iterable, or a batch is not a pytree of arrays.
            ValueError: If there is no batch, all weights are 0, or the run keeps no averages.
            FloatingPointError: See `read`, of steps that were not read.
        """
        return self._state.evaluate(batches, loss_fn, params)

    @with_memory_advice()
    def predict(
        self, batches: Iterable[Any], fn: Callable[..., Any], *, params: WhichParams = "trained"
    ) -> Any:
        """Computes arrays with a row for each example, such as logits or log-probabilities.

        The model is streamed as in `evaluate`. NNX modules run as after ``.eval()``.

        Args:
            batches: An iterable of batches; they may differ in size.
            fn: ``fn(model, batch)`` or ``fn(model, batch, rng)``, returning a pytree of arrays that
                have the batch's examples as first axis. It is called with one microbatch, if the
                run has several that divide the batch, so a row shouldn't depend on other rows.
            params: "ema" to compute with averages; see `evaluate`.

        Returns:
            The same pytree of NumPy arrays, in the dtypes that `fn` returns, with the rows of all
            batches in order. Each process gets the rows of the batches that it passes. All rows are
            kept in host memory; those of two batches also on the device.

        Raises:
            TypeError: If `batches` is not an iterable, a batch is not a pytree of arrays, or `fn`
                has another signature.
            ValueError: If there is no batch, `fn` returns anything but arrays with a row for each
                example, or the rows of two batches differ in shape.
            FloatingPointError: See `read`, of steps that were not read.

        Examples:
            >>> import numpy as np
            >>> batches = [{"x": np.full((n, 3), n, np.float32)} for n in (2, 1)]
            >>> trainer = Trainer(
            ...     {"w": np.ones((3, 1), np.float32)},
            ...     lambda model, batch: (batch["x"] @ model["w"]).mean(),
            ...     optax.sgd(0.1),
            ...     batches[0],
            ...     progress=False,
            ... )
            >>> trainer.predict(batches, lambda model, batch: batch["x"] @ model["w"]).ravel()
            array([6., 6., 3.], dtype=float32)
        """
        return self._state.predict(batches, fn, params)

    def flush(self) -> None:
        """Applies pending updates and moves all state to pinned host memory.

        Raises:
            RuntimeError: If an error has cut off a step or a restore, so that there is no state.
            FloatingPointError: See `Trainer.read`, for steps of `step` that were not read. A second
                call returns the state that the error describes.
        """
        self._state.flush()

    @property
    def history(self) -> History:
        """One record per step, by `fit`, `train` or `step`; waits for the steps of `step`."""
        self._state.record()
        return self._state.history

    @property
    def plan(self) -> Plan:
        """The plan of this run on this machine: memory, transfers, arithmetic."""
        placement = self._state.store.placement
        return make_plan(self._state.spec, *placement.process_counts, placement.num_copies)

    @property
    def startup(self) -> dict[str, float]:
        """The seconds that making this trainer took, by phase, in order.

        "tracing" covers the model, the loss and the optimizer; "compiling" the functions of a step;
        "pinning" host memory; "initialising" the initial state, or reading `params`. Memory is
        pinned two to three times as fast on huge pages, for which the machine's administrator
        writes `always` to `/sys/kernel/mm/transparent_hugepage/shmem_enabled`.
        """
        return dict(self._startup)

    @property
    def schedule(self) -> Schedule:
        """The schedule of a step on the sample's shapes: transfers and computations, as data."""
        return self._state.spec.first.schedule

    @property
    def stages(self) -> tuple[BoundStage, ...]:
        """The stages of a step on the sample's shapes, each with the groups it reads."""
        return self._state.spec.first.stages

    @property
    def num_steps(self) -> int:
        """Training steps dispatched so far."""
        return self._state.training.num_steps

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that end a text in the data of `fit` and `train`.

        A `data.Dataset` knows them, such as a chat template's end of a turn. `models.generate`
        stops at them, and `models.save_pretrained` writes them. `add_end_tokens` adds others.
        """
        return self._end_tokens

    def add_end_tokens(self, tokens: Iterable[int]) -> None:
        """Adds to `end_tokens`, for data that doesn't have an attribute of this name.

        Raises:
            TypeError: If an id is no integer.
            ValueError: If one is negative.
        """
        added = [checks.integer("tokens", token, least=0) for token in tokens]
        self._end_tokens = tuple(dict.fromkeys((*self._end_tokens, *added)))

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices that share the run."""
        return self._state.store.placement.devices

    @property
    def processes(self) -> Processes:
        """The processes that share the run."""
        return self._state.store.placement.processes

    @property
    def num_skipped(self) -> int:
        """Number of skipped steps, among steps whose metrics were read."""
        return self._state.training.num_skipped

    @property
    def params(self) -> Any:
        """The parameters, as host arrays in the model's own structure.

        They share memory with the store and stay unchanged when training continues. Only a
        parameter stacked over layers, which the store keeps layer by layer, is a copy, and so is
        one that rests on a disk. `unread_model` and `save` read part by part.

        Raises:
            MemoryError: If memory can't hold all that rests on disks.
        """
        return self._state.params()

    @property
    def ema_params(self) -> Any:
        """The averages that `ema_decay` keeps, like `params`; frozen parameters are themselves.

        Raises:
            ValueError: If the run keeps no averages.
        """
        return self._state.params("ema")

    @property
    def opt_state(self) -> Any:
        """Optax's state, as host arrays in Optax's own structure; shares memory like `params`.

        It can't be changed here: `set_hyperparams` sets the hyperparameters in it.
        """
        return self._state.opt_state()

    def set_hyperparams(self, **values: float) -> None:
        """Sets hyperparameters that `optax.inject_hyperparams` keeps in the optimizer's state.

        Later steps use them, and checkpoints save them. A callback's record may be one step behind:
        the values are those of the steps dispatched after this call.

        Args:
            **values: New values, under the names in the records, such as ``learning_rate=1e-4``.

        Raises:
            TypeError: If a value is no number.
            ValueError: If the optimizer has no such hyperparameter, or a schedule sets it.

        Examples:
            >>> import jax.numpy as jnp
            >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
            >>> def loss_fn(model, batch):
            ...     return (batch @ model["w"]).mean()
            >>> batch = jnp.ones((2, 3))
            >>> trainer = Trainer({"w": jnp.ones(3)}, loss_fn, optimizer, batch, progress=False)
            >>> trainer.set_hyperparams(learning_rate=0.01)
            >>> round(float(trainer.step(batch)["learning_rate"]), 4)
            0.01
        """
        self._state.set_hyperparams(values)

    @property
    def model(self) -> Any:
        """The user's kind of model, with NumPy arrays that share memory with the store.

        NNX modules are in evaluation mode. Each access makes a new model of the parameters as they
        are then: keep it in a variable, ``model = trainer.model``, before you change it.
        """
        return self._state.model()

    @property
    def ema_model(self) -> Any:
        """Like `model`, with `ema_params`."""
        return self._state.model("ema")

    def unread_model(self, params: WhichParams = "trained") -> Any:
        """The user's kind of model, whose parameters are read where and when they are needed.

        Each has a shape and a dtype, and is read anew whenever `np.asarray` converts it to an
        array. So an export that converts one after the other takes little memory, also if
        parameters rest on disks (`disk_dir`). They are valid until the next training step. Several
        processes read them together: all convert the same ones in the same order.

        Args:
            params: "ema" for averages; see `evaluate`.
        """
        return self._state.unread_model(params)

    @property
    def variables(self) -> dict[str, Any]:
        """The model's state beside its parameters, by path: host arrays, and keys on the device."""
        return self._state.variables()

    def compute_copy(self, params: WhichParams = "trained") -> ComputeCopy:
        """The parameters, to be read onto the devices part by part, as steps compute with them.

        Args:
            params: "ema" for averages; see `evaluate`.
        """
        return self._state.compute_copy(params)

    def save(self, path: str | PathLike[str], *, params_only: bool = False) -> None:
        """Writes a checkpoint in Orbax format: parameters under the model's own paths.

        Args:
            path: The folder to write; must not exist.
            params_only: Whether to save only parameters. Training can't resume from such a
                checkpoint.

        Raises:
            TypeError: If `path` is not a path.
            ValueError: If Orbax could not read its own files at `path`.
            FileExistsError: If `path` exists.
            CheckpointError: If it can't be written; nothing is left of it.
            FloatingPointError: See `Trainer.read`, for steps that were not read; nothing is
                written. A second call saves the state described by the error. If that contains a
                partial step, `restore` warns.
        """
        params_only = checks.boolean("params_only", params_only)
        self._state.training.settle_all()
        self.start_saving(path, params_only=params_only).wait()

    def restore(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Continues from a checkpoint of the same model and optimizer.

        The checkpoint may have a different device budget, number of microbatches or precision:
        arrays in a different dtype or code are converted, with a warning.

        Args:
            path: A folder written by `save` or `fit`.

        Returns:
            The facts saved beside the arrays.

        Raises:
            CheckpointError: If it is damaged, or belongs to a different model or optimizer. Unless
                the message says otherwise, the training state is unchanged. If it says that the
                state is lost, every use of it raises `RuntimeError` until another checkpoint is
                restored.
        """
        return self._state.restore(path)

    def start_saving(self, path: str | PathLike[str], *, params_only: bool = False) -> Saving:
        """Starts writing a checkpoint like `save`, and returns the save, to wait for.

        Steps may continue meanwhile. A second save waits for the first by itself.
        """
        return self._state.start_saving(path, params_only=params_only)

    @property
    def run_state(self) -> RunState:
        """The state behind this trainer, which `fit` and `train` save and restore."""
        return self._state


def prepare(
    model: Any,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    sample_batch: Any,
    params: Any,
    continues: str | PathLike[str] | None,
    progress: bool,
    run: Options,
) -> Prepared:
    """The first half of a trainer's start, in seconds; see `Trainer` for arguments and errors."""
    began = time.perf_counter()
    model, params = unbound(model, params)
    run, placement, has_gpu = on_this_machine(run)
    progress = checks.boolean("progress", progress) and placement.processes.is_first
    check_parts(model, loss_fn, optimizer, params)
    if continues is not None:
        rows = num_rows(sample_batch) or 1
        run = with_saved_parts(run, continues, rows, placement)
    number, num_devices = run.least_microbatches, len(placement.local_devices)
    divides = placement.num_devices > 1
    check_batch(
        sample_batch, number, "sample_batch", num_devices, or_shapes=True, needs_rows=divides
    )
    tell_phase("tracing the model, the loss and the optimizer ...", progress)
    adapted, initial = adapt(model, loss_fn, sample_batch, run.seed, run.trainable)
    initial.check()
    spec, placement = local_run_spec(
        adapted, loss_fn, optimizer, sample_batch, run, placement, has_gpu
    )
    if progress and (line := products_line(spec)):
        tqdm.write(line, file=sys.stderr)
    if spec.state_choice:
        tell(spec.state_choice, progress)
    if placement.processes.is_first and not needs_batch(model) and (text := unused_seed(spec)):
        warn_user(text)
    if params is not None:
        initial = with_given_parameters(params, initial, adapted, exact_dtypes(spec))
    return Prepared(
        spec=spec,
        placement=placement,
        initial=initial,
        sample_batch=sample_batch,
        progress=progress,
        has_gpu=has_gpu,
        began=began,
    )


def started(prepared: Prepared) -> Trainer:
    """The trainer of a prepared run."""
    trainer = Trainer.__new__(Trainer)
    trainer._start(prepared)
    return trainer
