"""`plan`, the memory and time that a run will need, from shapes alone, and `compare_plans`."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import optax
from jax.sharding import AbstractMesh, Mesh

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.remembering import IdentityKey, gc_paused, remembered, remembering
from megatrain_jax._src.common.repeated_model import RepeatedModel
from megatrain_jax._src.common.suggestions import did_you_mean
from megatrain_jax._src.engine import start
from megatrain_jax._src.engine.adapt.adapters import adapt, needs_batch
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.options.batch_checks import check_batch, num_rows
from megatrain_jax._src.engine.options.inputs import check_order, check_parts
from megatrain_jax._src.engine.options.options import (
    DeviceBudget,
    DiskDir,
    DiskRates,
    EmaDecay,
    HostBudget,
    MachineOptions,
    Microbatches,
    OnNonfinite,
    Options,
    PrecisionGiven,
    StatePerProcess,
    Trainable,
    taken,
)
from megatrain_jax._src.engine.program.trace_target import trace_target, traced_for
from megatrain_jax._src.engine.report.comparison import PlanComparison, compare
from megatrain_jax._src.engine.report.make_plan import make_plan
from megatrain_jax._src.engine.report.plan import Plan
from megatrain_jax._src.engine.report.run_warnings import PlanWarning
from megatrain_jax._src.engine.runtime.evaluation import batch_shapes
from megatrain_jax._src.engine.spec.host import process_base_bytes
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.measured import by_measured_times
from megatrain_jax._src.engine.spec.microbatches import fit_with_microbatches
from megatrain_jax._src.engine.spec.repeated_cut import NotAlikeError
from megatrain_jax._src.engine.spec.rescheduled import run_with_all_waves
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.state_choice import choose_state, copied
from megatrain_jax._src.engine.spec.tile_search import TileFinder
from megatrain_jax._src.engine.state.hardware import Hardware
from megatrain_jax._src.engine.state.placement import default_device, placed_on


def plan(
    model: Any,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    sample_batch: Any,
    *,
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
    host_gib: float | str | None = None,
    num_gpus: int | None = None,
    hosts: int | None = None,
    network: float | str | None = None,
    disk: DiskRates = None,
    measure: bool = False,
) -> Plan:
    """Estimates a run's needs without allocating anything and without a GPU.

    Args:
        model: See `Trainer`; a function that builds the model costs no memory.
        loss_fn: See `Trainer`.
        optimizer: See `Trainer`.
        sample_batch: A batch, or its `jax.ShapeDtypeStruct`s.
        microbatches: Number of equal parts that each training batch is split into, or "auto"; see
            `Trainer`. "auto" needs `hardware`, and is 1 without.
        waves: Number of equal groups of microbatches that go through forward and backward one after
            another; see `Trainer`.
        precision: A `Precision`, or a name: "compact" and "two_bytes" for its methods, "bfloat16",
            "float16" and "float32" for the dtype of the computation, or "auto" for bfloat16, or
            float16 on a GPU without it.
        device_budget: Bytes of device memory for state and activations, or text such as "22GiB",
            "minimum", or None ("auto") for all that compiled functions leave; see `Trainer`. None
            plans the budget that `fit` would choose on `hardware`, with an estimate of the memory
            of compiled functions; the minimum if its memory isn't known.
        host_budget: Maximum bytes of host memory of the process, or text such as "200GiB"; None for
            all that is available at the start, less a reserve; see `Trainer`. None plans with the
            host memory of `hardware`.
        disk_dir: Folder, or list of folders of different drives, for the part of the state that the
            host's memory can't hold; None for none; see `Trainer`.
        disk_budget: Maximum bytes that the process may take in `disk_dir`, or text such as
            "500GiB"; None for what is free.
        trainable: The parameters to train, as names or a regular expression in their paths, a
            predicate of the path, a filter of `flax.nnx`, or a list of these; None trains all; see
            `Trainer`.
        eval_loss_fn: Loss function to evaluate with, called as `loss_fn` is; None for `loss_fn`;
            see `Trainer`. A plan doesn't depend on it.
        on_nonfinite: The action if a loss or a gradient is not finite: "raise", or "skip" to leave
            everything but the step number unchanged and continue; see `Trainer`.
        ema_decay: Decay of an exponential moving average of the trained parameters, or an Optax
            schedule of it; None keeps no average; see `Trainer`.
        max_skipped: Number of consecutive skipped steps that is an error; see `Trainer`. A plan
            doesn't depend on it.
        seed: Seed of a Linen module's parameters and of the keys for `loss_fn`; see `Trainer`.
        hardware: The machine whose rates the schedule and `plan` use, a `Hardware` or a card's name
            such as "H100"; None for this machine, or an H200 without a GPU; see `Trainer`. With
            None, numbers that depend on it are left out.
        mesh: The devices to train on; None for all GPUs that JAX sees, or else its first device;
            see `Trainer`. A `jax.sharding.AbstractMesh` needs none of them here; None for one
            device.
        state_per_process: Whether each of several processes holds all state on its own devices
            instead of a share ("hybrid sharding"); see `Trainer`.
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

    Returns:
        The plan; print it, or let a notebook show it.

    Raises:
        TypeError: See `Trainer`.
        ValueError: See `Trainer`; or if `host_gib` is given without `hardware`, or `num_gpus` and
            `mesh` are both given, or `network` without `hosts`, or `measure` is true on a machine
            without a GPU.

    Examples:
        >>> import jax, optax
        >>> def build():
        ...     layers = {str(i): {"w": jax.numpy.ones((512, 512))} for i in range(24)}
        ...     return {"layers": layers}
        >>> def loss_fn(model, batch):
        ...     x = batch
        ...     for layer in model["layers"].values():
        ...         x = x @ layer["w"]
        ...     return (x**2).mean()
        >>> batch = jax.ShapeDtypeStruct((16, 512), jax.numpy.bfloat16)
        >>> result = plan(build, loss_fn, optax.adamw(1e-3), batch)
        >>> result.num_parameters, result.host_bytes // result.num_parameters
        (6291456, 12)
    """
    run = taken(Options, locals())
    run = taken(MachineOptions, locals()).applied(run)
    order = "plan(model, loss_fn, optimizer, sample_batch)"
    check_order(order, optimizer, "sample_batch", sample_batch)
    check_parts(model, loss_fn, optimizer)
    number = run.least_microbatches
    fewer = 'mesh=AbstractMesh(({n},), ("data",))' if num_gpus is None else "num_gpus={n}"
    devices = _copies(run) * run.num_devices
    check_batch(sample_batch, number, "sample_batch", devices, or_shapes=True, fewer=fewer)
    if measure:
        return _measured(model, loss_fn, optimizer, sample_batch, run)

    def fitted(run: Options) -> RunSpec:
        if isinstance(model, RepeatedModel):
            with contextlib.suppress(NotAlikeError):
                return _fitted(model.few, loss_fn, optimizer, sample_batch, run, model)
        return _fitted(model, loss_fn, optimizer, sample_batch, run)

    machine, target = run.machine, {}
    # A model may depend on the GPU that it is traced for; this machine may have none.
    if machine is not None and default_device().platform != "gpu":
        target = {"card": machine.name, "widest_heads": machine.widest_heads}
    with traced_for(**target), gc_paused(), remembering():
        if run.state_per_process == "auto":
            spec = choose_state(*_ways(run), fitted)
        else:
            spec = fitted(run)
        found = spec.options
        return make_plan(run_with_all_waves(spec), *_spread(found), _copies(found))


def _copies(run: Options) -> int:
    return 1 if run.machine is None else run.machine.copies


def _spread(run: Options) -> tuple[int, int]:
    """The number of processes that share the state, and of those on a host: one for each host."""
    return (1 if run.machine is None else run.machine.hosts), 1


def _ways(run: Options) -> tuple[Options, Options | str]:
    """The options of a run over several hosts with shared state, and with a copy on each."""
    assert run.machine is not None
    shared, hosts = replace(run, state_per_process=False), run.machine.hosts
    return shared, copied(shared, AbstractMesh((run.num_devices // hosts,), ("data",)), hosts)


def _fitted(
    model: Any,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    sample_batch: Any,
    run: Options,
    repeated: RepeatedModel | None = None,
) -> RunSpec:
    """The run, fitted to its machine by estimates."""
    if (copies := _copies(run)) > 1:
        sample_batch = batch_shapes(sample_batch, parts=copies)
    # For any mesh: a run divides everything over all devices.
    placement = placed_on(AbstractMesh((run.num_devices,), ("data",)))
    machine = run.machine
    batch = IdentityKey(sample_batch) if needs_batch(model) else None
    given = IdentityKey(model), IdentityKey(loss_fn), batch, run.seed, trace_target()
    adapted = remembered(
        "adapted model",
        lambda: given,
        lambda: adapt(model, loss_fn, sample_batch, run.seed, run.trainable)[0],
    )
    # Without hardware, the run is one of this machine.
    on_cpu = machine is None and default_device().platform == "cpu"
    platform = "cpu" if on_cpu else "gpu"
    affecting = platform, run.num_devices, machine, run.dtypes, IdentityKey(optimizer)
    tiles = remembered(
        "tiles",
        lambda: (*affecting, run.on_nonfinite, trace_target()),
        lambda: TileFinder(KernelCache(platform=platform), placement),
    )
    base = process_base_bytes() if on_cpu else None

    def make(run: Options) -> RunSpec:
        made = make_run_spec(adapted, loss_fn, optimizer, sample_batch, run, repeated)
        return replace(made, base_bytes=base)

    return fit_with_microbatches(run, make, num_rows(sample_batch) or 1, tiles, _spread(run))


def _measured(
    model: Any,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    sample_batch: Any,
    run: Options,
) -> Plan:
    """The plan of a run on this machine's GPUs, with its functions compiled and timed there."""
    run, placement, has_gpu = start.on_this_machine(run)
    if not has_gpu:
        raise ValueError(
            "`measure`=True times a run's functions on a GPU, and JAX sees none on this machine; "
            "leave it out to plan by estimates"
        )
    adapted = adapt(model, loss_fn, sample_batch, run.seed, run.trainable)[0]
    with warnings.catch_warnings():  # the plan lists them
        warnings.simplefilter("ignore", PlanWarning)
        given = adapted, loss_fn, optimizer, sample_batch, run, placement, has_gpu
        spec, placement = start.local_run_spec(*given)
    kernels, spread = start.empty_kernel_cache(spec, placement), placement.process_counts
    spec, _ = start.fit_and_compile(spec, kernels, placement, has_gpu=has_gpu)
    found = make_plan(run_with_all_waves(spec), *spread, placement.num_copies)
    if found.fits_device is False:
        return found
    spec = by_measured_times(spec, kernels, placement, sample_batch)
    return make_plan(run_with_all_waves(spec), *spread, placement.num_copies)


def compare_plans(
    model: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    sample_batch: Any = None,
    *,
    over: Mapping[str, Any],
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
    host_gib: float | str | None = None,
    num_gpus: int | None = None,
    hosts: int | None = None,
    network: float | str | None = None,
    disk: DiskRates = None,
    measure: bool = False,
) -> PlanComparison:
    """Plans every combination of some arguments' values: fit, time and memory.

    Plans with the same model, loss, optimizer and batch trace these once. If `plan` raises a
    `ValueError` for a combination, its row contains the reason.

    Args:
        model: See `plan`; this and all following arguments may be given here or in `over`.
        loss_fn: See `plan`.
        optimizer: See `plan`.
        sample_batch: See `plan`.
        over: The arguments to vary, by name, with their values: a mapping from a value's name in
            the table to the value, or a sequence of machines, numbers or strings, which are their
            own names.
        microbatches: Number of equal parts that each training batch is split into, or "auto"; see
            `plan`.
        waves: Number of equal groups of microbatches that go through forward and backward one after
            another; see `plan`.
        precision: A `Precision`, or a name: "compact" and "two_bytes" for its methods, "bfloat16",
            "float16" and "float32" for the dtype of the computation, or "auto" for bfloat16, or
            float16 on a GPU without it.
        device_budget: Bytes of device memory for state and activations, or text such as "22GiB",
            "minimum", or None ("auto") for all that compiled functions leave; see `plan`.
        host_budget: Maximum bytes of host memory of the process, or text such as "200GiB"; None for
            all that is available at the start, less a reserve; see `plan`.
        disk_dir: Folder, or list of folders of different drives, for the part of the state that the
            host's memory can't hold; None for none; see `plan`.
        disk_budget: Maximum bytes that the process may take in `disk_dir`, or text such as
            "500GiB"; None for what is free.
        trainable: The parameters to train, as names or a regular expression in their paths, a
            predicate of the path, a filter of `flax.nnx`, or a list of these; None trains all; see
            `plan`.
        eval_loss_fn: Loss function to evaluate with, called as `loss_fn` is; None for `loss_fn`;
            see `plan`.
        on_nonfinite: The action if a loss or a gradient is not finite: "raise", or "skip" to leave
            everything but the step number unchanged and continue; see `plan`.
        ema_decay: Decay of an exponential moving average of the trained parameters, or an Optax
            schedule of it; None keeps no average; see `plan`.
        max_skipped: Number of consecutive skipped steps that is an error; see `plan`.
        seed: Seed of a Linen module's parameters and of the keys for `loss_fn`; see `plan`.
        hardware: The machine whose rates the schedule and `plan` use, a `Hardware` or a card's name
            such as "H100"; None for this machine, or an H200 without a GPU.
        mesh: The devices to train on; None for all GPUs that JAX sees, or else its first device;
            see `plan`.
        state_per_process: Whether each of several processes holds all state on its own devices
            instead of a share ("hybrid sharding"); see `plan`.
        host_gib: Host memory of that machine in GiB, or text with a unit such as "512GiB"; None for
            the host memory of `hardware`.
        num_gpus: Number of GPUs of each host to plan for, instead of `mesh`.
        hosts: Number of such hosts, which share the batch and, unless `state_per_process`, the
            state; None for one.
        network: Rate at which each host receives from the others while it sends as much, in bytes
            per second or as text: "400Gb/s" of bits, "50GB/s" of bytes, "8x400Gb/s" for eight cards
            of a host; see `plan`.
        disk: Rates of each host's disks, "7GB/s read, 2GB/s write", or one rate for both: state
            that the host's memory can't hold rests there; see `plan`.
        measure: Whether to plan for this machine's GPU, and to compile and time the step's
            functions on it, as the start of a run does: the seconds then come from measured times,
            and the bytes of functions from the compiler; see `plan`.

    Returns:
        The plans as a table, a sequence of rows.

    Raises:
        TypeError: If an argument has a wrong type, or a value in `over` has no name.
        ValueError: If `over` is empty or has an unknown argument, an argument is given both here
            and in `over`, or two values have the same name.

    Examples:
        >>> import jax, optax
        >>> def build():
        ...     weights = [jax.numpy.ones((512, 512)) for _ in range(24)]
        ...     return {"layers": {str(i): {"w": w} for i, w in enumerate(weights)}}
        >>> def loss_fn(model, batch):
        ...     x = batch
        ...     for layer in model["layers"].values():
        ...         x = x @ layer["w"]
        ...     return (x**2).mean()
        >>> batch = jax.ShapeDtypeStruct((16, 512), jax.numpy.bfloat16)
        >>> over = {"optimizer": {"adamw": optax.adamw(1e-3), "lion": optax.lion(1e-3)}}
        >>> table = compare_plans(build, loss_fn, sample_batch=batch, over=over)
        >>> plans = {row.names: row.plan for row in table}
        >>> [(n, p.host_bytes // p.num_parameters) for n, p in plans.items()]
        [(('adamw',), 12), (('lion',), 8)]
    """
    given = dict(locals())
    del given["over"]
    parameters = inspect.signature(compare_plans).parameters
    fixed = {k: v for k, v in given.items() if v is not parameters[k].default}
    axes = _axes(over)
    for name in axes:
        if name in fixed:
            raise ValueError(f"`{name}` is given, and in `over`, too: leave one of them out")
    for name in ("model", "loss_fn", "optimizer", "sample_batch"):
        if name not in fixed and name not in axes:
            raise TypeError(f"compare_plans() needs `{name}`, as an argument or in `over`")
    with remembering():
        return compare(axes, lambda **given: plan(**{**fixed, **given}))


def _axes(over: Any) -> dict[str, dict[str, Any]]:
    """The values of each argument, by name."""
    checks.instance("over", over, Mapping, "a mapping from arguments to their values")
    parameters = inspect.signature(plan).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    if not over:
        raise ValueError(f"`over` is empty: name an argument that differs, of {', '.join(known)}")
    for name in over:
        if name not in known:
            near = did_you_mean(str(name), known)
            raise ValueError(f"`over` has {name!r}, but `plan` takes {', '.join(known)}{near}")
    return {name: _named(f"over[{name!r}]", values) for name, values in over.items()}


def _named(argument: str, values: Any) -> dict[str, Any]:
    allowed = "a mapping from names to values, or a sequence of machines, numbers or strings"
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(checks.refused(argument, allowed, values))
    # Batches and optimizers have no name that would identify them in a table.
    pairs = [*values.items()] if isinstance(values, Mapping) else [(_name(v), v) for v in values]
    if not pairs:
        raise ValueError(f"`{argument}` is empty")
    named: dict[str, Any] = {}
    for name, value in pairs:
        if not isinstance(name, str):
            raise TypeError(checks.refused(argument, allowed, values))
        if name in named:
            hint = "pass a mapping that gives each a name of its own"
            raise ValueError(f"`{argument}` has two values called {name!r}; {hint}")
        named[name] = value
    return named


def _name(value: Any) -> str | None:
    """The name of a value that identifies itself; None for any other value."""
    if isinstance(value, Hardware):
        return value.name
    return str(value) if value is None or isinstance(value, str | int | float) else None
