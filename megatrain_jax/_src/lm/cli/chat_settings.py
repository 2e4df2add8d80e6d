"""The settings of `megatrain-jax chat`."""

from dataclasses import dataclass
from typing import Literal

from megatrain_jax._src.common import checks


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Chats with an exported model; Ctrl-D ends the chat.

    Attributes:
        model: Folder of a run, of a model or of adapters, or a name on the Hugging Face Hub.
        base: Folder or name of the base model of adapters; default: the one that they name.
        prompt: A question to answer once, for scripts; default: questions are read from the
            terminal.
        system: A system message at the beginning.
        max_tokens: Maximum number of tokens of an answer.
        temperature: Temperature of sampling, 0 for the most likely tokens; default: as the model's
            generation_config.json says.
        seed: Seed of sampling.
        library: What computes the answers, this library (jax) or Transformers; default: jax where
            JAX finds a GPU and knows the model, and no device is given.
        device: Device of PyTorch, such as cpu; default: cuda if there is a GPU, otherwise cpu.
    """

    model: str
    base: str | None = None
    prompt: str | None = None
    system: str | None = None
    max_tokens: int = 512
    temperature: float | None = None
    seed: int = 0
    library: Literal["jax", "transformers"] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        """Checks constraints beyond types.

        Raises:
            ValueError: If an option is out of range.
        """
        checks.path("model", self.model)
        checks.integer("max_tokens", self.max_tokens)
        checks.integer("seed", self.seed, least=0)
        if self.temperature is not None:
            checks.number("temperature", self.temperature, least=0)
        if self.library == "jax" and self.device is not None:
            raise ValueError("`device` is a device of PyTorch: leave it out with `library`=jax")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("`prompt` is empty")
