"""The settings of `megatrain-jax pretrain`, in addition to the common ones of training."""

from dataclasses import dataclass
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.cli.training_settings import TrainingSettings


@dataclass(frozen=True, kw_only=True)
class PretrainSettings(TrainingSettings):
    """Trains a model from random weights on text; the same command resumes the run.

    Attributes:
        model: Sizes of the model: a config.json or its folder, or the name of a known model.
        tokenizer: Folder of the tokenizer, or its name on the Hugging Face Hub; it is copied to
            the exported model too.
        sizes: Fields of config.json to set, such as {num_hidden_layers: 8, vocab_size: 32000}.
    """

    model: str
    tokenizer: str
    sizes: dict[str, Any] | None = None
    learning_rate: float = 3e-4
    warmup: float = 0.01
    weight_decay: float = 0.1
    held_out: float = 0.005

    def __post_init__(self) -> None:
        """Checks constraints beyond types.

        Raises:
            ValueError: If an option is out of range, or some contradict each other.
        """
        super().__post_init__()
        for name in ("model", "tokenizer"):
            checks.path(name, getattr(self, name))
