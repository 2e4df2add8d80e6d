"""The folder of a checkpoint by its name on the Hugging Face Hub: downloaded, or in the cache."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.hf_folder import existing_folder

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def folder_or_download(name: str, given: Any, holds: str, files: Sequence[str]) -> Path:
    """Returns the path of a folder on disk, or of the snapshot of a model of the Hub.

    A folder that is there always goes first. ``Qwen/Qwen3-0.6B`` is a model of the Hub if there is
    neither such a folder nor a folder ``Qwen``. What the cache has is not fetched again.

    Args:
        name: Name of the argument.
        given: Value of the argument.
        holds: Description of the files the folder should hold, for the message.
        files: Patterns of the files to download; a model's code is never among them.

    Raises:
        TypeError: If it is no path.
        FileNotFoundError: If there is no such folder, and it can't be downloaded.
    """
    text = checks.path(name, given)
    if not isinstance(given, str) or not _is_name(text):
        return existing_folder(name, given, holds)
    advice = f"`hf download {text} --local-dir FOLDER` downloads one of the Hub"
    missing = f"`{name}` must be a folder on disk that holds {holds}, but there is no folder {text}"
    try:
        # What only strangers' checkpoints need is no part of the core.
        hub = importlib.import_module("huggingface_hub")
    except ImportError as caught:
        raise FileNotFoundError(
            f"{missing}. {advice}; it comes with `pip install huggingface_hub`, with which "
            "this is done here"
        ) from caught
    try:
        return Path(hub.snapshot_download(text, allow_patterns=list(files)))
    except Exception as caught:  # errors of HTTP, the cache and the disk have no common type
        why = " ".join(str(caught).split())[:300]
        raise FileNotFoundError(
            f"{missing}, and it can't be downloaded from the Hugging Face Hub: "
            f"{type(caught).__name__}: {why}. {advice} (`hf auth login` first if it is gated)"
        ) from caught


def _is_name(text: str) -> bool:
    owner = text.partition("/")[0]
    return bool(_NAME.fullmatch(text)) and not Path(text).exists() and not Path(owner).is_dir()
