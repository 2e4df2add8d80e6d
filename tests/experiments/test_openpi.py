"""Openpi by its script: the steps of its own training, and policies that it loads.

OPENPI=<clone> pytest -m long tests/experiments/test_openpi.py

It needs the packages that a clone of openpi imports, besides LeRobot, whose data sets aren't read.
"""

import dataclasses
import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from places import ROOT
from runs import check_close

# Warnings are openpi's: it is written for older releases.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
TOLERANCE = 2e-6
STEPS = 5


def _script() -> Any:
    """The script as a module, under a name that isn't the repository's."""
    path = ROOT / "experiments" / "repositories" / "openpi.py"
    spec = importlib.util.spec_from_file_location("train_openpi", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> Any:
    """The script, with openpi importable; skips where it isn't."""
    if "OPENPI" not in os.environ:
        pytest.skip("OPENPI names no clone of openpi")
    try:
        importlib.import_module("lerobot.common.datasets.lerobot_dataset")
    except ImportError:
        names = "lerobot lerobot.common lerobot.common.datasets".split()
        names.append("lerobot.common.datasets.lerobot_dataset")
        for name in names:
            sys.modules[name] = ModuleType(name)
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], own, sys.modules[name])
    module, clone = _script(), Path(os.environ["OPENPI"])
    try:
        module.prepare(clone)
    except ImportError as error:
        pytest.skip(f"openpi can't be imported: {error}")
    sys.path.insert(0, str(clone.resolve()))  # for `scripts`
    return module


class Rows:
    """Rows as transformed data sets of LeRobot have them: bytes of images, and what is valid.

    Those of openpi's own `FakeDataset` mask all images and words, and so train no tower.
    """

    def __init__(self, length: int):
        """Makes rows with prompts of this length."""
        self.length = length

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: Any) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        names = "base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"
        return {
            "image": {n: rng.integers(0, 256, (224, 224, 3)).astype(np.uint8) for n in names},
            "image_mask": dict(zip(names, (True, True, bool(index % 2)), strict=True)),
            "state": rng.normal(size=32).astype(np.float32),
            "tokenized_prompt": rng.integers(0, 2048, self.length).astype(np.int32),
            "tokenized_prompt_mask": np.arange(self.length) < 5 + index,
            "actions": rng.normal(size=(50, 32)).astype(np.float32),
        }


@pytest.fixture(params=["debug"])
def config(
    request: pytest.FixtureRequest, script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Any:
    """A configuration in fp32, with a small tower for images and a small vocabulary."""
    gemma, siglip = script.part("models.gemma"), script.part("models.siglip")
    data_loader, optimizer = script.part("training.data_loader"), script.part("training.optimizer")

    decoded = siglip.decode_variant
    monkeypatch.setattr(siglip, "decode_variant", lambda _: {**decoded("mu/14"), "depth": 2})
    monkeypatch.setattr(gemma, "PALIGEMMA_VOCAB_SIZE", 2048)
    debug = script.part("training.config").get_config(request.param)
    rows = Rows(debug.model.max_token_len)
    monkeypatch.setattr(data_loader, "create_torch_dataset", lambda *_: rows)
    return dataclasses.replace(
        debug,
        model=dataclasses.replace(debug.model, dtype="float32"),
        # Biases of keys have no gradient: with a small eps, Adam divides rounding by rounding.
        optimizer=optimizer.AdamW(eps=1e-3),
        lr_schedule=optimizer.CosineDecaySchedule(warmup_steps=2, peak_lr=1e-4, decay_steps=10),
        ema_decay=0.9,
        num_workers=0,
        num_train_steps=STEPS,
        save_interval=2,
        checkpoint_base_dir=str(tmp_path),
    )


def plain(script: Any, config: Any) -> tuple[Any, list[float]]:
    """The state after the steps of openpi's own script, and their losses."""
    train = importlib.import_module("scripts.train")
    mesh = script.part("training.sharding").make_mesh(jax.device_count())
    train_rng, init_rng = jax.random.split(jax.random.key(config.seed))
    state, _ = train.init_train_state(config, init_rng, mesh, resume=False)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loader = script.part("training.data_loader").create_data_loader
    data = iter(loader(config, sharding=one, shuffle=True))
    state = jax.device_put(state, one)
    step, losses = jax.jit(functools.partial(train.train_step, config)), []
    for _ in range(STEPS):
        state, info = step(train_rng, state, next(data))
        losses.append(float(info["loss"]))
    return state, losses


def check_equal(actual: Any, expected: Any) -> None:
    """Checks states of openpi's model; in five steps, parameters change by up to a thousandth."""
    actual, expected = nnx.to_pure_dict(actual), nnx.to_pure_dict(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, TOLERANCE, 2e-7), actual, expected)


def ours(script: Any, config: Any, **options: Any) -> Any:
    mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
    return script.train(config, compute="float32", progress=False, mesh=mesh, **options)


@pytest.mark.parametrize("config", ["debug", "debug_pi05"], indirect=True)
def test_steps_are_those_of_openpi_and_it_loads_their_policy(script: Any, config: Any):
    trainer = ours(script, config)
    state, losses = plain(script, config)
    np.testing.assert_allclose(trainer.history["loss"], losses, rtol=TOLERANCE)
    check_equal(trainer.params, state.params)
    check_equal(trainer.ema_params, state.ema_params)

    folder = config.checkpoint_dir
    assert {path.name for path in folder.iterdir()} == {"2", "4", "training"}
    policy = config.model.load(script.part("models.model").restore_params(folder / "4" / "params"))
    expected = nnx.merge(state.model_def, state.ema_params)
    draw, observation = jax.random.key(1), config.model.fake_obs(1)
    actions = policy.sample_actions(draw, observation, num_steps=2)
    np.testing.assert_allclose(
        actions, expected.sample_actions(draw, observation, num_steps=2), atol=1e-5
    )

    statistics = {"state": script.part("transforms").NormStats(mean=np.zeros(3), std=np.ones(3))}
    data = dataclasses.replace(
        config.data.create(config.assets_dirs, config.model), asset_id="arm", norm_stats=statistics
    )
    script.save_policy(trainer, config, data, folder / "4")
    found = script.part("training.checkpoints").load_norm_stats(folder / "4" / "assets", "arm")
    np.testing.assert_array_equal(found["state"].std, np.ones(3))


def test_frozen_parameters_stay_and_a_run_goes_on_from_its_checkpoint(script: Any, config: Any):
    frozen = script.part("shared.nnx_utils").PathRegex(".*img.*")
    config = dataclasses.replace(config, freeze_filter=frozen, ema_decay=None)
    first = dataclasses.replace(config, num_train_steps=3, exp_name="first")
    begun = ours(script, first)
    with pytest.raises(FileExistsError, match="--resume"):
        ours(script, dataclasses.replace(first, overwrite=False))
    goes_on = {"num_train_steps": STEPS, "overwrite": False, "resume": True}
    trainer = ours(script, dataclasses.replace(first, **goes_on))
    state, losses = plain(script, config)
    np.testing.assert_allclose(trainer.history["loss"], losses, rtol=TOLERANCE)
    check_equal(trainer.params, state.params)
    images = trainer.params["PaliGemma"]["img"]
    assert {x.dtype for x in jax.tree.leaves(images)} == {jnp.dtype("bfloat16")}

    # A loader of weights leaves what it lacks to the model, such as adapters.
    lacking = {"action_in_proj", "action_out_proj"}
    folder = str(first.checkpoint_dir / "2" / "params")
    saved = script.part("training.weight_loaders").CheckpointWeightLoader(folder)

    class Loader:
        def load(self, params: Any) -> Any:
            found = saved.load(params)
            return {name: params[name] if name in lacking else x for name, x in found.items()}

    found = script.initial_parameters(dataclasses.replace(config, weight_loader=Loader()))
    _, key = script.keys_of(config)
    fresh = nnx.to_pure_dict(nnx.state(config.model.create(key), nnx.Param))
    expected = nnx.to_pure_dict(begun.params) | {name: fresh[name] for name in lacking}
    assert found.keys() == expected.keys()
    check_close(found, expected, TOLERANCE, "initial parameter")
