"""Names on the Hugging Face Hub: checkpoints and datasets to read, repositories to upload to."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import needing
from megatrain_jax._src.lm.common.hf_folder import existing_folder

# Files that are downloaded: of a tokenizer, with the model's configuration; and of a checkpoint.
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
CHECKPOINT_FILES = ("model*.safetensors", *TOKENIZER_FILES)
_OWNED = r"[\w-][\w.-]*/[\w-][\w.-]*"
_REVISION = r"(?:@([\w][\w./-]*))?"
_NAME = re.compile(rf"({_OWNED}){_REVISION}")
_ROWS = re.compile(rf"({_OWNED}){_REVISION}:(?:([\w][\w.-]*):)?([\w][\w.-]*)")


class HubRows(NamedTuple):
    """A dataset on the Hub, named as `OWNER/NAME[@REVISION][:CONFIG]:SPLIT`.

    Attributes:
        name: The repository.
        revision: Branch, tag or commit; None for the newest.
        config: Configuration of the dataset; None for its default.
        split: The split.
    """

    name: str
    revision: str | None
    config: str | None
    split: str


def hub_rows(given: Any) -> HubRows | None:
    """Returns the dataset on the Hub that a text names; None if it is a path or anything else.

    Files and folders have precedence, as in `folder_or_download`.

    Examples:
        >>> tuple(hub_rows("openai/gsm8k@main:socratic:train"))
        ('openai/gsm8k', 'main', 'socratic', 'train')
        >>> hub_rows("chats/train.jsonl")
    """
    match = _ROWS.fullmatch(given) if isinstance(given, str) else None
    return HubRows(*match.groups()) if match is not None and not _is_on_disk(given) else None


def is_hub_model(given: Any) -> bool:
    """Whether a text may name a Hub checkpoint, `OWNER/NAME[@REVISION]`, and no path on disk."""
    match = _NAME.fullmatch(given) if isinstance(given, str) else None
    return match is not None and not _is_on_disk(given)


def _is_on_disk(path: str) -> bool:
    return Path(path).exists() or Path(path.partition("/")[0]).is_dir()


def folder_or_download(name: str, given: Any, holds: str, files: Sequence[str]) -> Path:
    """Returns the path of a folder on disk, or of a downloaded snapshot of a Hub model.

    An existing folder always has precedence. ``Qwen/Qwen3-0.6B`` names a Hub model only if neither
    that folder nor a folder ``Qwen`` exists; ``Qwen/Qwen3-0.6B@REVISION`` names a branch, tag or
    commit. Cached files are not downloaded again.

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
    if not is_hub_model(given):
        return existing_folder(name, given, holds)
    match = _NAME.fullmatch(text)
    assert match is not None
    repository, revision = match.groups()
    at = "" if revision is None else f" --revision {revision}"
    advice = f"`hf download {repository}{at} --local-dir FOLDER` downloads one of the Hub"
    missing = f"`{name}` must be a folder on disk that holds {holds}, but there is no folder {text}"
    automatic = f"{advice}; with `pip install huggingface_hub` this happens automatically"
    with needing(f"{missing}. {automatic}", FileNotFoundError):  # only Hub checkpoints need it
        hub = importlib.import_module("huggingface_hub")
    try:
        found = hub.snapshot_download(repository, revision=revision, allow_patterns=list(files))
        return Path(found)
    except Exception as caught:  # HTTP, cache and disk errors have no common type
        raise FileNotFoundError(
            f"{missing}, and it can't be downloaded from the Hugging Face Hub: "
            f"{failure(caught)}. {advice} (`hf auth login` first if it is gated)"
        ) from caught


def failure(error: Exception) -> str:
    """An error of a download in one line, and whether the user has forbidden downloads."""
    is_offline = importlib.import_module("huggingface_hub").constants.HF_HUB_OFFLINE
    hint = " (the environment variable HF_HUB_OFFLINE is set: unset it to download)" * is_offline
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}{hint}"


def check_upload(name: str, repository: str) -> None:
    """Checks that a repository has a name, and that the user is logged in, without the network.

    Args:
        name: Name of the argument.
        repository: Value of the argument.

    Raises:
        ImportError: If huggingface_hub is not installed.
        ValueError: If the name is invalid, or nobody is logged in.
    """
    with needing(f"`{name}` needs huggingface_hub: pip install huggingface_hub"):
        hub = importlib.import_module("huggingface_hub")
    if not re.fullmatch(_OWNED, repository):
        raise ValueError(checks.refused(name, "a name such as someone/mine", repository))
    if hub.constants.HF_HUB_OFFLINE:
        raise ValueError(f"`{name}`={repository}: the environment variable HF_HUB_OFFLINE is set")
    if hub.get_token() is None:
        raise ValueError(f"`{name}`={repository} needs a login: run `hf auth login` first")


def upload(folder: Path, repository: str, *, private: bool) -> str:
    """Uploads the files of an export, and returns the address of their commit.

    Args:
        folder: The export.
        repository: Name of the repository, which is created if it doesn't exist.
        private: Whether a new repository is private.

    Raises:
        Exception: Any error of the network or the Hub; the folder stays as it is.
    """
    api = importlib.import_module("huggingface_hub").HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repository,
        folder_path=folder,
        commit_message="Upload with megatrain-jax",
        ignore_patterns=["megatrain_export.json"],
    )
    return str(commit)
