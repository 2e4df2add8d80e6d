"""`megatrain-jax finetune`: from a checkpoint and files to a checkpoint, in one idempotent call."""

import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax

import megatrain_jax as mt
from megatrain_jax import data, models
from megatrain_jax._src.cli.devices import num_gpus, peak_device_bytes
from megatrain_jax._src.cli.errors import checking
from megatrain_jax._src.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.cli.progress import Lines
from megatrain_jax._src.cli.recipe import optimizer_of, precision_of, schedule_of
from megatrain_jax._src.cli.run_folder import RunFolder
from megatrain_jax._src.cli.sizes import batch_shapes, budget_of

_GIB = 2**30
# As a shell has it: 128 and the number of SIGINT.
_INTERRUPTED = 130


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        train: Batches to train on.
        held_out: Batches to evaluate on; None for none.
        steps: Number of steps.
    """

    train: data.Dataset | data.Mixture
    held_out: data.Dataset | data.Mixture | None
    steps: int


def run(settings: FinetuneSettings) -> int:
    """Plans, reads, trains, exports and reports; does what is left of that, if anything is.

    Args:
        settings: The settings.

    Returns:
        The exit status: 0 if the run has finished, now or before; 130 if it was interrupted.

    Raises:
        AskedWronglyError: If something is wrong, before anything is trained.
    """
    folder = RunFolder(Path(settings.out).expanduser())
    clock = _Clock()
    with checking():
        folder.check(settings)
        if folder.is_done(settings):
            print(f"{folder.path} is done: {folder.report['steps']} steps. See {folder.path}")
            return 0
        if not Path(settings.model).expanduser().is_dir():
            raise ValueError(f"`model` = {settings.model} must be the folder of a checkpoint")
        pretrained = models.load_pretrained(settings.model)
        options = _options(settings)
        print(_plan(settings, pretrained, options), flush=True)
        clock.lap("plan")
        batches = read(settings)
        folder.begin(settings)
    clock.lap("data")
    result = _train(settings, folder, pretrained, options, batches)
    clock.lap("training")
    steps = result.trainer.num_steps
    if result.interrupted:
        if settings.export == "always":
            _export(settings, result, batches, folder.path / f"model-step-{steps}")
        goes_on = "goes on from there" if settings.checkpoints else "begins anew"
        print(f"interrupted after step {steps} of {batches.steps}: the same command {goes_on}")
        return _INTERRUPTED
    if settings.export != "never" and not folder.model.exists():
        _export(settings, result, batches, folder.model)
        clock.lap("export")
    result.history.plot().savefig(folder.path / "loss.png")
    folder.finish(
        {
            **_figures(result, settings),
            "seconds": clock.seconds,
            "tokens_held_out": _num_tokens(batches.held_out),
            "history": list(result.history),
        }
    )
    print(f"finished after {steps} steps: {folder.path}")
    return 0


def loss_fn(model: models.Decoder, batch: Mapping[str, Any]) -> Any:
    """`models.next_token_loss` with the number of tokens that are no padding as a metric."""
    loss, metrics = models.next_token_loss(model, batch)
    tokens = (batch["segments"] > 0).sum(dtype=jnp.float32)
    return loss, {**metrics, "tokens": tokens}


def _options(settings: FinetuneSettings) -> dict[str, Any]:
    """The options that a plan and a run have in common."""
    here = mt.this_machine()
    compute = settings.compute or ("float32" if here is None else "bfloat16")
    return {
        "microbatches": settings.microbatches,
        "precision": precision_of(settings.state, settings.master, settings.frozen, compute),
        "trainable": settings.trainable,
        "device_budget": budget_of(settings.device_budget),
        "on_nonfinite": settings.on_nonfinite,
        "seed": settings.seed,
        "hardware": here,
    }


def _optimizer(settings: FinetuneSettings, schedule: optax.Schedule) -> Any:
    return optimizer_of(
        settings.optimizer,
        schedule,
        b1=settings.b1,
        b2=settings.b2,
        weight_decay=settings.weight_decay,
        clip=settings.clip,
    )


def _schedule(settings: FinetuneSettings, steps: int) -> optax.Schedule:
    return schedule_of(
        settings.learning_rate, steps, settings.warmup, settings.decay, settings.final_rate
    )


def _plan(
    settings: FinetuneSettings, pretrained: models.Pretrained, options: Mapping[str, Any]
) -> mt.Plan:
    return mt.plan(
        pretrained.model,
        loss_fn,
        _optimizer(settings, _schedule(settings, settings.steps or 1)),
        batch_shapes(settings.batch, settings.length),
        num_gpus=num_gpus(),
        **options,
    )


def read(settings: FinetuneSettings) -> RunData:
    """Reads and tokenises the data.

    Raises:
        ValueError: If there are fewer batches than steps, or the data can't be used.
    """
    sources = [settings.data] if settings.weights is None else settings.files
    parts = [_dataset(settings, source, settings.epochs) for source in sources]
    held: list[data.Dataset] = []
    if settings.eval_data is not None:
        held = [_dataset(settings, settings.eval_data, 1)]
    elif settings.held_out:
        split = [part.split(settings.held_out, settings.seed) for part in parts]
        parts, held = [train for train, _ in split], [rest for _, rest in split]
    for name, datasets in (("training", parts), ("held out", held)):
        for dataset in datasets:
            print(f"{name}: {dataset}", flush=True)
    train = parts[0] if settings.weights is None else data.mix(parts, settings.weights)
    held_out = data.mix(held) if len(held) > 1 else next(iter(held), None)
    if settings.epochs is None:
        assert settings.steps is not None
        return RunData(train, held_out, settings.steps)
    if settings.steps is not None and settings.steps > len(train):
        raise ValueError(
            f"`steps`={settings.steps} are more than the {len(train)} batches of "
            f"`epochs`={settings.epochs}: say fewer steps, more epochs, or `epochs`=null"
        )
    return RunData(train, held_out, settings.steps or len(train))


def _dataset(
    settings: FinetuneSettings, files: Sequence[str] | str, epochs: int | None
) -> data.Dataset:
    bar = sys.stderr.isatty()
    common: dict[str, Any] = {
        "length": settings.length,
        "batch_size": settings.batch,
        "seed": settings.seed,
        "epochs": epochs,
        "too_long": settings.too_long_or_default,
        "invalid": settings.invalid,
        "progress": bar,
    }
    if settings.format == "text":
        found = data.text(files, settings.model, **common)
    else:
        found = data.chat(
            files,
            settings.model,
            train_on=settings.train_on,
            chat_template=_template(settings.chat_template),
            template_variables=settings.template_variables,
            **common,
        )
    if not bar:  # which prints it, too
        print(found.summary, file=sys.stderr, flush=True)
    return found


def _num_tokens(held_out: data.Dataset | data.Mixture | None) -> int | None:
    if held_out is None:
        return None
    parts = held_out.datasets if isinstance(held_out, data.Mixture) else (held_out,)
    return sum(part.num_tokens for part in parts)


def _template(given: str | None) -> str | None:
    """A chat template that may be in a file; the text of a template is no path."""
    if given is None or "{" in given or not Path(given).is_file():
        return given
    return Path(given).read_text(encoding="utf-8")


def _train(
    settings: FinetuneSettings,
    folder: RunFolder,
    pretrained: models.Pretrained,
    options: Mapping[str, Any],
    batches: RunData,
) -> mt.FitResult:
    schedule = _schedule(settings, batches.steps)
    lines = Lines(batches.steps, schedule, settings.microbatches, settings.log_every)
    saving: dict[str, Any] = {}
    if settings.checkpoints:
        saving = {
            "checkpoint_dir": folder.checkpoints,
            "checkpoint_every": settings.checkpoint_every,
            "keep": settings.keep,
        }
    return mt.fit(
        pretrained.model,
        loss_fn,
        batches.train,
        _optimizer(settings, schedule),
        steps=batches.steps,
        params=pretrained.params,
        eval_data=batches.held_out,
        eval_every=settings.eval_every,
        callbacks=[lines],
        progress=sys.stderr.isatty(),
        **saving,
        **options,
    )


def _export(
    settings: FinetuneSettings, result: mt.FitResult, batches: RunData, folder: Path
) -> None:
    # Without one of the user's own, the tokenizer's is copied as it is.
    train = batches.train
    part = train.datasets[0] if isinstance(train, data.Mixture) else train  # all have the same
    template = part.chat_template if settings.chat_template else None
    exported = models.save_pretrained(
        result.trainer, folder, dtype=settings.export_dtype, chat_template=template
    )
    print(f"exported to {exported}", flush=True)


def _figures(result: mt.FitResult, settings: FinetuneSettings) -> dict[str, Any]:
    """The run in numbers: rates, losses, peaks."""
    # The first steps compile; the last ones wait for what is in flight.
    measured = result.history[3:-2]
    seconds = [record["seconds"] for record in measured]
    tokens = [record["tokens"] * settings.microbatches for record in measured]
    mean = statistics.mean(seconds) if seconds else None
    in_rows, peak = settings.batch * settings.length, peak_device_bytes()
    return {
        "steps": result.trainer.num_steps,
        "num_parameters": result.trainer.plan.num_parameters,
        "num_frozen": result.trainer.plan.num_frozen,
        "num_measured_steps": len(seconds),
        "mean_seconds_per_step": mean,
        "stdev_seconds_per_step": statistics.stdev(seconds) if len(seconds) > 1 else None,
        "tokens_per_step": in_rows,
        "tokens_per_second": mean and in_rows / mean,
        "tokens_per_second_without_padding": mean and sum(tokens) / sum(seconds),
        "first_loss": result.history[0]["loss"],
        "last_loss": result.history[-1]["loss"],
        "eval_loss": result.history[-1].get("eval_loss"),
        "peak_device_gib": peak and peak / _GIB,
        "peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


class _Clock:
    """The seconds of each part of a run."""

    def __init__(self):
        """Starts the first part."""
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def lap(self, name: str) -> None:
        """Ends a part."""
        now = time.perf_counter()
        self.seconds[name], self._start = now - self._start, now
