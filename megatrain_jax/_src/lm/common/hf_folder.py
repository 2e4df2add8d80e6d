"""Safe reading of a Hugging Face checkpoint's folder, which may come from anybody.

Every read of such a folder goes through this file. It opens only regular files, also through links.
JSON is limited in size, and read as `outside.py` does. A file name found in the folder must stay
within it, and only the folder's own files are copied out.
"""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import check_regular, check_texts, parsed_json

# Tokenizers with 250,000 tokens have files of about 30 MB.
_MAX_JSON_BYTES = 2**28
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# Files of tokenizers, processors and text generation. Nothing else is copied, least of all code.
_COMPANIONS = f"""
    added_tokens.json {CHAT_TEMPLATE} chat_template.json {GENERATION_CONFIG} merges.txt
    preprocessor_config.json processor_config.json sentencepiece.bpe.model special_tokens_map.json
    spiece.model tekken.json tokenizer.json tokenizer.model tokenizer.model.v3
    tokenizer_config.json video_preprocessor_config.json vocab.json vocab.txt
""".split()
_TEMPLATES = "additional_chat_templates"
_OTHERS = ("config.json", "adapter_config.json", "model.safetensors.index.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""The files of a processor of images; a folder may have only one of them."""


def existing_folder(name: str, given: Any, holds: str) -> Path:
    """Returns the path of an existing folder; `~` is the user's home.

    Args:
        name: Name of the argument.
        given: Value of the argument.
        holds: Description of the files it should hold, for the message.

    Raises:
        TypeError: If it is not a path.
        FileNotFoundError: If there is no such folder.
    """
    path = Path(checks.path(name, given))
    if path.is_dir():
        return path
    what = f"{path} is a file" if path.is_file() else f"there is no folder {path}"
    advice = "`hf download NAME --local-dir FOLDER` downloads one of the Hub"
    if is_gguf(path):
        advice = "`models.save_pretrained(models.load_pretrained(FILE), FOLDER)` makes one of it"
    raise FileNotFoundError(
        f"`{name}` must be a folder on disk that holds {holds}, but {what}. {advice}"
    )


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its name or its first bytes; Ollama's have no suffix."""
    if path.suffix.lower() == ".gguf":
        return not path.is_dir()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def regular_file(folder: Path, name: str) -> Path | None:
    """Returns the path of a regular file, or None if nothing has that name.

    Raises:
        FileNotFoundError: If it is a dangling link.
        ValueError: If it is not a regular file: reading a named pipe, for example, would never end.
    """
    path = folder / name
    try:
        check_regular(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise FileNotFoundError(f"{path} is a link to a file that isn't there") from None
        return None
    return path


def required_file(folder: Path, name: str) -> Path:
    """The path of a regular file in a folder.

    Raises:
        FileNotFoundError: If there is none; the error names its place or the folder's contents.
        ValueError: If it is not a regular file.
    """
    path = regular_file(folder, name)
    if path is None:
        raise _no_file(folder, name)
    return path


def _no_file(folder: Path, name: str) -> FileNotFoundError:
    parts = (folder / "model", folder / "adapter")
    inside = next((part for part in parts if (part / name).is_file()), None)
    if inside is not None:
        return FileNotFoundError(f"there is no {name} in {folder}, but one in {inside}: pass that")
    kinds = {"config.json": "a whole model", "adapter_config.json": "adapters, not a whole model"}
    other = next((of for at, of in kinds.items() if at != name and (folder / at).is_file()), None)
    end = "" if other is None else f": it holds {other}"
    return FileNotFoundError(f"there is no {name} in {folder}{end}")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a regular file.

    Raises:
        ValueError: If it is not a regular file, is larger than 256 MiB, or is not a JSON object.
    """
    size = check_regular(path)
    if size > _MAX_JSON_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, more than the {_MAX_JSON_BYTES:,} allowed")
    with path.open("rb") as file:
        content = file.read(size)
    try:
        values = parsed_json(content)
        check_texts(content, values)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON that can be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds a {type(values).__name__}")
    return values


def companion_names(folder: Path) -> list[str]:
    """The names of files of tokenizers, processors and generation that a folder may have."""
    templates = sorted(path.name for path in (folder / _TEMPLATES).glob("*.jinja"))
    return [*_COMPANIONS, *(f"{_TEMPLATES}/{name}" for name in templates)]


def read_all_json(folder: Path) -> dict[str, dict[str, Any]]:
    """Checks the files of a folder that Transformers or PEFT may read.

    Returns:
        The JSON objects in them, by the names of their files.

    Raises:
        FileNotFoundError: If a file is a dangling link.
        ValueError: If a file is not regular, or one named as JSON is not a JSON object.
    """
    files = {name: regular_file(folder, name) for name in (*_OTHERS, *companion_names(folder))}
    return {
        name: read_json(path)
        for name, path in files.items()
        if path is not None and name.endswith(".json")
    }


def end_tokens_of(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids in the field `eos_token_id` of generation settings: an id, a list or null."""
    given = values.get("eos_token_id")
    ids = given if isinstance(given, list) else [given]
    # Other values, such as -1 for none, are no token of any vocabulary.
    return tuple(i for i in ids if type(i) is int and 0 <= i < 2**31)


def name_within(path: Path, given: str) -> str:
    """Checks a file name that is read from a file of the folder, and returns it.

    Args:
        path: The file that contains the name.
        given: The name.

    Raises:
        ValueError: If it may lead out of the folder.
    """
    name = PurePosixPath(given)
    if name.is_absolute() or ".." in name.parts or not name.name or not given.isprintable():
        raise ValueError(f"{path} names the file {given[:200]!r}, which is not in its folder")
    return str(name)


def own_file(folder: Path, name: str) -> Path | None:
    """Returns the real path of a folder's file, or None if nothing has that name.

    A link counts as the folder's own if it ends within the folder. In the cache of huggingface_hub,
    it may also end at the blobs that a model's snapshots link to.

    Raises:
        FileNotFoundError: See `regular_file`.
        ValueError: If it is not a regular file, a link leads outside the folder, or a file named as
            JSON is not a JSON object.
    """
    path = regular_file(folder, name)
    if path is None:
        return None
    real = path.resolve()
    if not any(real.is_relative_to(place) for place in _places(folder.resolve())):
        raise ValueError(
            f"{path} is a link to {os.readlink(path) if path.is_symlink() else real}, outside its "
            "folder, and isn't copied. Put the file itself there if it belongs to the checkpoint"
        )
    if real.suffix == ".json" or path.suffix == ".json":
        read_json(path)
    return real


def _places(folder: Path) -> list[Path]:
    """Folders in which a link may end: `models--*/snapshots/*` links to two folders of blobs."""
    model = folder.parent.parent
    if folder.parent.name == "snapshots" and model.name.startswith("models--"):
        return [folder, model / "blobs", model.parent / "blobs"]
    return [folder]
