"""Files beside the weights (tokenizer and the like) that an export copies from its source."""

import shutil
from pathlib import Path

from megatrain_jax._src.common.hf_folder import own_file

# Files of tokenizers, processors and text generation. Nothing else is copied, least of all code.
_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)
_TEMPLATES = "additional_chat_templates"


def companions(folder: Path) -> dict[str, Path]:
    """Returns the names of a checkpoint's companion files, and their real paths.

    Raises:
        FileNotFoundError: If one is a dangling link.
        ValueError: If one is not a regular file, is a link out of the folder, or is damaged.
    """
    templates = sorted(path.name for path in (folder / _TEMPLATES).glob("*.jinja"))
    names = [*_NAMES, *(f"{_TEMPLATES}/{name}" for name in templates)]
    found = {name: own_file(folder, name) for name in names}
    return {name: path for name, path in found.items() if path is not None}


def copy(files: dict[str, Path], folder: Path) -> None:
    """Copies companions into a folder."""
    for name, path in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
