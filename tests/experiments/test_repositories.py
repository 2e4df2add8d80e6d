"""Repositories of others by their scripts: the steps of their own training, a stage for each block.

TUNIX=<clone> BONSAI=<clone> BIG_VISION=<clone> DIT=<clone> LEVANTER=<clone>/src \
    MAXTEXT=<clone>/src pytest -m long tests/experiments/test_repositories.py

A clone needs the packages that it imports. KerasHub and EasyDeL are tested where pip has installed
them.
"""

import dataclasses
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx

import megatrain_jax as mt
from places import ROOT

# Other repositories import Keras, too, which reads this once.
os.environ["KERAS_BACKEND"] = "jax"
# Warnings are the repositories', some of which are written for older releases.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
FOLDER = ROOT / "experiments" / "repositories"
TOLERANCE = 2e-6
STEPS = 5
# Biases of keys have no gradient: with a small eps, Adam divides rounding by rounding.
ADAMW = optax.adamw(1e-4, eps=1e-3)


def _module(name: str, alias: str) -> Any:
    """A file of the folder as a module, under a name that isn't the repository's."""
    spec = importlib.util.spec_from_file_location(alias, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    spec.loader.exec_module(module)
    return module


def script(name: str, variable: str = "", package: str = "") -> Any:
    """A script, with its repository importable; skips where it isn't."""
    running = _module("running", "running")
    if variable and variable not in os.environ:
        pytest.skip(f"{variable} names no clone")
    if variable:
        running.importable(Path(os.environ[variable]), package)
    return _module(name, f"train_{name}")


def small(module: Any) -> Any:
    """The small training of a script."""
    try:
        return module.make("small", 4)
    except ImportError as error:
        pytest.skip(f"the repository can't be imported: {error}")


def check_streamed(trainer: mt.Trainer, layer: str, number: int) -> None:
    """Checks that each layer is a group and a stage of its own."""
    names = [group.name for group in trainer.plan.groups if re.search(layer, group.name)]
    counts = sum(group.count for group in trainer.plan.groups if re.search(layer, group.name))
    assert counts == number, names
    assert trainer.plan.num_stages > number
    assert trainer.plan.num_templates < trainer.plan.num_stages


def trained(given: Any, batches: Sequence[Any] = ()) -> tuple[mt.Trainer, Any]:
    """A trainer after its steps, and the parameters before them."""
    batches = batches or given.batches(STEPS)
    parts = given.model, given.loss_fn, given.optimizer, batches[0]
    trainer = mt.Trainer(*parts, precision="float32")
    initial = jax.tree.map(np.array, trainer.params)
    for batch in batches:
        trainer.step(batch)
    return trainer, initial


def check_equal(trainer: mt.Trainer, params: Any, losses: list[float]) -> None:
    """Checks losses and parameters after the steps."""
    np.testing.assert_allclose(trainer.history["loss"], losses, rtol=TOLERANCE)
    actual, expected = (
        nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x for x in (trainer.params, params)
    )
    # In five steps, parameters change by some ten-thousandths.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, TOLERANCE, 2e-7), actual, expected)


def test_tunix_steps_are_those_of_its_own_trainer():
    module = script("tunix", "TUNIX", "tunix")
    given = dataclasses.replace(small(module), optimizer=ADAMW)
    trainer, _ = trained(given)
    check_streamed(trainer, "^layers", 4)

    peft_trainer = importlib.import_module("tunix.sft.peft_trainer")
    config = importlib.import_module("tunix.common.configs").TrainingConfig(eval_every_n_steps=1)
    model = given.model()
    own = peft_trainer.PeftTrainer(model, ADAMW, config)
    step, _ = own.with_gen_model_input_fn(module.model_input).jit_train_and_eval_step()
    losses = [float(step(batch, jnp.bool(True))[0]) for batch in given.batches(STEPS)]
    check_equal(trainer, nnx.state(model, nnx.Param), losses)


def test_bonsai_steps_are_those_of_nnx_with_the_models_own_loss():
    given = dataclasses.replace(small(script("bonsai", "BONSAI", "bonsai")), optimizer=ADAMW)
    trainer, _ = trained(given)
    check_streamed(trainer, "layers", 4)

    model = given.model()
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, tokens: jax.Array) -> jax.Array:
        loss, gradient = nnx.value_and_grad(lambda m: m(tokens, tokens)["loss"])(model)
        optimizer.update(model, gradient)
        return loss

    losses = [float(step(model, optimizer, b["tokens"])) for b in given.batches(STEPS)]
    check_equal(trainer, nnx.state(model, nnx.Param), losses)


def test_big_vision_steps_are_those_of_its_loop_with_its_optimizer():
    module = script("big_vision", "BIG_VISION", "big_vision")
    module.OPTIMIZER["optax"] = {"eps": 1e-3}
    given = small(module)
    trainer, params = trained(given)
    check_streamed(trainer, "encoderblock", 4)

    # `update_fn` is inside of big_vision's `main`, which reads data sets.
    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits, _ = given.model.apply({"params": params}, batch["image"], train=True)
            return importlib.import_module("big_vision.utils").sigmoid_xent(
                logits=logits, labels=batch["labels"]
            )

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = given.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = given.optimizer.init(params), []
    for batch in given.batches(STEPS):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    check_equal(trainer, params, losses)


def test_dit_steps_are_those_of_its_own_trainer(monkeypatch: pytest.MonkeyPatch):
    module = script("dit", "DIT", "diffusion_transformer")
    given = small(module)
    rng = np.random.default_rng(1)
    # The first steps from the initial parameters, of which many are zero, train few of them.
    initial = jax.tree.map(
        lambda x: x + rng.normal(0, 0.02, x.shape).astype(np.float32), given.model()
    )
    key, batches = jax.random.PRNGKey(3), []
    for batch in given.batches(STEPS):
        batches.append({**batch, "key": np.tile(key, (len(batch["labels"]), 1))})
        key = jax.random.split(key, 4)[0]
    loss_fn = given.loss_fn
    given = dataclasses.replace(
        given,
        model=initial,
        loss_fn=lambda params, batch: loss_fn(params, batch, batch["key"][0]),
        optimizer=ADAMW,
    )
    trainer, _ = trained(given, batches)
    check_streamed(trainer, "DiTBlock", 4)

    # Packages that its training doesn't need, and what newer releases of JAX lack.
    names = "tensorflow tensorflow_datasets matplotlib matplotlib.pyplot wandb utils.stable_vae"
    for name in names.split():
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    monkeypatch.setattr(jax, "tree_map", jax.tree.map, raising=False)
    own = importlib.import_module("train_diffusion")
    states = importlib.import_module("utils.train_state").TrainState
    scheduler = importlib.import_module("schedulers").GaussianDiffusion(module.TIMESTEPS)
    definition = module.definition("small")
    state = jax_utils.replicate(
        own.DiffusionTrainer(
            jax.random.PRNGKey(3),
            states.create(definition, initial, tx=ADAMW),
            states.create(definition, initial),
            {"diffusion_timesteps": module.TIMESTEPS, "eps_update_rate": 0.9999},
            scheduler,
        ),
        jax.local_devices()[:1],
    )
    losses = []
    for batch in batches:
        state, info = state.update(batch["images"][None], batch["labels"][None])
        losses.append(float(info["l2_loss_eps"][0]))
    check_equal(trainer, jax.tree.map(lambda x: x[0], state.model.params), losses)


def test_levanter_steps_are_those_of_its_trainer_state():
    module = script("levanter", "LEVANTER", "levanter")
    given = dataclasses.replace(small(module), optimizer=ADAMW)
    trainer, _ = trained(given)
    check_streamed(trainer, "stacked", 4)

    eqx, jmp = map(importlib.import_module, ("equinox", "jmp"))
    states = importlib.import_module("levanter.trainer_state").TrainerState
    policy, key = jmp.get_policy("f32"), jax.random.key(0)
    state = states.init(ADAMW, given.model(), key=key, is_trainable=True, mp=policy)

    @eqx.filter_jit
    def step(state: Any, batch: Any) -> Any:
        loss, gradients = eqx.filter_value_and_grad(given.loss_fn)(state.model, batch)
        return state.take_step(gradients, key=key)[0], loss

    losses = []
    for batch in given.batches(STEPS):
        state, loss = step(state, batch)
        losses.append(float(loss))
    check_equal(trainer, eqx.filter(state.model, eqx.is_inexact_array), losses)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_maxtext_steps_are_those_of_its_train_step(scan_layers: bool):
    module = script("maxtext", "MAXTEXT", "maxtext")
    module.SMALL |= {"scan_layers": scan_layers, "adam_eps": 1e-3, "learning_rate": 1e-4}
    module.SMALL |= {"learning_rate_schedule_steps": 10, "warmup_steps_fraction": 0.2}
    given = small(module)
    trainer, _ = trained(given)
    check_streamed(trainer, r"layers[._]\d", 4)

    config, train = module.configured("small", 4), module.part("maxtext.trainers.pre_train.train")
    utils = module.part("maxtext.utils.maxtext_utils")
    tx = module.part("maxtext.optimizers.optimizers").get_optimizer(
        config, utils.create_learning_rate_schedule(config)
    )
    model = given.model()
    states = module.part("maxtext.common.train_state_nnx")
    whole = states.TrainStateNNX(model, nnx.Optimizer(model, tx, wrt=nnx.Param))
    definition, state = nnx.split(whole)
    step = jax.jit(
        lambda state, batch: train.train_step(definition, config, None, None, state, batch)
    )
    losses = []
    for batch in given.batches(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["scalar"]["learning/loss"]))
    check_equal(trainer, nnx.state(nnx.merge(definition, state).model, nnx.Param), losses)


def test_easydel_steps_are_those_of_its_training_step():
    module = script("easydel_llama")  # before EasyDeL, as it chooses flags of XLA
    pytest.importorskip("easydel")
    given = dataclasses.replace(small(module), optimizer=ADAMW)
    trainer, _ = trained(given)
    check_streamed(trainer, "layers", 4)

    own = importlib.import_module("easydel.trainers.trainer._fn")
    model = given.model()
    states = importlib.import_module("easydel.infra.base_state").EasyDeLState
    state = states.create(model=model, tx=ADAMW, init_opt_state=True)
    losses = []
    with model.mesh:
        step = jax.jit(own.training_step)
        for batch in given.batches(STEPS):
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
    check_equal(trainer, nnx.state(state.model, nnx.Param), losses)


def test_kerashub_steps_are_those_of_keras():
    pytest.importorskip("keras_hub")
    keras = importlib.import_module("keras")
    optimizer = optax.sgd(1e-2, momentum=0.9)  # Keras's Adam has its eps in another place
    given = dataclasses.replace(small(script("kerashub")), optimizer=optimizer)
    trainer, initial = trained(given)
    check_streamed(trainer, "transformer_layer", 4)

    model = given.model().model
    for variable in model.trainable_variables:
        variable.assign(initial["trained"][variable.path])
    model.compile(
        optimizer=keras.optimizers.SGD(1e-2, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    losses = []
    for batch in given.batches(STEPS):
        inputs = {name: batch[name] for name in ("token_ids", "padding_mask")}
        loss, *_ = model.train_on_batch(inputs, batch["labels"], batch["padding_mask"])
        losses.append(float(loss))
    found = {x.path: np.asarray(x.value) for x in model.trainable_variables}
    check_equal(trainer, {"trained": found}, losses)


def test_a_keras_model_keeps_statistics_and_keys_of_dropout():
    keras = pytest.importorskip("keras")
    module = script("kerashub")

    def build() -> Any:
        keras.utils.clear_session()  # the names of the next model's layers are the same
        layers = [keras.layers.Dense(8), keras.layers.BatchNormalization()]
        return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dropout(0.5, seed=1)])

    def draw(rng: np.random.Generator) -> Any:
        return {"x": rng.normal(size=(16, 4)).astype(np.float32)}

    given = module.Training(
        model=lambda: module.KerasModel(build),
        loss_fn=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        draw=draw,
    )
    trainer, initial = trained(given)
    model = build()
    for variable in model.trainable_variables:
        variable.assign(initial["trained"][variable.path])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    zeros = np.zeros((16, 8), np.float32)
    losses = [float(model.train_on_batch(b["x"], zeros)) for b in given.batches(STEPS)]
    np.testing.assert_allclose(trainer.history["loss"], losses, rtol=TOLERANCE)
    for variable in model.non_trainable_variables:
        found = trainer.model.others[variable.path][...]
        np.testing.assert_allclose(found, variable.value, rtol=1e-6, err_msg=variable.path)


REPOSITORIES = {
    "tunix": ("TUNIX", "tunix"),
    "bonsai": ("BONSAI", "bonsai"),
    "big_vision": ("BIG_VISION", "big_vision"),
    "dit": ("DIT", "diffusion_transformer"),
    "levanter": ("LEVANTER", "levanter"),
    "maxtext": ("MAXTEXT", "maxtext"),
    "easydel_llama": (),
    "kerashub": (),
}


def published() -> dict[str, list[str]]:
    """The cells of the page's table, by script."""
    text = (ROOT / "docs" / "your_repository.md").read_text(encoding="utf-8")
    table = text.split("<!-- planned: repositories -->")[1].split("<!-- end of planned -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line]
    return {row[0].removesuffix(".py"): row[1:] for row in rows[2:]}


@pytest.mark.parametrize("name", REPOSITORIES)
def test_the_pages_plan_is_what_plans_say(name: str):
    configuration, *shown = published()[name]
    module = script(name, *REPOSITORIES[name])
    try:
        plan = module.make(configuration, 8).plan(microbatches=8)
    except ImportError as error:
        pytest.skip(f"the repository can't be imported: {error}")
    sizes = sys.modules["running"].plain_bytes(plan), plan.device_bytes, plan.host_peak_bytes
    planned = [plan.num_parameters / 1e9, plan.num_stages, *(size / 2**30 for size in sizes)]
    assert [float(cell.split()[0].rstrip("B")) for cell in shown] == pytest.approx(
        planned, rel=0.03
    )
