"""The sizes of a model: from its `config.json`, or from `catalogue.json` for a known name.

`catalogue.json` has popular open-weights models, so that a plan needs no checkpoint.
Fields of a `config.json` that affect neither parameters nor a step's work, such as the base of
rotary embeddings, are left out of the table. A test compares each published number of parameters
with the model built from its sizes.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatrain_jax._src.lm.common.hf_folder import (
    existing_folder,
    is_gguf,
    read_json,
    required_file,
)

_FILE = Path(__file__).with_name("catalogue.json")
# What checkpoints of the same sizes add to a name: their training, or the month of their release.
_VARIANT = re.compile(r"(-(it|pt|base|instruct|chat|thinking|hf|bf16|\d{4}))+$")


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """The sizes of a model.

    Attributes:
        num_parameters: The published number of the decoder's parameters; a tied embedding counts
            once.
        config: The fields of its `config.json`, with all sizes.
    """

    num_parameters: int
    config: Mapping[str, Any]


@functools.cache
def known_models() -> dict[str, KnownModel]:
    """The known models by name; the file is read at the first call."""
    table = json.loads(_FILE.read_text(encoding="utf-8"))
    return {name: KnownModel(**entry) for name, entry in table["models"].items()}


def known_model(name: str) -> KnownModel | None:
    """The model with a name; None for an unknown name.

    Args:
        name: A name in the table, in any capitals, also with its publisher and a variant of the
            same sizes: "Qwen/Qwen3-4B-Instruct-2507", "meta-llama/Meta-Llama-3-8B".
    """
    known, short = {key.lower(): model for key, model in known_models().items()}, _short(name)
    return known.get(short) or known.get(_VARIANT.sub("", short))


def _short(name: str) -> str:
    return name.rpartition("/")[2].lower().removeprefix("meta-")


def config_values(model: str) -> dict[str, Any]:
    """The fields of the `config.json` of a model.

    Args:
        model: A checkpoint's folder, its `config.json`, or a known name.

    Raises:
        FileNotFoundError: If there is no such file, folder or name.
        ValueError: If the file is damaged.
    """
    path = Path(model).expanduser()
    if is_gguf(path):
        existing_folder("model", model, "config.json")  # it isn't, and the error says what to do
    if path.exists():
        # A configuration may have any name, for example if it was copied from elsewhere.
        folder, name = (path, "config.json") if path.is_dir() else (path.parent, path.name)
        return read_json(required_file(folder, name))
    if (known := known_model(model)) is None:
        names = {name.lower(): name for name in known_models()}
        near = [names[short] for short in get_close_matches(_short(model), names, n=3)]
        known_names = ", ".join(known_models())
        hint = f"did you mean {' or '.join(near)}" if near else f"known are {known_names}"
        raise FileNotFoundError(
            f"`model` = {model!r} is no folder, no file and no known name; {hint}"
        )
    return dict(known.config)
