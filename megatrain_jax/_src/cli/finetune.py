"""`megatrain-jax finetune`: from a checkpoint and data files to a new checkpoint or adapters."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import megatrain_jax as mt
from megatrain_jax import data, models
from megatrain_jax._src.cli import objectives
from megatrain_jax._src.cli import training_recipe as training
from megatrain_jax._src.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.cli.job import Job
from megatrain_jax._src.cli.model_and_batch import batch_shapes, frozen_of, with_adapters
from megatrain_jax._src.cli.run_data import common_options, summarised
from megatrain_jax._src.cli.tokenizers import Asking, load_tokenizer

# Pairs of answers per row assumed in a plan, before the data is read. No large array depends on it.
_PAIRS = 8


def run(settings: FinetuneSettings) -> int:
    """Fine-tunes; see `training.run`."""
    return training.run(settings, lambda: prepare(settings))


def prepare(settings: FinetuneSettings) -> Job:
    """Opens the checkpoint, and adds adapters if the settings ask for them.

    Raises:
        ValueError: If the checkpoint, or a setting for it, can't be used.
    """
    if not Path(settings.model).expanduser().is_dir():
        raise ValueError(f"`model` = {settings.model} must be the folder of a checkpoint")
    pretrained = models.load_pretrained(settings.model, ignore=settings.ignore or ())
    model, params, trainable = pretrained.model, pretrained.params, settings.trainable
    if settings.lora_rank is not None:
        _check_exports(settings, pretrained.config)
        model, params, trainable = with_adapters(
            model,
            trainable,
            targets=settings.lora_targets,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            dropout=settings.lora_dropout,
            rslora=settings.lora_rslora,
            seed=settings.seed,
            params=params,
        )
    is_dpo, is_stored = settings.objective == "dpo", settings.stores_reference
    return Job(
        model=model,
        params=params,
        trainable=trainable,
        frozen=frozen_of(settings.frozen, settings.lora_rank, pretrained.config.saved_dtype),
        loss_fn=objectives.preferred(settings.beta, settings.microbatches, is_stored=is_stored)
        if is_dpo
        else objectives.next_token(settings.microbatches),
        shapes=batch_shapes(
            settings.batch, settings.length, _PAIRS if is_dpo else 0, has_reference=is_stored
        ),
        reference=settings.model if is_stored else None,
        prompting=lambda: _prompting(settings),
        dataset=lambda files, epochs: dataset(settings, files, epochs),
        export=lambda *given: _export(settings, *given),
    )


def dataset(
    settings: FinetuneSettings, files: Sequence[str] | str, epochs: int | None
) -> data.Dataset:
    """The batches of some files.

    Raises:
        ValueError: If they can't be used.
    """
    is_text = settings.format == "text"
    common = common_options(settings, epochs, "split" if is_text else "error")
    if is_text:
        return summarised(data.text(files, settings.model, **common))
    common |= {
        "chat_template": _template(settings.chat_template),
        "template_variables": settings.template_variables,
        "merge": settings.merge,
        "leading": settings.leading,
    }
    if settings.objective == "dpo":
        return summarised(data.preferences(files, settings.model, **common))
    return summarised(data.chat(files, settings.model, train_on=settings.train_on, **common))


def _prompting(settings: FinetuneSettings) -> tuple[Any, Callable[[str], Any]]:
    """The tokenizer, and a function that formats prompts as plain text or as questions."""
    tokenizer = load_tokenizer("model", settings.model)
    if settings.format == "text":
        return tokenizer, str
    template, variables = _template(settings.chat_template), settings.template_variables or {}
    asking = Asking(tokenizer, template, variables)
    return asking, lambda prompt: [{"role": "user", "content": prompt}]


def _template(given: str | None) -> str | None:
    """A chat template, read from a file if it is a path; a template's text is not a path."""
    if given is None or "{" in given or not Path(given).is_file():
        return given
    return Path(given).read_text(encoding="utf-8")


def _check_exports(settings: FinetuneSettings, config: models.DecoderConfig) -> None:
    is_part = "text_config" in json.loads(config.original or "{}")
    if is_part and "adapter" in settings.exports:
        raise ValueError(
            f"`model` is a {config.family}: PEFT's names for its decoder differ from those in its "
            "files. Set `export_as`=model"
        )


def _export(
    settings: FinetuneSettings, trainer: mt.Trainer, name: str, folder: Path, template: str | None
) -> Path:
    if name == "adapter":
        return models.save_lora(trainer, folder, dtype=settings.export_dtype or "float32")
    # Without a template from the user, the tokenizer's own is copied unchanged.
    template = template if settings.chat_template else None
    return models.save_pretrained(
        trainer, folder, dtype=settings.export_dtype, chat_template=template
    )
