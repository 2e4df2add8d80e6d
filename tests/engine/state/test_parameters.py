"""Starting from given parameters: trees, checkpoints of others, and what does not fit."""

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh
from orbax.checkpoint import v1

import megatrain_jax as mt
from messages import refuses
from optimizers import OPTIMIZERS
from oracle import train_plain
from runs import check_close, check_same_bits, make_trainer
from zoo import CASES
from zoo_case import Case

pytestmark = pytest.mark.usefixtures("started_once")
OPTIMIZER, UNCHANGING = optax.adamw(1e-2), optax.sgd(0.0)


def start(case, **options):
    return mt.Trainer(
        case.build(),
        case.loss_fn,
        OPTIMIZER,
        case.batch(0),
        precision=mt.Precision(compute=jnp.float32),
        **options,
    )


def trained(case):
    trainer = make_trainer(case, OPTIMIZERS["adamw_schedule"])
    for seed in range(2):
        trainer.step(case.batch(seed))
    return trainer


# Every kind of source with a model of every kind and with one whose layers are stacked.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("nnx_tied", ["tree", "whole", "params"]),
        ("nnx_scan", ["whole"]),
        ("linen_scan_remat", ["tree", "params"]),
        ("batchnorm_linen", ["whole"]),
        ("equinox", ["params"]),
    ],
)
def test_a_run_starts_from_another_runs_parameters(name, sources, tmp_path):
    case = CASES[name]
    other = trained(case)
    params = other.params
    for source in sources:
        if source != "tree":
            other.save(tmp_path / source, params_only=source == "params")
        given = {"tree": params, "whole": tmp_path / source, "params": str(tmp_path / source)}
        check_same_bits(start(case, params=given[source]).params, params)


def without_elements():
    """A model with arrays of no elements: alone in their group, in blocks, and beside others."""
    rng = np.random.default_rng(0)

    def build():
        block = {"w": jnp.eye(4), "none": jnp.zeros((0, 3))}
        return {"in": jnp.ones((4, 4)), "bias": jnp.zeros((0,)), "blocks": [block] * 2}

    def loss_fn(params, batch):
        x = batch["x"] @ params["in"]
        for block in params["blocks"]:
            x = jnp.tanh(x @ block["w"]) + block["none"].sum()
        return jnp.mean((x + params["bias"].sum()) ** 2)

    data = {"x": rng.normal(size=(8, 4)).astype(np.float32)}
    return Case(
        name="without elements",
        build=build,
        loss_fn=loss_fn,
        blocks=2,
        templates=1,
        batch=lambda seed: {"x": data["x"] + np.float32(seed)},
    )


@pytest.mark.by_default("bfloat16-int8-1")
@pytest.mark.parametrize(
    ("master", "state", "num_devices"),
    [("float32", "float32", 1), ("bfloat16", "int8", 1), ("float32", "float32", 4)],
)
def test_arrays_without_elements_train_and_are_saved_and_given(
    master, state, num_devices, tmp_path
):
    case, optimizer = without_elements(), OPTIMIZERS["sgd_momentum"](None)
    options = {
        "precision": mt.Precision(compute=jnp.float32, master=master, state=state),
        "mesh": Mesh(jax.devices()[:num_devices], "data"),
    }

    def start(**given):
        model = case.build()
        return mt.Trainer(model, case.loss_fn, optimizer, case.batch(0), **options, **given)

    trainer = start()
    for seed in range(2):
        trainer.step(case.batch(seed))
    if master == "float32":
        plain = train_plain(case, OPTIMIZERS["sgd_momentum"], [case.batch(s) for s in range(2)])
        check_close(trainer.params, plain.params, 2e-6, "parameter")
    trainer.save(tmp_path / "saved")
    restored = start()
    restored.restore(tmp_path / "saved")
    check_same_bits((restored.params, restored.opt_state), (trainer.params, trainer.opt_state))
    params = trainer.params
    assert params["bias"].shape == (0,) and params["blocks"][1]["none"].shape == (0, 3)
    given = tmp_path / "saved" if master == "bfloat16" else params
    check_same_bits(start(params=given).params, params)
    # Only what no checkpoint can have may be missing.
    v1.save(tmp_path / "other", {"in": params["in"]})
    with pytest.raises(ValueError, match="blocks/0/w .*missing\n.*blocks/1/w .*missing$"):
        start(params=tmp_path / "other")


def save_v0(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def save_with_manager(path, tree):
    with ocp.CheckpointManager(path.parent / "steps") as manager:
        manager.save(7, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    (path.parent / "steps" / "7").rename(path)


@pytest.mark.by_default("save_v0")
@pytest.mark.parametrize("save", [v1.save, save_v0, save_with_manager])
def test_checkpoints_of_plain_orbax_are_read(save, tmp_path):
    case = CASES["dropout_nnx"]
    model = case.build()
    model = model() if callable(model) and not isinstance(model, nnx.Module) else model
    whole = nnx.state(model)  # with the state of random numbers, which is nobody's parameter
    changed = jax.tree.map(lambda x: x + 1 if jnp.issubdtype(x.dtype, jnp.floating) else x, whole)
    keys_as_data = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        changed,
    )
    save(tmp_path / "state", keys_as_data)
    expected = nnx.filter_state(changed, nnx.Param)
    check_same_bits(start(case, params=tmp_path / "state").params, expected)
    save(
        tmp_path / "nested", {"model": {"params": nnx.to_pure_dict(expected)}, "step": jnp.int32(3)}
    )
    check_same_bits(start(case, params=tmp_path / "nested").params, expected)


@dataclass
class Lazy:
    """An array that is made when it is asked for."""

    shape: tuple[int, ...]
    dtype: Any
    log: list[Any] = field(default_factory=list)

    def __array__(self, dtype=None, copy=None):
        self.log.append(self)
        return np.full(self.shape, 0.25, self.dtype)


def test_arrays_are_asked_for_once_and_widened_to_masters():
    case = CASES["nnx_tied"]
    log: list[Any] = []
    params = nnx.to_pure_dict(start(case).params)
    lazy = jax.tree.map(lambda x: Lazy(x.shape, jnp.bfloat16, log), params)
    trainer = start(case, params=lazy)
    leaves = jax.tree.leaves(trainer.params)
    assert len(log) == len({id(x) for x in log}) == len(leaves)
    assert all(x.dtype == np.float32 and (x == 0.25).all() for x in leaves)


def test_what_does_not_fit_is_listed_before_anything_is_read():
    case = CASES["nnx_tied"]
    params = nnx.to_pure_dict(start(case).params)
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    ((*first,), kernel), ((*second,), wide) = paths[0], paths[1]

    def change(tree, keys, value):
        for key in keys[:-1]:
            tree = tree[key.key]
        if value is None:
            del tree[keys[-1].key]
        else:
            tree[keys[-1].key] = value

    def name(keys):
        return "/".join(str(key.key) for key in keys)

    at_top = [jax.tree_util.DictKey("odd_one")]
    cases = [
        (at_top, kernel, "odd_one", "not"),
        (first, None, name(first), "missing"),
        (first, Lazy((3, 5), np.float32), name(first), "float32[3,5]"),
        (second, np.asarray(wide, np.float64), name(second), "float64"),
        (second, np.asarray(wide, np.int32), name(second), "int32"),
        ([*first[:-1], jax.tree_util.DictKey("odd")], kernel, "odd", "not"),
        (first, "kernel", name(first), "str"),
    ]
    for keys, value, *named in cases:
        changed = jax.tree.map(lambda x: x, params)
        change(changed, keys, value)
        with refuses(ValueError, *named):
            start(case, params=changed)
    empty = {}
    with refuses(ValueError, len(paths) - 10, "more"):
        start(case, params=empty)


def summed(params, batch):
    return sum(jnp.sum(x) for x in jax.tree.leaves(params)) * batch["x"].mean()


def trained_from(model, params):
    batch = {"x": np.ones((2, 4), np.float32)}
    model = jax.tree.map(np.zeros_like, model)
    return mt.Trainer(model, summed, UNCHANGING, batch, params=params, progress=False).params


def test_flat_and_nested_dicts_match_by_their_joined_paths():
    rows = [np.full((2, 3), i, np.float32) for i in range(3)]
    nested = {"layers": [{"k": row} for row in rows]}
    kinds = {
        "nested": nested,
        "flat": {f"layers/{i}/k": row for i, row in enumerate(rows)},
        "dotted": {f"layers.{i}.k": row for i, row in enumerate(rows)},
        "under another name": {"params": {"layers": {f"{i}/k": r for i, r in enumerate(rows)}}},
    }
    for model in list(kinds.values())[:3]:
        for given in kinds.values():
            found = jax.tree.leaves(trained_from(model, given))
            for x, expected in zip(found, rows, strict=True):
                np.testing.assert_array_equal(x, expected)
    # Two parameters with one joined path match only as they are.
    both = {"a/k": rows[1], "a": {"k": rows[2]}}
    found = trained_from(both, both)
    np.testing.assert_array_equal(found["a/k"], rows[1])
    with refuses(ValueError, "('a/k',)", "missing"):
        trained_from(both, {"a": {"k": rows[2]}})
    with pytest.raises(ValueError, match="layers/1/k .*missing\n.*layers/odd .*not"):
        trained_from(nested, {"layers/0/k": rows[0], "layers/2/k": rows[2], "layers/odd": rows[1]})


@pytest.mark.by_default("batchnorm_nnx", "batchnorm_linen")
@pytest.mark.parametrize("name", ["batchnorm_linen", "batchnorm_nnx", "dropout_nnx"])
def test_the_model_s_other_variables_may_lie_beside_the_parameters(name):
    case = CASES[name]
    trainer = start(case)
    model = trainer.model
    whole = nnx.state(model) if isinstance(model, nnx.Module) else model.variables
    given = [whole]
    if isinstance(whole, nnx.State):  # a part of a larger tree
        given.append({"net": {"a": nnx.to_pure_dict(whole)}})
    for params in given:
        again = start(case, params=params)
        check_same_bits((again.params, again.variables), (trainer.params, trainer.variables))
    strange = nnx.to_pure_dict(whole) if isinstance(whole, nnx.State) else dict(whole)
    strange["odd_one"] = {"a": np.ones(3)}
    with pytest.raises(ValueError, match="model:\n  odd_one/a .*not"):
        start(case, params=strange)


@pytest.mark.parametrize("given", ["model", "keyword", "params"])
def test_arrays_made_for_a_call_are_freed_before_its_first_step(given):
    made, alive = [], []

    def tree():
        arrays = {"w": jnp.ones((4, 2))}
        made.append(weakref.ref(arrays["w"]))
        return arrays

    def look(trainer, record):
        gc.collect()  # JAX and Flax leave cycles
        alive.append(made[-1]() is not None)

    def loss_fn(params, batch):
        return ((batch @ params["w"]) ** 2).mean()

    data, callbacks = [np.ones((2, 4), np.float32)], [look]
    # Without `**`, for which Python 3.11 keeps the arguments until the call ends.
    if given == "keyword":
        mt.fit(model=tree(), loss_fn=loss_fn, data=data, optimizer=UNCHANGING, callbacks=callbacks)
    elif given == "params":
        made_of = {"w": jnp.zeros((4, 2))}
        mt.fit(made_of, loss_fn, data, UNCHANGING, params=tree(), callbacks=callbacks)
    else:
        mt.fit(tree(), loss_fn, data, UNCHANGING, callbacks=callbacks)
    assert alive == [False]


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    missing = tmp_path / "nothing"
    with refuses(mt.CheckpointError, "`params`", missing):
        start(CASES["nnx_tied"], params=missing)
    missing.mkdir()
    said = f"`params`={missing}"
    with refuses(mt.CheckpointError, said, "tree", "folder"):
        start(CASES["nnx_tied"], params=missing)
    (missing / "config.json").write_text("{}")
    with refuses(mt.CheckpointError, said, "`models.load_pretrained`"):
        start(CASES["nnx_tied"], params=missing)


def checkpoint(folder, *, described=True):
    """A checkpoint as another program's run has it, with its arrays in a folder of its own."""
    tree = {"w": np.arange(8, dtype=np.float32).reshape(4, 2)}
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / "params", tree)
    (folder / "params" / "_CHECKPOINT_METADATA").unlink()
    if described:
        (folder / "_CHECKPOINT_METADATA").write_text("{}")
    return tree


def loaded(folder):
    def loss_fn(params, batch):
        return ((batch["x"] @ params["w"]) ** 2).mean()

    batch = {"x": np.ones((2, 4), np.float32)}
    made = {"w": np.zeros((4, 2), np.float32)}, loss_fn, optax.sgd(0.1), batch
    return mt.Trainer(*made, params=folder, progress=False).params


def test_a_part_of_another_program_s_checkpoint_names_the_whole(tmp_path):
    tree = checkpoint(tmp_path / "5000")
    with pytest.raises(mt.CheckpointError, match="params") as caught:
        loaded(tmp_path / "5000" / "params")
    said = str(caught.value).replace(str(tmp_path / "5000" / "params"), "")
    assert str(tmp_path / "5000") in said and "checkpoint_layout" not in said
    check_same_bits(loaded(tmp_path / "5000"), tree)


@pytest.mark.parametrize("name", ["{}", "step_{}", "checkpoint-{}"])
@pytest.mark.parametrize("described", [True, False])
def test_a_folder_of_another_program_s_run_lists_its_steps(tmp_path, name, described):
    for step in (900, 1000, 20000, 5000):
        checkpoint(tmp_path / name.format(step), described=described)
    unfinished = tmp_path / "30000.orbax-checkpoint-tmp-99999"
    (unfinished / "params").mkdir(parents=True)
    (unfinished / "_CHECKPOINT_METADATA").write_text("{}")
    (tmp_path / "wandb_7").mkdir()
    with pytest.raises(mt.CheckpointError, match="choose") as caught:
        loaded(tmp_path)
    said = str(caught.value).removeprefix(f"`params`={tmp_path}")
    shown = [str(tmp_path / name.format(step)) for step in (1000, 5000, 20000)]
    assert said.endswith(", ".join(shown))


@pytest.mark.exhaustive
def test_fit_passes_parameters_on_and_a_resumed_run_has_its_own(tmp_path):
    case = CASES["nnx_tied"]
    params = trained(case).params

    def run(steps):
        return mt.fit(
            case.build(),
            case.loss_fn,
            [case.batch(0)] * 4,
            optax.sgd(0.0),
            steps=steps,
            params=params,
            checkpoint_dir=tmp_path,
            precision=mt.Precision(compute=jnp.float32),
            progress=False,
        )

    check_same_bits(run(1).params, params)
    params = jax.tree.map(lambda x: x * 0, params)
    assert any(np.any(x) for x in jax.tree.leaves(run(2).params))
