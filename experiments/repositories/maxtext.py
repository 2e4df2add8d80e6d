"""Trains a model of MaxText, unchanged, with MaxText's own loss and optimizer.

    git clone https://github.com/AI-Hypercomputer/maxtext
    python experiments/repositories/maxtext.py maxtext/src --steps=5
    python experiments/repositories/maxtext.py maxtext/src llama3.1-8b --hardware="RTX 4090"

A configuration is "small", or a name in `maxtext/configs/models`. MaxText needs Python 3.12.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from running import Training, main, part

SMALL = {"base_num_decoder_layers": 4, "base_emb_dim": 64, "base_mlp_dim": 128, "head_dim": 16}
SMALL |= {"base_num_query_heads": 4, "base_num_kv_heads": 2, "vocab_size": 256}
SMALL |= {"max_target_length": 16, "dtype": "float32"}


def configured(configuration: str, rows: int) -> Any:
    """MaxText's configuration, as its command line would make it."""
    pyconfig = part("maxtext.configs.pyconfig")
    is_small = configuration == "small"
    model = SMALL if is_small else {"model_name": configuration, "max_target_length": 2048}
    return pyconfig.initialize(
        ["", str(Path(pyconfig.__file__).parent / "base.yml")],
        run_name="run",
        enable_checkpointing=False,
        skip_jax_distributed_system=True,
        dataset_type="synthetic",
        hardware="cpu",
        attention="dot_product",
        per_device_batch_size=rows / jax.device_count(),
        **model,
    )


def make(configuration: str, rows: int) -> Training:
    """The training of a configuration."""
    config, train = configured(configuration, rows), part("maxtext.trainers.pre_train.train")
    utils, length = part("maxtext.utils.maxtext_utils"), config.max_target_length
    # One device: more of them share the work by `mt.fit(mesh=...)`.
    devices = utils.create_device_mesh(config, jax.devices()[:1])
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)

    def loss_fn(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The loss of MaxText's `train.py`; its weight is the number of tokens that count."""
        loss, found = train.loss_fn(model, config, dict(batch), None, None)
        return loss, {"weight": found["total_weights"]}

    def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
        tokens = rng.integers(0, config.vocab_size, (rows, length + 1), dtype=np.int32)
        lengths = rng.integers(length // 2, length + 1, (rows, 1))
        segments = (np.arange(length) < lengths).astype(np.int32)
        positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        batch |= {f"{name}_position": positions for name in ("inputs", "targets")}
        return batch | {f"{name}_segmentation": segments for name in ("inputs", "targets")}

    creation = part("maxtext.utils.model_creation_utils")
    schedule = utils.create_learning_rate_schedule(config)
    optimizer = part("maxtext.optimizers.optimizers").get_optimizer(config, schedule)
    clipping = optax.clip_by_global_norm(config.gradient_clipping_threshold)
    return Training(
        model=creation.get_nnx_create_model_fn(config, mesh=mesh),
        loss_fn=loss_fn,
        optimizer=optax.chain(clipping, optimizer),
        draw=draw,
    )


if __name__ == "__main__":
    main(__doc__, make, "maxtext")
