"""Loads the tokenizer of an untrusted checkpoint without running its code."""

from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from megatrain_jax._src.lm.common.hf_folder import read_all_json
from megatrain_jax._src.lm.common.hub import TOKENIZER_FILES, folder_or_download


def load_tokenizer(given: Any, argument: str = "tokenizer") -> Any:
    """Loads the tokenizer in a folder on disk, as `AutoTokenizer` does.

    No code in the folder is run.

    Args:
        given: The argument `tokenizer`: the folder, or the name of a Hugging Face Hub model.
        argument: Name of the argument, for errors.

    Returns:
        A Transformers tokenizer.

    Raises:
        FileNotFoundError: If there is no such folder, and it can't be downloaded.
        ValueError: If one of its files is damaged or not regular, or Transformers can't load it.
    """
    folder = folder_or_download(argument, given, "a tokenizer (tokenizer.json)", TOKENIZER_FILES)
    values = read_all_json(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder),
            config=_config(values.get("config.json", {})),
            local_files_only=True,
            trust_remote_code=False,
        )
        tokenizer("a")  # some options are read only here
    except Exception as error:  # Transformers' errors for damaged files have no common type
        why = f"Transformers can't load it: {type(error).__name__}: {str(error)[:500]}"
        if "auto_map" in values.get("tokenizer_config.json", {}):
            why = (
                "it asks for code of its own (`auto_map` in tokenizer_config.json), which isn't run"
            )
        raise ValueError(
            f"`{argument}` = {folder}: {why}. A {argument} that you loaded may be passed in place "
            "of its folder"
        ) from error
    return tokenizer


def _config(values: dict[str, Any]) -> PreTrainedConfig:
    """The model's configuration reduced to its type, which determines the tokenizer's class.

    Untrusted numbers are left out: Transformers would list a model's layers, however many.
    """
    kept = {
        key: values[key] for key in ("model_name", "model_type", "tokenizer_class") if key in values
    }
    if kept.get("model_type") == "mistral" and "layer_types" in values:
        kept["model_type"] = "ministral"  # as in AutoConfig
    try:
        return AutoConfig.for_model(**kept)
    except Exception:
        return PreTrainedConfig.from_dict(kept)
