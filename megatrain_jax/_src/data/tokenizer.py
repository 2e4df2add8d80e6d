"""Loads the tokenizer of a checkpoint, which may be anybody's, without running its code."""

from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from megatrain_jax._src.common.hf_folder import read_json, regular_file
from megatrain_jax._src.common.hub import folder_or_download

# The files of a tokenizer's folder that Transformers reads as JSON.
_JSON = (
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
_OTHER = ("chat_template.jinja", "merges.txt", "tekken.json", "tokenizer.model", "vocab.txt")


def load_tokenizer(given: Any) -> Any:
    """Loads the tokenizer in a folder on disk, as `AutoTokenizer` does.

    No code of the folder is run.

    Args:
        given: The argument `tokenizer`: the folder, or the name of a model of the Hugging Face Hub.

    Returns:
        A tokenizer of Transformers.

    Raises:
        FileNotFoundError: If there is no such folder, and it can't be downloaded.
        ValueError: If a file of it is damaged or no regular file, or Transformers can't load it.
    """
    folder = folder_or_download(
        "tokenizer", given, "a tokenizer (tokenizer.json)", (*_JSON, *_OTHER)
    )
    # Looked at alone: a link out of the folder is refused before Transformers follows it.
    for name in _OTHER:
        regular_file(folder, name)
    files = {name: regular_file(folder, name) for name in _JSON}
    values = {name: read_json(path) for name, path in files.items() if path is not None}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder),
            config=_config(values.get("config.json", {})),
            local_files_only=True,
            trust_remote_code=False,
        )
        tokenizer("a")  # some options are looked at only here
    except Exception as error:  # what Transformers raises for damaged files has no common type
        why = f"Transformers can't load it: {type(error).__name__}: {str(error)[:500]}"
        if "auto_map" in values.get("tokenizer_config.json", {}):
            why = (
                "it asks for code of its own (`auto_map` in tokenizer_config.json), which isn't run"
            )
        raise ValueError(
            f"`tokenizer` = {folder}: {why}. A tokenizer that you loaded may be passed in place of "
            "its folder"
        ) from error
    return tokenizer


def _config(values: dict[str, Any]) -> PreTrainedConfig:
    """The model's configuration with its type alone, which the tokenizer's class follows from.

    A stranger's numbers are left out: Transformers lists the layers of a model, however many.
    """
    kept = {
        key: values[key] for key in ("model_name", "model_type", "tokenizer_class") if key in values
    }
    if kept.get("model_type") == "mistral" and "layer_types" in values:
        kept["model_type"] = "ministral"  # as AutoConfig takes it
    try:
        return AutoConfig.for_model(**kept)
    except Exception:
        return PreTrainedConfig.from_dict(kept)
