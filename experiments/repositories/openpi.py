"""Trains a policy of openpi, unchanged, by a configuration of the repository, on a smaller GPU.

    git clone https://github.com/Physical-Intelligence/openpi
    python experiments/repositories/openpi.py openpi pi0_libero --exp-name=mine

The arguments are those of openpi's `scripts/train.py`: the name of a configuration, and its
fields. Model, weights, frozen parameters, optimizer, learning rates, moving average, data and seed
are the configuration's. `checkpoints/CONFIGURATION/NAME` gets openpi's folders, which its
`scripts/serve_policy.py` loads, and `training`, from which `--resume` goes on. `--help` lists the
options of the run itself.
"""

import argparse
import importlib
import itertools
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

import megatrain_jax as mt


def prepare(clone: Path) -> None:
    """Makes a clone importable, and replaces what newer releases of JAX, Flax and Orbax changed.

    openpi is written for JAX 0.5.3, Flax 0.10.2 and Orbax 0.11.13. Of these lines, training needs
    the third one, to load weights; the first two are for openpi's own `scripts/train.py`.

    Args:
        clone: The folder of the repository.

    Raises:
        FileNotFoundError: If it is not a clone of openpi.
    """
    if not (clone / "src" / "openpi").is_dir():
        raise FileNotFoundError(f"{clone} is no clone of openpi: it has no src/openpi")
    for folder in ("packages/openpi-client/src", "src"):
        sys.path.insert(0, str(clone.resolve() / folder))
    model, nnx_utils = part("models.model"), part("shared.nnx_utils")
    sharding = part("training.sharding")

    def state_map(state: nnx.State, chosen: Any, function: Any) -> nnx.State:
        # nnx_utils.py:68 takes a flat state's keys; iterating one gives pairs now.
        wanted = nnx.filterlib.to_predicate(chosen)
        pairs = nnx.to_flat_state(state)
        return nnx.from_flat_state([(p, function(x) if wanted(p, x) else x) for p, x in pairs])

    def make_mesh(num_fsdp_devices: int) -> jax.sharding.Mesh:
        # sharding.py:23 makes a mesh for automatic sharding, which is no longer the default.
        shape = jax.device_count() // num_fsdp_devices, num_fsdp_devices
        axes = sharding.BATCH_AXIS, sharding.FSDP_AXIS
        return jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)

    class Checkpointer(ocp.PyTreeCheckpointer):
        def metadata(self, directory: Any) -> Any:
            # model.py:315 looks for parameters in the metadata, which are a level deeper now.
            found = super().metadata(directory)
            return getattr(found, "item_metadata", found)

    nnx_utils.state_map, sharding.make_mesh = state_map, make_mesh
    model.ocp.PyTreeCheckpointer = Checkpointer


def part(name: str) -> Any:
    """A module of openpi."""
    return importlib.import_module(f"openpi.{name}")


def keys_of(config: Any) -> tuple[jax.Array, jax.Array]:
    """The keys of openpi's training: for its steps, and for its initial parameters."""
    train, init = jax.random.split(jax.random.key(config.seed))
    return train, jax.random.split(init)[1]


def batches(loader: Iterable[Any], config: Any) -> Iterator[dict[str, Any]]:
    """The batches of openpi's loader as trees of arrays on the host, with the key of each step."""
    train, _ = keys_of(config)
    for step, (observation, actions) in enumerate(loader):
        rows = len(actions)
        key = np.asarray(jax.random.key_data(jax.random.fold_in(train, step)))
        fields = {name: x for name, x in vars(observation).items() if x is not None}
        yield {
            "observation": jax.tree.map(np.asarray, fields),
            "actions": np.asarray(actions),
            "key": np.tile(key, (rows, 1)),
            "row": np.arange(rows, dtype=np.int32),
        }


def loss_fn(model: Any, batch: dict[str, Any]) -> jax.Array:
    """The loss of openpi's `train_step`, with its key; later microbatches have their own."""
    model.train()
    key, row = jax.random.wrap_key_data(batch["key"][0]), batch["row"][0]
    later = jax.random.key_data(jax.random.fold_in(key, row))
    key = jax.random.wrap_key_data(jnp.where(row == 0, batch["key"][0], later))
    observation = part("models.model").Observation(**batch["observation"])
    return jnp.mean(model.compute_loss(key, observation, batch["actions"], train=True))


def initial_parameters(config: Any) -> dict[str, Any] | None:
    """The parameters by the configuration's loader of weights; None if it loads none.

    Those that the loader leaves to the model, such as adapters, are drawn as by openpi.
    """
    _, key = keys_of(config)

    def drawn() -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(config.model.create(key), nnx.Param))

    found: dict[Any, Any] = flatten_dict(config.weight_loader.load(jax.eval_shape(drawn)))
    missing = [path for path, x in found.items() if isinstance(x, jax.ShapeDtypeStruct)]
    if len(missing) == len(found):
        return None
    with jax.default_device(jax.devices("cpu")[0]):

        def left() -> list[jax.Array]:
            every: dict[Any, Any] = flatten_dict(drawn())
            return [every[path] for path in missing]

        found.update(zip(missing, map(np.asarray, jax.jit(left)()), strict=True))
    return unflatten_dict(found)


def make_trainer(config: Any, sample: Any, **options: Any) -> mt.Trainer:
    """A trainer of a configuration's model, with its optimizer, average and frozen parameters.

    Args:
        config: openpi's `TrainConfig`.
        sample: The first batch, or its shapes.
        **options: Options of `mt.Trainer`; `compute` is that of `mt.Precision`.
    """
    _, key = keys_of(config)
    freezes = not isinstance(config.freeze_filter, nnx.Nothing)
    # openpi keeps frozen parameters in bfloat16, too.
    frozen = "bfloat16" if freezes else None
    return mt.Trainer(
        lambda: config.model.create(key),
        loss_fn,
        part("training.optimizer").create_optimizer(config.optimizer, config.lr_schedule),
        sample,
        params=initial_parameters(config),
        precision=mt.Precision(compute=options.pop("compute", None), frozen=frozen),
        trainable=config.trainable_filter if freezes else None,
        ema_decay=config.ema_decay,
        **options,
    )


def save_policy(trainer: mt.Trainer, config: Any, data_config: Any, folder: Path) -> None:
    """Writes what openpi's policies are loaded from: parameters, and statistics of the data.

    Args:
        trainer: The trainer. With `ema_decay` the averages are saved, as openpi does.
        config: openpi's `TrainConfig`.
        data_config: openpi's `DataConfig`, with the statistics.
        folder: The folder of a step; parameters that are there are replaced.
    """
    state = trainer.params if config.ema_decay is None else trainer.ema_params
    with ocp.PyTreeCheckpointer() as checkpointer:
        arrays = {"params": nnx.to_pure_dict(state)}
        checkpointer.save(folder.absolute() / "params", arrays, force=True)
    if data_config.norm_stats is not None and data_config.asset_id is not None:
        assets = folder / "assets" / data_config.asset_id
        part("shared.normalize").save(assets, data_config.norm_stats)


def train(config: Any, *, progress: bool = True, **options: Any) -> mt.Trainer:
    """Trains by a configuration, and saves policies as often as it says.

    Args:
        config: openpi's `TrainConfig`.
        progress: Whether to print the plan, and to show progress.
        **options: See `make_trainer`.

    Returns:
        The trainer after the last step, or after the one at which a signal ended the run.

    Raises:
        FileExistsError: If the folder of the checkpoints exists, and the configuration says neither
            `overwrite` nor `resume`.
    """
    folder = Path(config.checkpoint_dir)
    if folder.exists() and config.overwrite:
        shutil.rmtree(folder)
    elif folder.exists() and not config.resume:
        raise FileExistsError(f"{folder} exists: pass --resume, --overwrite or another --exp-name")
    on_host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    loader = part("training.data_loader").create_data_loader(config, sharding=on_host, shuffle=True)
    data = batches(loader, config)
    sample = next(data)
    data = itertools.chain([sample], data)
    training = folder / "training"
    trainer = make_trainer(config, sample, continues=training, progress=progress, **options)
    if progress:
        print(trainer.plan)
    # As openpi counts: from 0, after every `save_interval` steps but the first, and at the end.
    last, every = config.num_train_steps, config.save_interval
    stops = [*range(every + 1, last, every), last]
    done = max((int(path.name) for path in training.glob("[0-9]*")), default=0)
    for stop in [stop for stop in stops if stop > done] or stops[-1:]:
        started = trainer.num_steps
        result = mt.train(
            trainer,
            data,
            resume=not started,
            steps=stop - started,
            checkpoint_dir=training,
            keep=1,
            progress=progress,
        )
        if result.interrupted:
            break
        save_policy(trainer, config, loader.data_config(), folder / str(stop - 1))
    return trainer


def main() -> None:
    """Trains by the command line; see the top of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("clone", type=Path, help="folder of the repository")
    parser.add_argument("--device-budget", help="GPU memory for state and activations")
    parser.add_argument("--host-budget", help="host memory of the process")
    parser.add_argument("--microbatches", help='parts of a batch, or "auto"', default="1")
    compute = 'dtype of parameters when the model reads them; "float32" is exactly as openpi'
    parser.add_argument("--compute", help=compute)
    given, others = parser.parse_known_args()
    prepare(given.clone)
    sys.argv[1:] = others
    options = {name: value for name, value in vars(given).items() if name != "clone"}
    if options["microbatches"] != "auto":
        options["microbatches"] = int(options["microbatches"])
    train(part("training.config").cli(), **options)


if __name__ == "__main__":
    main()
