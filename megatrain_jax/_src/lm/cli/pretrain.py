"""`megatrain-jax pretrain`: from model sizes, a tokenizer and text to a checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flax import nnx

import megatrain_jax as mt
from megatrain_jax import data, models
from megatrain_jax._src.common.outside import naming
from megatrain_jax._src.lm.cli import training_recipe as training
from megatrain_jax._src.lm.cli.catalogue import config_values
from megatrain_jax._src.lm.cli.model_and_batch import batch_shapes
from megatrain_jax._src.lm.cli.recipe import Job
from megatrain_jax._src.lm.cli.run_data import common_options, summarised
from megatrain_jax._src.lm.cli.run_settings import PretrainSettings
from megatrain_jax._src.lm.common.hub import TOKENIZER_FILES, folder_or_download, is_hub_model
from megatrain_jax._src.lm.data.tokenizer import load_tokenizer

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def run(settings: PretrainSettings) -> int:
    """Trains from random weights; see `training.run`."""
    return training.run(settings, lambda: prepare(settings))


def prepare(settings: PretrainSettings) -> Job:
    """Reads the sizes, and compares them with the tokenizer.

    Raises:
        ValueError: If either is invalid, or they don't match.
    """
    if is_hub_model(given := settings.tokenizer):
        folder = folder_or_download("tokenizer", given, "a tokenizer", TOKENIZER_FILES)
        settings = replace(settings, tokenizer=str(folder))
    config = sizes_of(settings)
    return Job(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(settings.seed)),
        loss=models.next_token_loss,
        shapes=batch_shapes(settings.batch, settings.length),
        prompting=lambda: (load_tokenizer(settings.tokenizer), str),
        dataset=lambda files, epochs: dataset(settings, files, epochs),
        export=lambda *given: _export(settings, *given),
    )


def sizes_of(settings: PretrainSettings) -> models.DecoderConfig:
    """The sizes of the model, with the tokenizer's special tokens.

    Raises:
        FileNotFoundError: If there is no such model or tokenizer.
        ValueError: If the sizes are not only a decoder's, or the tokenizer has ids beyond them.
    """
    values = {**config_values(settings.model), **(settings.sizes or {})}
    if "text_config" in values:
        raise ValueError(
            f"`model` = {settings.model} has parts beside its decoder, which can't be trained: "
            "write its `text_config` alone into a config.json"
        )
    tokenizer = load_tokenizer(settings.tokenizer)
    special = {name: getattr(tokenizer, name) for name in _SPECIAL}
    with naming(f"`model` = {settings.model}"):
        config = models.DecoderConfig.from_hf({**values, **special})
    most = max(tokenizer.get_vocab().values())
    if most >= config.vocab_size:
        raise ValueError(
            f"`tokenizer` = {settings.tokenizer} gives ids up to {most}, but the model has "
            f"{config.vocab_size} rows: set `sizes`={{vocab_size: {most + 1}}} or more"
        )
    return config


def dataset(
    settings: PretrainSettings, files: Sequence[str] | str, epochs: int | None
) -> data.Dataset:
    """The batches of some files.

    Raises:
        ValueError: If they can't be used.
    """
    options = common_options(settings, epochs, "split")
    return summarised(data.text(files, settings.tokenizer, **options))


def _export(
    settings: PretrainSettings, trainer: mt.Trainer, name: str, folder: Path, template: str | None
) -> Path:
    del name, template  # there is only the model, with the tokenizer's own template
    return models.save_pretrained(
        trainer,
        folder,
        dtype=settings.export_dtype,
        params=settings.params,
        source=Path(settings.tokenizer).expanduser(),
    )
