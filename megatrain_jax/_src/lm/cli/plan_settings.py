"""The settings of the commands that don't train: `plan`, `chat` and `merge`."""

from dataclasses import dataclass
from typing import Literal

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.sizes import counted, rate_of, read_and_write_rates
from megatrain_jax._src.lm.cli import run_settings
from megatrain_jax._src.lm.cli.catalogue import config_values


@dataclass(frozen=True, kw_only=True)
class PlanSettings(run_settings.StepSettings, run_settings.AdapterSettings):
    """Plans a training run on any machine; without --tokens, finds the largest run that fits.

    Attributes:
        model: A checkpoint's folder, its config.json, or the name of a known model.
        gpu: Name of the GPU, such as H100; default: this machine's.
        gpus: Number of GPUs of each host, which share the state and the batch.
        hosts: Number of such hosts.
        network: Rate at which each host receives from the others, such as 400Gb/s or 8x400Gb/s;
            default: a network that takes no time.
        state_per_process: Whether each host holds all state instead of a share: gradients then
            cross the network once per step, and weights never. auto takes the faster way, if it may
            cut each batch into a part per host.
        disk: Rates of each host's disks, such as "7GB/s read, 2GB/s write", or one rate for both:
            state that the host's memory can't hold rests there; default: no disk.
        host: Host memory in bytes, or such as 512GiB; default: this machine's or a typical host's.
        tokens: Tokens per step, over all GPUs; without it, the largest sizes that fit.
        length: Tokens of a row.
        compute: dtype of the computation; default: that of `precision`, or bfloat16, or float16 on
            a GPU without bfloat16.
        ema_decay: Decay of a moving average of the trained parameters; default: no average.
        frozen: Form of frozen parameters at rest, "nf4" for 4 bits as in QLoRA; default: the
            masters' form, or with adapters bfloat16, unless the model's config.json has another
            dtype.
        lora_dora: Whether to train the norms of matrices' rows, too (DoRA).
        lora_modules_to_save: Modules to train whole beside adapters, such as embed_tokens and
            lm_head, one or several.
        host_budget: Maximum host memory of the process, such as 200GiB; default: all that the host
            has.
    """

    model: str | None = None
    gpu: str | None = None
    gpus: int = 1
    hosts: int = 1
    network: str | None = None
    disk: str | None = None
    host: int | str | None = None
    tokens: int | None = None
    length: int = 4096
    ema_decay: float | None = None
    lora_dora: bool = False
    lora_modules_to_save: list[str] | str | None = None

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            ValueError: If one is out of range, or needs an option that is missing.
        """
        super().__post_init__()
        self.check_step()
        if self.network is not None:
            rate_of("network", self.network)
        if self.disk is not None:
            read_and_write_rates("disk", self.disk)
        self.check_use("network state_per_process", self.hosts > 1, "several hosts: set `hosts`")
        if self.microbatches == "auto" and self.tokens is None:
            raise ValueError("`microbatches`=auto needs `tokens`: any batch fits in small parts")
        self.check_use(
            "frozen",
            self.trainable is not None or self.lora_rank is not None,
            "parameters that are not trained: set `trainable` or `lora_rank`",
        )
        self.check_use(
            "lora_dora lora_targets lora_modules_to_save",
            self.lora_rank is not None,
            "adapters: set `lora_rank`",
        )

    def check_names(self) -> None:
        """Checks the names of the model and the GPU, and then the sizes of the batch.

        Raises:
            FileNotFoundError: If there is no such model.
            ValueError: If there is no such GPU, or sizes are inconsistent.
        """
        # A corrected name may change the valid sizes.
        if self.model is not None:
            config_values(self.model)
        if self.gpu is not None:
            from megatrain_jax import card  # not needed without a name

            card(self.gpu)
        if self.tokens is None:
            return
        if self.model is None:
            raise ValueError("`tokens` needs a model: a folder, a config.json or a known name")
        rows, rest = divmod(checks.integer("tokens", self.tokens), self.length)
        if rest or not rows:
            raise ValueError(f"`tokens`={self.tokens} is no multiple of `length`={self.length}")
        if rows % self.least_rows:
            raise ValueError(
                f"`tokens`={self.tokens} are {counted(rows, 'row')} of `length`={self.length}, and "
                f"{self.least_rows} must divide their number: `gpus`={self.gpus} times "
                f"`hosts`={self.hosts} times `microbatches`={self.microbatches}"
            )

    @property
    def least_rows(self) -> int:
        """Rows of the smallest batch that GPUs and microbatches can share."""
        return self.num_gpus * self.least_microbatches

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all hosts."""
        return self.hosts * self.gpus

    @property
    def batch(self) -> str:
        """The batch in words."""
        assert self.tokens is not None
        is_whole = self.microbatches in (1, "auto")
        parts = "" if is_whole else f" in {self.microbatches} microbatches"
        return f"{rows_of(self.tokens // self.length, self.length)} a step{parts}"


def rows_of(rows: int, length: int) -> str:
    """A number of rows in words."""
    return f"{counted(rows, 'row')} of {counted(length, 'token')}"


@dataclass(frozen=True, kw_only=True)
class ChatSettings(run_settings.Settings):
    """Chats with an exported model; Ctrl-D ends the chat.

    Attributes:
        model: Folder of a run, of a model or of adapters, or a name on the Hugging Face Hub.
        base: Folder or name of the base model of adapters; default: the one that they name.
        prompt: A question to answer once, for scripts; default: questions are read from the
            terminal.
        system: A system message at the beginning.
        images: Files of images that the first question is about; a folder is a video of its
            frames. Answers are computed by this library.
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
    images: list[str] | str | None = None
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
        super().__post_init__()
        checks.path("model", self.model)
        if self.library == "jax" and self.device is not None:
            raise ValueError("`device` is a device of PyTorch: leave it out with `library`=jax")
        if self.images and (self.library == "transformers" or self.device is not None):
            other = "`device`" if self.device else "`library`=transformers"
            raise ValueError(f"`images` are answered to by this library: leave {other} out")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("`prompt` is empty")


@dataclass(frozen=True, kw_only=True)
class MergeSettings(run_settings.Settings):
    """Merges adapters into their base model, and writes the result as a checkpoint.

    Attributes:
        adapter: Folder of the adapters, in PEFT's format, or a name on the Hugging Face Hub.
        out: Folder to write.
        base: Folder or name of the base model; default: the one that the adapters name.
    """

    adapter: str
    out: str
    base: str | None = None

    def __post_init__(self) -> None:
        """Checks that paths are not empty.

        Raises:
            ValueError: If one is.
        """
        self.check_each(checks.path, "adapter out")
