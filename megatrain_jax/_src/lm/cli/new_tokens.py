"""The tokenizer of a fine-tuned checkpoint, with the tokens that `new_tokens` adds."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.lm.cli.run_settings import listed
from megatrain_jax._src.lm.cli.tokenizers import load_tokenizer
from megatrain_jax._src.lm.common.hf_folder import own_file


def tokenizer_of(settings: FinetuneSettings) -> Any:
    """Loads the checkpoint's tokenizer, with its new tokens.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If it can't be loaded, or the file of new tokens has none.
    """
    tokenizer = load_tokenizer("model", settings.model)
    if settings.new_tokens is not None:
        tokenizer.add_tokens(_tokens(settings.new_tokens))
        # The config.json in that folder has the old vocabulary size.
        tokenizer.name_or_path = ""
    return tokenizer


def readable_tokenizer(settings: FinetuneSettings) -> Any:
    """The tokenizer for `megatrain_jax.data`: the checkpoint's folder, or one with new tokens."""
    return settings.model if settings.new_tokens is None else tokenizer_of(settings)


def check_new_rows(settings: FinetuneSettings, trainable: Sequence[str] | str | None) -> None:
    """Refuses new tokens if their rows of the embeddings would not be trained.

    Args:
        settings: The settings.
        trainable: Patterns on the paths of trained parameters; None if all are trained.

    Raises:
        ValueError: If no pattern is found in the embeddings' path.
    """
    if settings.new_tokens is None or trainable is None:
        return
    if not any(re.search(pattern, "embed_tokens/weight") for pattern in listed(trainable)):
        raise ValueError(
            "`new_tokens` have rows in the embeddings, but these are not trained: choose them by "
            "`trainable` or `lora_modules_to_save`; or go on from an `adapter` with embeddings"
        )


@contextmanager
def exported_tokenizer(settings: FinetuneSettings) -> Iterator[Path | None]:
    """A temporary folder with the tokenizer to export; None for the checkpoint's own."""
    if settings.new_tokens is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_of(settings).save_pretrained(folder)
        generation = own_file(Path(settings.model).expanduser(), "generation_config.json")
        if generation is not None:
            shutil.copyfile(generation, Path(folder) / "generation_config.json")
        yield Path(folder)


def _tokens(given: list[str] | str) -> list[str]:
    """The new tokens: a list, or a file with one on each line."""
    if isinstance(given, list):
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        return [given]
    tokens = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
    if not tokens:
        raise ValueError(f"`new_tokens`={given} has no line with a token")
    return tokens
