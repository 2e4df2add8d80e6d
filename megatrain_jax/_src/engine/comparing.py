"""`compare_plans`: plans for several machines, optimizers or batches, side by side."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax
from jax.sharding import AbstractMesh, Mesh

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.remembering import remembering
from megatrain_jax._src.common.suggestions import did_you_mean
from megatrain_jax._src.engine.options.options import (
    DeviceBudget,
    DiskDir,
    DiskRates,
    EmaDecay,
    HostBudget,
    Microbatches,
    OnNonfinite,
    PrecisionGiven,
    StatePerProcess,
    Trainable,
)
from megatrain_jax._src.engine.planning import plan
from megatrain_jax._src.engine.report.comparison import PlanComparison, compare
from megatrain_jax._src.engine.state.hardware import Hardware


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
