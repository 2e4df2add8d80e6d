"""Loads the tokenizer in a folder, and renders prompts with a chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

from megatrain_jax._src.lm.common.hf_folder import read_all_json


def load_tokenizer(option: str, given: str) -> Any:
    """Loads the tokenizer in a folder.

    Args:
        option: Name of the option, for errors.
        given: The folder.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If it can't be loaded.
    """
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"`{option}` = {given} must be the folder of a tokenizer")
    read_all_json(folder)
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # Transformers' errors for damaged files have no common type
        why = " ".join(str(error).split())[:500]
        raise ValueError(f"`{option}` = {given}: Transformers can't load it: {why}") from error


@dataclass(frozen=True)
class TemplatedTokenizer:
    """A tokenizer that renders questions with the settings' template and variables.

    Attributes:
        tokenizer: The tokenizer.
        template: The Jinja template; None for the tokenizer's.
        variables: Further variables of the template.
    """

    tokenizer: Any
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text for ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """The ids of messages.

        Raises:
            ValueError: If the template fails on them.
        """
        given = {"chat_template": self.template, **self.variables, **options}
        try:
            return self.tokenizer.apply_chat_template(messages, **given)
        except Exception as error:  # a template may raise any error
            why = " ".join(str(error).split())[:500]
            raise ValueError(f"the chat template makes no question of `samples`: {why}") from error

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text."""
        return self.tokenizer.eos_token_id
