"""Plans decoders with the settings of the command line."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import naming
from megatrain_jax._src.common.remembering import IdentityKey, remembered
from megatrain_jax._src.common.repeated_model import RepeatedModel
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.lm.cli import model_and_batch
from megatrain_jax._src.lm.cli.catalogue import config_values
from megatrain_jax._src.lm.cli.few_layers import repeated_layers
from megatrain_jax._src.lm.cli.plan_settings import PlanSettings
from megatrain_jax._src.lm.cli.recipe import optimizer_of, precision_of

# No host with a GPU has less; a number without a unit means bytes.
_LEAST_HOST = 2**30
# The elements by which `models.attention` widens heads to tell packed documents apart.
_MARK = 64


class Planner:
    """Plans decoders on one machine, all with the same settings.

    Attributes:
        settings: The settings.
        machine: The machine, with the host memory given in the settings.
    """

    def __init__(self, settings: PlanSettings, machine: mt.Hardware | None = None):
        """Finds the machine and makes the optimizer.

        Args:
            settings: The settings.
            machine: The machine, if another planner has found it already.

        Raises:
            ValueError: If the GPU isn't known, or none is named and this machine has none.
        """
        self.settings = settings
        self.machine = machine or _machine(settings)
        names = "hosts network state_per_process disk microbatches ema_decay".split()
        names += ["device_budget", "host_budget"]
        given: dict[str, Any] = {name: getattr(settings, name) for name in names}
        self._options = given | {"hardware": self.machine, "num_gpus": settings.gpus}
        # No plan depends on the learning rate. Plans share results computed for the same objects.
        name, clip, options = settings.optimizer, settings.clip, settings.optimizer_options
        self._optimizer = remembered(
            "optimizer",
            lambda: (name, clip, json.dumps(options, default=repr)),
            lambda: optimizer_of(name, 1e-5, clip=clip, options=options),
        )

    def plan(
        self, config: models.DecoderConfig, rows: int, length: int, *, least: bool = False
    ) -> mt.Plan:
        """Plans steps on this many rows.

        Args:
            config: Sizes of the model.
            rows: Rows of a batch, over all GPUs.
            length: Tokens of a row.
            least: Whether to plan the minimum budget if the settings leave it open.
        """
        options = dict(self._options)
        # The minimum budget decides whether a size fits at all, and its plan takes less time.
        if least and checks.device_budget(options["device_budget"]) is None:
            options["device_budget"] = "minimum"
        model, trainable = self._model(config)
        settings = self.settings
        has_adapters = settings.lora_rank is not None
        frozen = model_and_batch.frozen_of(settings.frozen, has_adapters, _saved_dtype(config))
        return mt.plan(
            model,
            models.next_token_loss,
            self._optimizer,
            remembered(
                "batch", lambda: (rows, length), lambda: model_and_batch.batch_shapes(rows, length)
            ),
            precision=precision_of(settings, frozen),
            trainable=trainable,
            **options,
        )

    def _model(self, config: models.DecoderConfig) -> tuple[Any, Sequence[str] | str | None]:
        """The function that builds a model, and the patterns of the trained parameters."""
        lora, given = model_and_batch.lora_options(self.settings), self.settings.trainable
        trainable = tuple(given) if isinstance(given, list) else given  # hashable

        def make() -> tuple[Any, Sequence[str] | str | None]:
            model, trained = partial(_build, config), trainable
            if lora["rank"] is not None:
                model, _, trained = model_and_batch.with_adapters(model, trainable, lora)
            # Patterns may tell layers apart.
            patterns = trainable, lora.get("targets"), lora.get("modules_to_save")
            are_alike = trainable is None and not re.search(r"\d", repr(patterns))
            if are_alike and (few := repeated_layers(config)):
                small, trained = self._model(few.config)
                model = RepeatedModel(
                    few=small,
                    whole=model,
                    container=("layers",),
                    first=few.first,
                    period=few.period,
                    times=few.times,
                )
            return model, trained

        return remembered("build", lambda: (config, repr(lora), trainable), make)

    def smallest(self, config: models.DecoderConfig) -> mt.Plan:
        """Plans steps on the fewest rows of the settings' length, with the minimum budget."""
        rows, length = self.settings.least_rows, self.settings.length
        key = IdentityKey(self), config
        return remembered(
            "smallest plan", lambda: key, lambda: self.plan(config, rows, length, least=True)
        )

    @property
    def host_bytes(self) -> int | None:
        """Host memory of the machine, or of a typical one; None if unknown."""
        return self.machine.times(self.settings.gpus).assumed_host_bytes

    def remark(self, config: models.DecoderConfig, plan: mt.Plan) -> str | None:
        """Remarks on kernels that a plan lacks, and the reason; None if there are none."""
        remarks = []
        if config.experts is not None and not plan.by_kernels:
            remarks.append(
                "Experts are planned in a loop. The extra `kernels` computes them faster, on one "
                "H100 or H200, in bfloat16 or float16."
            )
        if packed := self._remark_on_packing(config, plan):
            remarks.append(packed)
        return "\n".join(remarks) or None

    def _remark_on_packing(self, config: models.DecoderConfig, plan: mt.Plan) -> str | None:
        """A remark if only packed documents prevent an attention kernel; None otherwise."""
        width, widest = config.head_dim, self.machine.widest_heads
        has_kernel = self.settings.compute != "float32" and config.attention_softcap is None
        if plan.attention_flops_per_step or not has_kernel or not width <= widest < width + _MARK:
            return None
        return (
            "Rows are planned as packed documents, as finetune and pretrain read them. On this "
            "card, plain operations compute attention in such long rows. Rows of up to 16,384 "
            "tokens, or batches without `segments`, in Python, are faster."
        )

    @property
    def where(self) -> str:
        """The machine in words."""
        count, hosts = self.settings.gpus, self.settings.hosts
        number = "" if hosts == 1 else f"{hosts} hosts of "
        number += "" if hosts == count == 1 else f"{count} × "
        memory = "" if self.host_bytes is None else f" with {sized(self.host_bytes)} of host memory"
        return f"{number}{self.machine.name}{memory}"


def config_of(model: str) -> models.DecoderConfig:
    """Reads the sizes of a model.

    Args:
        model: A checkpoint's folder, its `config.json`, or a known name.

    Raises:
        FileNotFoundError: If there is no such file, folder or name.
        ValueError: If the architecture or an option of it isn't supported.
    """
    values = config_values(model)
    with naming(f"`model` = {model}"):
        return models.DecoderConfig.from_hf(values)


def _build(config: models.DecoderConfig) -> models.Decoder:
    return models.Decoder(config, rngs=nnx.Rngs(0))


def _saved_dtype(config: models.DecoderConfig) -> str:
    """The dtype of a model's checkpoint: bfloat16, unless its configuration names another."""
    values = json.loads(config.original or "{}")
    named = values.get("dtype") or values.get("torch_dtype")
    return named if named in ["float32", "float16"] else "bfloat16"


def _machine(settings: PlanSettings) -> mt.Hardware:
    machine = mt.this_machine() if settings.gpu is None else mt.card(settings.gpu)
    if machine is None:
        raise ValueError("there is no GPU here to plan for: name one, such as --gpu H100")
    # Any card may be in any host.
    if settings.host is None:
        return machine
    host = checks.num_bytes("host", settings.host)
    assert isinstance(host, int)
    if host < _LEAST_HOST:
        raise ValueError(
            f"`host`={settings.host} is less than 1 GiB: a unit is missing, as in 512GiB"
        )
    return replace(machine, host_bytes=host)
