"""Answers of `megatrain-jax chat` by `models.generate`, for models that this library knows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_jax import models
from megatrain_jax._src.common.outside import integer, number
from megatrain_jax._src.lm.cli.chat_settings import ChatSettings
from megatrain_jax._src.lm.common.hf_folder import read_json, regular_file
from megatrain_jax._src.lm.common.prompts import prompt_ids

# Transformers' default of `top_k`, for a generation_config.json without it.
_TOP_K = 50
# Fields of generation_config.json without effect here; `generate` reads the stop ids itself.
_WITHOUT_EFFECT = {"max_length", "max_new_tokens", "transformers_version", "use_cache"}
_WITHOUT_EFFECT |= {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}


@dataclass(frozen=True)
class JaxChatModel:
    """A model in JAX that answers on the terminal, some words at a time.

    Attributes:
        generator: The model.
        tokenizer: Its tokenizer, of Transformers.
        longest: Maximum number of tokens of a conversation; None if there is none.
        options: Options of `generate`.
    """

    generator: models.Generator
    tokenizer: Any
    longest: int | None
    options: Mapping[str, Any]

    @property
    def has_turns(self) -> bool:
        """Whether messages are formatted by a chat template; if not, prompts are continued."""
        return self.tokenizer.chat_template is not None

    def answer(self, messages: list[dict[str, str]]) -> str:
        """Prints an answer to messages while it is written, and returns it.

        Raises:
            ValueError: If the chat template fails on them, or they are too long for the model.
        """
        ids = self._ids(messages)
        if self.longest is not None and len(ids) >= self.longest:
            raise ValueError(
                f"the conversation has {len(ids):,} tokens, but the model's maximum is "
                f"{self.longest:,}: begin a new chat"
            )
        shown = ""

        def show(prompt: int, sample: int, text: str) -> None:
            nonlocal shown
            # A character may consist of several tokens; the last ones may still be missing.
            if not text.endswith("\ufffd"):
                print(text[len(shown) :], end="", flush=True)
                shown = text

        (found,) = self.generator.generate([ids], on_text=show, **self.options)
        print(found.text[len(shown) :], flush=True)
        return found.text

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        prompt = messages if self.has_turns else messages[-1]["content"]
        try:
            return prompt_ids(prompt, self.tokenizer)
        except Exception as error:  # a template may raise any error
            why = " ".join(str(error).split())[:500]
            name = self.tokenizer.name_or_path
            raise ValueError(
                f"the chat template of {name} fails on these messages: {why}"
            ) from error


def sampling_of(folder: Path, settings: ChatSettings) -> dict[str, Any]:
    """The options of `generate` for a checkpoint.

    Raises:
        ValueError: If its generation_config.json has an option that `generate` lacks.
    """
    path = regular_file(folder, "generation_config.json")
    given = read_json(path) if path else {}
    found = {name: x for name, x in given.items() if x is not None and x is not False}
    top_k = integer(str(path), "top_k", found.pop("top_k", _TOP_K))
    top_p = number(str(path), "top_p", found.pop("top_p", 1.0), least=0)
    temperature = number(str(path), "temperature", found.pop("temperature", 1.0), least=0)
    temperature = temperature if found.pop("do_sample", False) else 0.0
    found = {n: x for n, x in found.items() if n not in _WITHOUT_EFFECT and not n.startswith("_")}
    if found:
        raise ValueError(f"{path} has {', '.join(sorted(found))}, which generation in JAX lacks")
    if settings.temperature is not None:
        temperature = settings.temperature
    return {
        "max_tokens": settings.max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": settings.seed,
    }


def open_jax_chat_model(settings: ChatSettings, folder: Path, tokenizer: Any) -> JaxChatModel:
    """Opens a model in JAX.

    Raises:
        ValueError: If this library does not know the model, or its options of sampling.
    """
    options = sampling_of(folder, settings)
    pretrained = models.load_pretrained(folder)
    config = folder / "config.json"
    longest = read_json(config).get("max_position_embeddings")
    if longest is not None:
        longest = integer(config, "max_position_embeddings", longest, least=1)
    return JaxChatModel(
        models.Generator(pretrained, tokenizer=tokenizer), tokenizer, longest, options
    )
