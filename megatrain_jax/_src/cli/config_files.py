"""Reads the `config.json` of a model, from a file or the table of known models."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatrain_jax._src.cli.catalogue import known_model, known_models
from megatrain_jax._src.common.hf_folder import read_json, regular_file


def config_values(model: str) -> dict[str, Any]:
    """The fields of the `config.json` of a model.

    Args:
        model: A checkpoint's folder, its `config.json`, or a known name.

    Raises:
        FileNotFoundError: If there is no such file, folder or name.
        ValueError: If the file is damaged.
    """
    path = Path(model).expanduser()
    if path.exists():
        # A configuration may have any name, for example if it was copied from elsewhere.
        folder, name = (path, "config.json") if path.is_dir() else (path.parent, path.name)
        if (file := regular_file(folder, name)) is None:
            raise FileNotFoundError(f"there is no config.json in {path}")
        return read_json(file)
    if (known := known_model(model)) is None:
        near = get_close_matches(model, known_models(), n=3)
        known_names = ", ".join(known_models())
        hint = f"did you mean {' or '.join(near)}" if near else f"known are {known_names}"
        raise FileNotFoundError(
            f"`model` = {model!r} is no folder, no file and no known name; {hint}"
        )
    return dict(known.config)
