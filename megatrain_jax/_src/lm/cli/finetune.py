"""`megatrain-jax finetune`: from a checkpoint and data files to a new checkpoint or adapters."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.lm.cli import objectives
from megatrain_jax._src.lm.cli import training_recipe as training
from megatrain_jax._src.lm.cli.finetune_data import chat_template, dataset, shapes
from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.lm.cli.images import DECODER, image_shapes, trains_with_images
from megatrain_jax._src.lm.cli.job import Job
from megatrain_jax._src.lm.cli.model_and_batch import (
    checkpoint_folder,
    frozen_of,
    trained_with,
    with_adapters,
)
from megatrain_jax._src.lm.cli.new_tokens import (
    check_new_rows,
    exported_tokenizer,
    tokenizer_of,
)
from megatrain_jax._src.lm.cli.option_words import option
from megatrain_jax._src.lm.cli.run_settings import listed
from megatrain_jax._src.lm.cli.tokenizers import TemplatedTokenizer


def run(settings: FinetuneSettings) -> int:
    """Fine-tunes; see `training.run`."""
    return training.run(settings, lambda: prepare(settings))


def prepare(settings: FinetuneSettings) -> Job:
    """Opens the checkpoint, and adds adapters if the settings ask for them.

    Raises:
        ValueError: If the checkpoint, or a setting for it, can't be used.
    """
    settings = replace(settings, model=checkpoint_folder(settings.model))
    images = trains_with_images(settings)
    ignore = settings.ignore or ()
    pretrained = models.load_pretrained(settings.model, ignore=ignore, images=images)
    if settings.new_tokens is not None:
        tokenizer = tokenizer_of(settings)
        pretrained = models.resize_vocabulary(pretrained, tokenizer, seed=settings.seed)
    trainable = settings.trainable
    if images and trainable is None and not settings.has_adapters:
        trainable = DECODER
    if settings.trains_scores:
        pretrained = _with_scores(settings, pretrained)
        # A fresh head is always trained.
        if trainable is not None or settings.has_adapters:
            trainable = [*listed(trainable), "^score/"]
    elif pretrained.config.scores:
        raise ValueError(
            f"`model` = {settings.model} is a reward model: it has scores in place of the logits "
            f"that `objective`={settings.objective} needs. Pass the model that it was made from"
        )
    model, params = pretrained.model, pretrained.params
    if settings.has_adapters:
        _check_exports(settings, pretrained.config)
    if settings.adapter is not None:
        adapted = models.load_lora(pretrained, settings.adapter, seed=settings.seed)
        model, params, trainable = trained_with(adapted, trainable)
    elif settings.lora_rank is not None:
        model, params, trainable = with_adapters(
            model,
            trainable,
            targets=settings.lora_targets,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            dropout=settings.lora_dropout,
            rslora=settings.lora_rslora,
            dora=settings.lora_dora,
            modules_to_save=listed(settings.lora_modules_to_save),
            seed=settings.seed,
            params=params,
        )
    # Fresh adapters have dropout only if it is asked for; tracing a large model takes seconds.
    may_drop = settings.adapter is not None or bool(settings.lora_dropout)
    if settings.has_adapters and may_drop and not settings.has_dropout:
        model = _without_dropout(settings, model)
    check_new_rows(settings, trainable)
    if (alpha := settings.neftune_noise_alpha) is not None:
        model = models.neftune(model, alpha=alpha, seed=settings.seed)
    return Job(
        model=model,
        params=params,
        trainable=trainable,
        frozen=frozen_of(
            settings.frozen, settings.has_adapters or images, pretrained.config.saved_dtype
        ),
        loss_of=cache(lambda number: objectives.loss_of(settings, number)),
        shapes=shapes(settings) | image_shapes(settings, pretrained.config),
        reference=_reference(settings),
        prompting=lambda: _prompting(settings),
        dataset=lambda files, epochs: dataset(settings, files, epochs, images=images),
        export=lambda *given: _export(settings, *given),
    )


def _without_dropout(settings: FinetuneSettings, build: Callable[[], Any]) -> Callable[[], Any]:
    """A function that builds the model with the dropout of its adapters off, and says so.

    Exported adapters keep their dropout, for further training, as those of TRL do.
    """
    modules = [module for _, module in nnx.iter_graph(nnx.eval_shape(build))]
    shares = [module.rate for module in modules if isinstance(module, nnx.Dropout)]
    if not shares:
        return build
    print(
        f"the adapters' dropout of {max(shares)} is off: {option('objective')} "
        f"{settings.objective} trains without dropout, as TRL does",
        flush=True,
    )

    def without() -> Any:
        model = build()
        model.eval()
        return model

    return without


def _reference(settings: FinetuneSettings) -> tuple[str, ...]:
    """The folders of the reference model, if answers are compared with one before training."""
    if not settings.stores_reference:
        return ()
    return (settings.model, *filter(None, [settings.adapter]))


def _with_scores(settings: FinetuneSettings, pretrained: models.Pretrained) -> models.Pretrained:
    """The checkpoint with a score head, and the tokenizer's padding token as TRL chooses it."""
    tokenizer = tokenizer_of(settings)
    pad = tokenizer.pad_token_id
    pad = tokenizer.eos_token_id if pad is None else pad
    return models.reward_model(pretrained, pad_token_id=pad, seed=settings.seed)


def _prompting(settings: FinetuneSettings) -> tuple[Any, Callable[[str], Any]]:
    """The tokenizer, and a function that formats prompts as plain text or as questions."""
    tokenizer = tokenizer_of(settings)
    if settings.format == "text":
        return tokenizer, str
    template, variables = chat_template(settings.chat_template), settings.template_variables or {}
    templated = TemplatedTokenizer(tokenizer, template, variables)
    return templated, lambda prompt: [{"role": "user", "content": prompt}]


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
    # Without a template from the user, the tokenizer's own is copied unchanged.
    template = template if settings.chat_template else None
    dtype = settings.export_dtype
    with exported_tokenizer(settings) as source:
        options: dict[str, Any] = {"chat_template": template, "source": source}
        if name == "adapter":
            return models.save_lora(trainer, folder, dtype=dtype or "float32", **options)
        return models.save_pretrained(trainer, folder, dtype=dtype, **options)
