"""Folders of Hugging Face Hub checkpoints by name, from the cache or downloaded."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.hf_folder import existing_folder

# Files of a Hub checkpoint that are downloaded: parameters, configuration, tokenizer.
CHECKPOINT_FILES = (
    "model*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "merges.txt",
    "vocab.txt",
)
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def folder_or_download(name: str, given: Any, holds: str, files: Sequence[str]) -> Path:
    """Returns the path of a folder on disk, or of a downloaded snapshot of a Hub model.

    An existing folder always has precedence. ``Qwen/Qwen3-0.6B`` names a Hub model only if neither
    that folder nor a folder ``Qwen`` exists. Cached files are not downloaded again.

    Args:
        name: Name of the argument.
        given: Value of the argument.
        holds: Description of the files the folder should hold, for the message.
        files: Patterns of the files to download; they never include a model's code.

    Raises:
        TypeError: If it is not a path.
        FileNotFoundError: If there is no such folder and the download fails.
    """
    text = checks.path(name, given)
    if not isinstance(given, str) or not _is_name(text):
        return existing_folder(name, given, holds)
    advice = f"`hf download {text} --local-dir FOLDER` downloads one of the Hub"
    missing = f"`{name}` must be a folder on disk that holds {holds}, but there is no folder {text}"
    try:
        # An optional dependency: only Hub checkpoints need it.
        hub = importlib.import_module("huggingface_hub")
    except ImportError as caught:
        raise FileNotFoundError(
            f"{missing}. {advice}; with `pip install huggingface_hub` this happens automatically"
        ) from caught
    try:
        return Path(hub.snapshot_download(text, allow_patterns=list(files)))
    except Exception as caught:  # HTTP, cache and disk errors have no common type
        why = " ".join(str(caught).split())[:300]
        raise FileNotFoundError(
            f"{missing}, and it can't be downloaded from the Hugging Face Hub: "
            f"{type(caught).__name__}: {why}. {advice} (`hf auth login` first if it is gated)"
        ) from caught


def _is_name(text: str) -> bool:
    owner = text.partition("/")[0]
    return bool(_NAME.fullmatch(text)) and not Path(text).exists() and not Path(owner).is_dir()
