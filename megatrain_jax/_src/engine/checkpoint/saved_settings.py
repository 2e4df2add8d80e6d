"""A run's settings as saved in its checkpoints, and their comparison on resuming.

A checkpoint restores arrays. Everything else comes from the call that resumes: the loss, the
optimizer, the precision and the data. `saved_settings` describes these as JSON, with fingerprints
in place of functions:

    call      settings taken from the new call: `loss_fn`, `optimizer`, `precision`
    state     settings that are arrays in the checkpoint, so the checkpoint's values are used:
              the seed's key, and hyperparameters that `optax.inject_hyperparams` keeps as state
    traced    facts that change how the same loss is traced: versions, shapes of the batch
    code      a hash of the Python code of `loss_fn`
    numbers   numbers that the optimizer was made with, by name, for messages

Fingerprints of functions traced under different facts are not compared. If the library versions are
the same, the code of the loss is compared instead.

If the plan may choose the numbers of microbatches and waves, a run that continues takes those of
its newest checkpoint.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from megatrain_jax._src.common.object_paths import AnyPath
from megatrain_jax._src.common.settings import changes
from megatrain_jax._src.engine.checkpoint import manifest, orbax
from megatrain_jax._src.engine.checkpoint.folder import (
    CheckpointError,
    in_first_process,
    parsed_path,
    reading_folder,
)
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.fingerprint import LIBRARIES, code_hash, fingerprint
from megatrain_jax._src.engine.program.optimizer.hyperparameters import (
    changed_numbers,
    kept_hyperparameters,
)
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state.placement import Placement


def saved_settings(spec: RunSpec) -> dict[str, Any]:
    """The settings of a run, as JSON."""
    loss, precision = spec.traced.traced, spec.precision
    inputs = loss.jaxpr.invars[len(loss.consts) + spec.traced.num_parameters :]
    forms = {f.name: _text(getattr(precision, f.name)) for f in fields(precision)}
    return {
        "call": {
            "loss_fn": fingerprint(jx.without_dead_code(loss, _trained_on(spec))),
            "optimizer": fingerprint(spec.optimizer.traced),
            **{f"precision.{name}": form for name, form in forms.items()},
        },
        "state": {"seed": spec.options.seed, **kept_hyperparameters(spec.optimizer)},
        "traced": {
            "versions": {
                name: getattr(sys.modules[name], "__version__", None)
                for name in LIBRARIES
                if name in sys.modules
            },
            "shapes": [str(v.aval) for v in inputs],
            "compute": forms["compute"],
            "update": f"{precision.update}{' of scaled gradients' * precision.scales_loss}",
            "num_devices": spec.options.num_devices,
        },
        "code": code_hash(spec.loss_fn),
        "numbers": {"optimizer": [list(row) for row in spec.optimizer.numbers]},
    }


def _trained_on(spec: RunSpec) -> list[bool]:
    """A flag for each output of the loss; false for metrics: training does not depend on them."""
    traced = spec.traced
    return [True, *[False] * len(traced.metrics), *[True] * traced.num_variables]


def differences(
    path: AnyPath,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    parts: Mapping[str, str],
    same_data: bool,
    finished: bool,
    num_converted: int = 0,
) -> str | None:
    """A line that lists the settings in which a run differs from the checkpoint that it resumes.

    Args:
        path: The checkpoint's folder.
        before: The settings in the checkpoint.
        now: The settings of the run.
        parts: Clauses on other numbers of microbatches and waves, where they change results.
        same_data: Whether the data is the checkpoint's, as far as is known.
        finished: Whether no step is left to train.
        num_converted: Number of the checkpoint's arrays that were converted to the new precision.

    Returns:
        The line; None if no difference is known.
    """
    traced, own = before["traced"], now["traced"]
    free = [] if traced == own else ["loss_fn"]
    if any(traced.get(name) != own[name] for name in ("versions", "update")):
        free.append("optimizer")
    call = changes(before["call"], now["call"], free)
    if "loss_fn" in free and _is_other_code(before, now):
        call = {"loss_fn": "loss_fn has changed and may compute something else", **call}
    if "optimizer" in call:
        call["optimizer"] = _with_names(call["optimizer"], before, now)
    state = changes(before["state"], now["state"])
    counting = [*call.values(), *parts.values()]
    counting += [] if same_data else ["data begins with another batch"]
    also = f" It {converted(num_converted)}." if num_converted else ""
    if not counting and not state:
        return f"{path} {converted(num_converted)}." if num_converted else None
    if finished:
        return (
            f"{path} ended a run with different settings, and no step is left to train, so "
            f"these have no effect: {'; '.join([*counting, *state.values()])}. Choose another "
            f"`checkpoint_dir`, or more `steps`.{also}"
        )
    said = [f"New from now on: {'; '.join(counting)}."] if counting else []
    kept = [f"{name}={before['state'][name]!r}, not {now['state'][name]!r}" for name in state]
    said += [f"Kept, since the checkpoint's state holds it: {'; '.join(kept)}."] if kept else []
    return f"{path} belongs to a run with different settings. {' '.join(said)}{also}"


def converted(number: int) -> str:
    """The words of a warning about a checkpoint with this number of converted arrays."""
    forms = f"{number} arrays in other dtypes or codes than `precision` asks for"
    return f"holds {forms}; they were converted"


def version_remark(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A remark that functions were not compared, because library versions differ.

    Args:
        before: The settings in the checkpoint.
        now: The settings of the run.

    Returns:
        The remark, with a leading space; empty if versions are equal, or functions are.
    """
    versions = changes(before["traced"]["versions"], now["traced"]["versions"])
    names = "loss_fn", "optimizer"
    unknown = [name for name in names if before["call"][name] != now["call"][name]]
    if not versions or not unknown:
        return ""
    return f" Not compared, since {'; '.join(versions.values())}: {' and '.join(unknown)}."


def batch_digest(batch: Any) -> str:
    """A hash of a batch's arrays, to recognise data."""
    digest = xxhash.xxh3_64()
    for x in jax.device_get(jax.tree.leaves(batch)):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.device_get(jax.random.key_data(x))
        # In JAX's dtype: without x64, NumPy's float64 becomes float32 and is still the same data.
        array = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _is_other_code(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the loss's Python code has changed, not counting changes of library versions."""
    same_versions = before["traced"]["versions"] == now["traced"]["versions"]
    same_trace = before["call"]["loss_fn"] == now["call"]["loss_fn"]
    return same_versions and not same_trace and bool(changes(before["code"], now["code"]))


def _with_names(clause: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A clause on the optimizer, with the names of the numbers that changed where known."""
    made = before["numbers"]["optimizer"]
    named = changed_numbers(made, now["numbers"]["optimizer"])
    if not named:
        return clause
    same_form = before["call"]["optimizer"]["form"] == now["call"]["optimizer"]["form"]
    return f"optimizer has {named}" if same_form else f"{clause}, with {named}"


def _text(form: Any) -> str | None:
    """A dtype as text, or the pairs of a mapping from paths to dtypes."""
    if isinstance(form, tuple):
        return ", ".join(f"{pattern}: {dtype}" for pattern, dtype in form)
    return None if form is None else str(form)


def with_saved_parts(
    run: Options, path: str | PathLike[str], num_rows: int, placement: Placement
) -> Options:
    """The options with the newest checkpoint's numbers, if they divide a batch.

    On another machine the plan might choose different numbers, and random keys depend on them.

    Args:
        run: The options.
        path: The folder of the run's checkpoints.
        num_rows: Examples of a batch in this process.
        placement: The devices and processes of the run.

    Raises:
        TypeError: If `path` is not a path.
        ValueError: If Orbax can't read there.
    """
    folder = parsed_path(path, "continues")
    if run.microbatches != "auto":
        return run

    def newest() -> dict[str, int] | None:
        with reading_folder(folder):
            for step in reversed(orbax.candidates(folder)):
                with suppress(CheckpointError):
                    return manifest.read(folder / str(step))["parts"]
        return None

    parts = in_first_process(placement.processes, "the look for a batch's parts", newest)
    if parts is None:
        return run
    # Of the whole batch; each process that holds all state has an equal part of them.
    number, rest = divmod(parts["microbatches"], placement.num_copies)
    rows = num_rows * placement.num_processes
    if rest or number % parts["waves"] or rows % (number * run.num_devices):
        return run
    return replace(run, microbatches=number, waves=parts["waves"])
