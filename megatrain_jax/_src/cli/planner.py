"""The settings of plans on the command line, and plans of decoders by these."""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.build.cut import KnownOptimizers
from megatrain_jax._src.cli.catalogue import KNOWN_MODELS, known_model
from megatrain_jax._src.cli.needs import check_needed
from megatrain_jax._src.cli.recipe import (
    Frozen,
    Master,
    OptimizerName,
    State,
    optimizer_of,
    precision_of,
)
from megatrain_jax._src.cli.sizes import batch_shapes, budget_of, bytes_of
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.hf_folder import read_json, regular_file
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.planning import planned

_NAMES = ", ".join(KNOWN_MODELS)
# No host with a GPU has less; a number without a unit is bytes.
_LEAST_HOST = 2**30


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Plans a training run, on any machine; without --tokens, the largest one that fits.

    Attributes:
        model: A checkpoint's folder, its config.json, or the name of a known model.
        gpu: Name of the GPU, such as H100; without it, this machine's.
        gpus: Number of GPUs, which share the state and the batch.
        host: Host memory, such as 512GiB; without it, this machine's or a typical host's.
        tokens: Tokens of a step, of all GPUs together; without it, the largest sizes that fit.
        length: Tokens of a row.
        microbatches: Equal parts that each batch is cut into.
        state: Form of optimizer state; compact is int8 beside masters in bfloat16.
        master: Form of the masters at rest; without it float32, or what compact says.
        optimizer: Name of the optimizer.
        clip: Largest global norm of the gradients; null for no clipping.
        trainable: Regular expression on paths of the parameters that are trained; all without it.
        frozen: Form of the other parameters at rest.
        device_budget: GPU memory for state and activations, in bytes, or least.
    """

    model: str | None = None
    gpu: str | None = None
    gpus: int = 1
    host: str | None = None
    tokens: int | None = None
    length: int = 4096
    microbatches: int = 1
    state: State = "float32"
    master: Master | None = None
    optimizer: OptimizerName = "adamw"
    clip: float | None = 1.0
    trainable: str | None = None
    frozen: Frozen | None = None
    device_budget: str | None = None

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            ValueError: If one is out of its range, or they don't fit together.
        """
        for name in ("gpus", "length", "microbatches"):
            checks.integer(name, getattr(self, name))
        if self.clip is not None:
            checks.number("clip", self.clip, above=0)
        check_needed(
            self,
            ("frozen",),
            is_there=self.trainable is not None,
            needed="parameters that are not trained: say `trainable`",
        )
        if self.tokens is None:
            return
        rows, rest = divmod(checks.integer("tokens", self.tokens), self.length)
        if rest or not rows:
            raise ValueError(f"`tokens`={self.tokens} is no multiple of `length`={self.length}")
        if rows % self.least_rows:
            raise ValueError(
                f"`tokens`={self.tokens} are {rows} rows of `length`={self.length}, which "
                f"{self.gpus} GPUs with `microbatches`={self.microbatches} can't share evenly: "
                f"{self.least_rows} must divide them"
            )
        if self.model is None:
            raise ValueError("`tokens` needs a model: a folder, a config.json or a known name")

    @property
    def least_rows(self) -> int:
        """Rows of the smallest batch that GPUs and microbatches can share."""
        return self.gpus * self.microbatches

    @property
    def batch(self) -> str:
        """The batch in words."""
        assert self.tokens is not None
        parts = "" if self.microbatches == 1 else f" in {self.microbatches} microbatches"
        return f"{rows_of(self.tokens // self.length, self.length)} a step{parts}"


class Planner:
    """Plans of decoders on one machine, all with the same settings.

    Attributes:
        settings: The settings.
        machine: The machine, with the host memory that the settings say.
    """

    def __init__(self, settings: PlanSettings, machine: mt.Hardware | None = None):
        """Finds the machine and makes the optimizer.

        Args:
            settings: The settings.
            machine: The machine, if another planner has found it.

        Raises:
            ValueError: If the GPU isn't known, or there is none here and none is named.
        """
        self.settings = settings
        self.machine = machine or _machine(settings)
        precision = precision_of(settings.state, settings.master, settings.frozen, jnp.bfloat16)
        self._options: dict[str, Any] = {
            "hardware": self.machine,
            "num_gpus": settings.gpus,
            "microbatches": settings.microbatches,
            "precision": precision,
            "trainable": settings.trainable,
            "device_budget": budget_of(settings.device_budget),
        }
        # No plan depends on the rate.
        self._optimizer = optimizer_of(settings.optimizer, 1e-5, clip=settings.clip)
        self._known = KnownOptimizers()

    def plan(
        self, config: models.DecoderConfig, rows: int, length: int, *, least: bool = False
    ) -> mt.Plan:
        """Plans steps on so many rows.

        Args:
            config: Sizes of the model.
            rows: Rows of a batch, of all GPUs together.
            length: Tokens of a row.
            least: Whether to plan the least budget where the settings leave it open.
        """
        options = dict(self._options)
        # Whether a size fits at all is decided by the least budget; a plan of it takes less time.
        if least and options["device_budget"] is None:
            options["device_budget"] = "least"
        return planned(
            lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
            models.next_token_loss,
            self._optimizer,
            batch_shapes(rows, length),
            self._known,
            **options,
        )

    @property
    def host_bytes(self) -> int | None:
        """Host memory of the machine, or of a typical one; None if unknown."""
        return self.machine.times(self.settings.gpus).assumed_host_bytes

    @property
    def where(self) -> str:
        """The machine in words."""
        count = self.settings.gpus
        number = "" if count == 1 else f"{count} × "
        memory = "" if self.host_bytes is None else f" with {sized(self.host_bytes)} of host memory"
        return f"{number}{self.machine.name}{memory}"


def rows_of(rows: int, length: int) -> str:
    """A number of rows in words."""
    return f"{rows:,} row{'s' * (rows > 1)} of {length:,} tokens"


def config_of(model: str) -> models.DecoderConfig:
    """Reads the sizes of a model.

    Args:
        model: A checkpoint's folder, its `config.json`, or a known name.

    Raises:
        FileNotFoundError: If there is no such file, folder or name.
        ValueError: If the architecture or an option of it isn't supported.
    """
    return models.DecoderConfig.from_hf(config_values(model))


def config_values(model: str) -> dict[str, Any]:
    """The fields of the `config.json` of a model.

    Args:
        model: See `config_of`.

    Raises:
        FileNotFoundError: If there is no such file, folder or name.
        ValueError: If the file is damaged.
    """
    path = Path(model).expanduser()
    if path.exists():
        # A configuration may have any name, as one that was copied from elsewhere.
        folder, name = (path, "config.json") if path.is_dir() else (path.parent, path.name)
        if (file := regular_file(folder, name)) is None:
            raise FileNotFoundError(f"there is no config.json in {path}")
        return read_json(file)
    if (known := known_model(model)) is None:
        near = get_close_matches(model, KNOWN_MODELS, n=3)
        hint = f"did you mean {' or '.join(near)}" if near else f"known are {_NAMES}"
        raise FileNotFoundError(
            f"`model` = {model!r} is no folder, no file and no known name; {hint}"
        )
    return known.config()


def _machine(settings: PlanSettings) -> mt.Hardware:
    machine = mt.this_machine() if settings.gpu is None else mt.card(settings.gpu)
    if machine is None:
        raise ValueError("there is no GPU here to plan for: name one, such as --gpu H100")
    # Any card may be in any host.
    if settings.host is None:
        return machine
    host = bytes_of("host", settings.host)
    if host < _LEAST_HOST:
        raise ValueError(
            f"`host`={settings.host} is less than 1 GiB: a unit is missing, as in 512GiB"
        )
    return replace(machine, host_bytes=host)
