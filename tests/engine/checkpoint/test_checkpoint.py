"""Checkpoints: nothing lost, nothing copied, readable by plain Orbax."""

import itertools
import json
import os
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from orbax.checkpoint import v1

import megatrain_jax as mt
import small
from inside import engine_of, spec_of, store_of
from megatrain_jax._src.common.keys import LASTING
from megatrain_jax._src.engine.checkpoint import chunks, restore
from megatrain_jax._src.engine.checkpoint.folder import CheckpointError
from megatrain_jax._src.engine.checkpoint.save import Saving, Writer
from megatrain_jax._src.engine.schedule.instructions import Op
from messages import refuses, tells, warns
from optimizers import OPTIMIZERS
from places import HELPERS, ROOT
from runs import check_same_bits, make_trainer
from zoo import CASES
from zoo_case import Case

pytestmark = pytest.mark.usefixtures("started_once")


def noisy_loss(params: Any, batch: dict[str, Any], rng: jax.Array) -> jax.Array:
    """The small model's loss on inputs of which some are dropped."""
    kept = jax.random.bernoulli(rng, 0.75, batch["x"].shape)
    return small.loss_fn(params, {"x": jnp.where(kept, batch["x"], 0)})


# Four layers; nothing here depends on what a model computes, and this one is traced quickly.
NOISY = Case(
    name="noisy",
    build=lambda: [*small.params(), *small.params()],
    loss_fn=noisy_loss,
    blocks=4,
    templates=1,
    batch=small.batch,
    random=True,
)
# Every kind of model and of optimizer state; what others cover, too, is long.
ROUND_TRIPS = [
    ("noisy", "adamw_schedule", 1),
    ("nnx_tied", "clip_adamw", 2),
    ("dropout_nnx", "clip_adamw", 1),
    ("batchnorm_nnx", "adamw_schedule", 1),
    pytest.param("nnx_scan", "clip_adamw", 1, marks=pytest.mark.long),
    pytest.param("linen_scan_remat", "clip_adamw", 1, marks=pytest.mark.long),
    ("last_axis", "adafactor", 1),
    pytest.param("moe", "adafactor", 1, marks=pytest.mark.long),
    ("nnx_tied", "multi_steps", 1),
    ("nnx_tied", "add_noise", 1),
]


def everything(trainer):
    trainer.flush()
    store = store_of(trainer)
    return [trainer.params, trainer.opt_state, store.variables, store.key, store.step]


def losses(trainer, batches):
    return [trainer.read(trainer.step(batch))["loss"] for batch in batches]


@pytest.mark.by_default("noisy-adamw_schedule-1")
@pytest.mark.parametrize(("name", "optimizer", "microbatches"), ROUND_TRIPS)
def test_resumed_training_equals_uninterrupted_training(name, optimizer, microbatches, tmp_path):
    case = {**CASES, NOISY.name: NOISY}[name]
    batches = [case.batch(seed) for seed in range(5)]

    def make():
        return make_trainer(case, OPTIMIZERS[optimizer], microbatches=microbatches)

    whole = make()
    expected = losses(whole, batches)
    first = make()
    assert losses(first, batches[:3]) == expected[:3]
    saving = first.start_saving(str(tmp_path / "3"))
    assert losses(first, batches[3:]) == expected[3:]  # goes on while it is written
    saving.wait()
    check_same_bits(everything(first), everything(whole))
    second = make()
    second.step(batches[4])  # other state, to be replaced
    second.restore(tmp_path / "3")
    assert second.num_steps == 3
    assert losses(second, batches[3:]) == expected[3:]
    check_same_bits(everything(second), everything(whole))


PLAIN = """
import json, sys
import jax, numpy as np
from flax import linen, nnx
from orbax.checkpoint import v1
from zoo import CASES

context = v1.Context()
context.pytree.loading.partial_load = True  # the optimizer's state stays where it is
for path, name in json.loads(sys.argv[1]):
    case = CASES[name]
    model, batch = case.build(), case.batch(7)
    with context:
        if isinstance(model, linen.Module):
            abstract = model.init(jax.random.key(1), batch["tokens"][:, :-1])
            params = v1.load(path, {"params": abstract["params"]})["params"]
            loss = case.loss_fn(model.bind({"params": params}), batch)
        else:
            state = nnx.state(model, nnx.Param)
            loaded = v1.load(path, {"params": nnx.to_pure_dict(state)})["params"]
            nnx.replace_by_pure_dict(state, loaded)
            nnx.update(model, state)
            loss = case.loss_fn(model, batch)
    print(float(loss).hex())
assert not [m for m in sys.modules if m.startswith("megatrain_jax")]
"""


@pytest.mark.exhaustive
def test_plain_orbax_reads_the_parameters(tmp_path):
    saved, expected = [], []
    cases = (("linen_numbered", True), ("nnx_tied", False), ("nnx_scan", False))
    for name, params_only in cases:
        case = CASES[name]
        trainer = make_trainer(case, OPTIMIZERS["clip_adamw"])
        losses(trainer, [case.batch(seed) for seed in range(2)])
        trainer.save(tmp_path / name, params_only=params_only)
        saved.append((str(tmp_path / name), name))
        expected.append(float(case.loss_fn(trainer.model, case.batch(7))))
        if params_only:
            with refuses(CheckpointError, "only", "`params="):
                trainer.restore(tmp_path / name)
    # One process, since it takes most of its time to import what it needs.
    command = [sys.executable, "-c", PLAIN, json.dumps(saved)]
    env = {**os.environ, "PYTHONPATH": str(HELPERS)}
    out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert [float.fromhex(line) for line in out.split()] == expected


@pytest.mark.by_default("1000000000-1-float32")
@pytest.mark.parametrize(
    ("budget", "microbatches", "compute"), [("least", 2, jnp.bfloat16), (10**9, 1, jnp.float32)]
)
def test_a_checkpoint_fits_other_budgets_microbatches_and_precisions(
    budget, microbatches, compute, tmp_path
):
    case = CASES["nnx_tied"]
    first = make_trainer(case, OPTIMIZERS["clip_adamw"])
    losses(first, [case.batch(0)])
    first.save(tmp_path / "1")
    second = make_trainer(
        case, OPTIMIZERS["clip_adamw"], budget=budget, microbatches=microbatches, compute=compute
    )
    second.restore(tmp_path / "1")
    check_same_bits(everything(second), everything(first))
    losses(second, [case.batch(1)])


def test_the_next_slab_is_read_while_one_is_stored(tmp_path, monkeypatch):
    trainer = make_trainer(NOISY, OPTIMIZERS["adamw_schedule"])
    trainer.save(tmp_path / "0")
    before = everything(trainer)
    num_slabs = sum(len(layout.slabs) for layout in spec_of(trainer).layouts)
    loading = restore._Loading
    read, fill, put = loading._read, loading._filled, jax.device_put
    changed, begun, filled = threading.Condition(), 0, []

    def watched_read(*args):
        nonlocal begun
        with changed:
            begun += 1
            changed.notify_all()
        return read(*args)

    def watched_fill(*args):
        # What was read for the next one would be a third slab beside the store.
        assert begun == len(filled) + 1
        filled.append(fill(*args))
        return filled[-1]

    def watched_put(x, target):
        stored = [id(shard) for arrays in filled for array in arrays for shard in array.values()]
        if any(id(array) in stored for array in jax.tree.leaves(x)):
            with changed:
                assert changed.wait_for(lambda: begun > min(len(filled), num_slabs - 1), 60)
        return put(x, target)

    with monkeypatch.context() as patch:
        patch.setattr(loading, "_read", watched_read)
        patch.setattr(loading, "_filled", watched_fill)
        patch.setattr(jax, "device_put", watched_put)
        trainer.restore(tmp_path / "0")
    assert len(filled) == num_slabs
    check_same_bits(everything(trainer), before)


def test_each_difference_is_named_and_nothing_is_touched(tmp_path):
    mlp_trainer().save(tmp_path / "0")
    others = [
        (mlp_trainer(names=("first", "last")), r"another `model`(.|\n)*first/\S+ .*missing"),
        (mlp_trainer(optimizer=MOMENTUM), r"another `optimizer`(.|\n)*opt_state/\S+ .*missing"),
        (mlp_trainer(names=(0, 1, 2)), r"params/2/w .*missing"),
    ]
    for second, message in others:
        before = jax.tree.map(np.array, everything(second)[:2])
        with pytest.raises(CheckpointError, match=message) as caught:
            second.restore(tmp_path / "0")
        assert len(str(caught.value).splitlines()) <= 12
        check_same_bits(everything(second)[:2], before)
    losses(second, [MLP_BATCH])
    with refuses(CheckpointError, "params/0/w", "float32[8,16]", "`model`") as caught:
        mlp_trainer(width=24).restore(tmp_path / "0")
    assert not tells(str(caught.value), "`optimizer`")


@pytest.mark.by_default("dropout_nnx")
@pytest.mark.parametrize(
    ("name", "optimizer", "message"),
    [
        ("linen_numbered", "clip_adamw", r"another `model`(.|\n)*Block_0/\S+ .*missing"),
        ("nnx_tied", "lion", r"another `optimizer`(.|\n)*opt_state/\S+ .*missing"),
        ("dropout_nnx", "clip_adamw", r"params/blocks/0/norm/scale .*missing"),
    ],
    ids=["linen_numbered", "lion", "dropout_nnx"],
)
def test_differences_of_modules_are_named_too(tmp_path, name, optimizer, message):
    make_trainer(CASES["nnx_tied"], OPTIMIZERS["clip_adamw"]).save(tmp_path / "0")
    other = CASES[name]
    second = make_trainer(other, OPTIMIZERS[optimizer])
    before = jax.tree.map(np.array, everything(second)[:2])
    with pytest.raises(CheckpointError, match=message) as caught:
        second.restore(tmp_path / "0")
    assert len(str(caught.value).splitlines()) <= 12
    check_same_bits(everything(second)[:2], before)
    losses(second, [other.batch(0)])


def test_the_likely_cause_of_unlike_arrays_comes_with_its_remedy(tmp_path):
    narrow = mlp_trainer()
    narrow.save(tmp_path / "all")
    other: Any
    for other in ({"optimizer": MOMENTUM}, {"trainable": "0/w"}):
        with refuses(CheckpointError, "`optimizer`", "`trainable`") as said:
            mlp_trainer(**other).restore(tmp_path / "all")
        assert tells(str(said.value), f"params='{tmp_path / 'all'}'", "`checkpoint_dir`")
    # The remedy works.
    fresh = mlp_trainer(optimizer=MOMENTUM, start=tmp_path / "all")
    check_same_bits(fresh.params, narrow.params)
    with jax.enable_x64(True):
        mlp_trainer(precision=mt.Precision(master="float64")).save(tmp_path / "float64")
    with refuses(CheckpointError, "`precision`", "jax_enable_x64"):
        narrow.restore(tmp_path / "float64")


MOMENTUM, MLP_BATCH = optax.sgd(0.1, momentum=0.9), {"x": np.ones((4, 8), np.float32)}


def mlp_loss(params, batch):
    x = batch["x"]
    for layer in params if isinstance(params, list) else params.values():
        x = jnp.tanh(x @ layer["w"])
    return jnp.mean(x**2)


def mlp_trainer(width=16, optimizer=small.OPTIMIZER, names=(0, 1), start=None, **options):
    """A trainer of a list of layers, or of a dict if they have names."""
    widths = [8, *[width] * (len(names) - 1), 1]
    layers = [{"w": np.ones(shape, np.float32)} for shape in itertools.pairwise(widths)]
    params = layers if names[0] == 0 else dict(zip(names, layers, strict=True))
    options = {"precision": "float32", **options}
    return mt.Trainer(params, mlp_loss, optimizer, MLP_BATCH, params=start, **options)


def truncate(path):
    victim = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-7])


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_is_refused_and_an_older_one_found(tmp_path):
    case = CASES["nnx_tied"]
    data = [case.batch(seed) for seed in range(6)]

    def run(steps):
        return mt.fit(
            case.build(),
            case.loss_fn,
            data,
            optax.adam(1e-2),
            steps=steps,
            checkpoint_dir=tmp_path,
            checkpoint_every=2,
            progress=False,
        )

    result = run(5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "4", "5"]
    truncate(tmp_path / "5")
    before = jax.tree.map(np.array, result.params)
    with pytest.raises(CheckpointError, match=r"5 .*damaged.*\b1 of its \d+ files"):
        result.trainer.restore(tmp_path / "5")
    check_same_bits(result.params, before)
    with warns(UserWarning, "step 4"):
        again = run(6)
    assert [row["step"] for row in again.history] == list(range(1, 7))
    assert [row["loss"] for row in again.history][:5] == [row["loss"] for row in result.history]
    # The damaged one is set aside.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "4", "5.refused-1", "6"]


class Resumable:
    """An iterator with a state, as Grain's are."""

    def __init__(self, case):
        self.case, self.at, self.drawn = case, 0, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at, self.drawn = self.at + 1, self.drawn + 1
        return self.case.batch(self.at)

    def get_state(self):
        return b"%d" % self.at

    def set_state(self, state):
        self.at = int(state)


# All pairs of values of two of them; by default every value of each.
@pytest.mark.by_default("clip_adamw-True-1")
@pytest.mark.parametrize(
    ("optimizer", "stateful", "every"),
    [
        pytest.param("adamw_schedule", False, 1, marks=pytest.mark.long),
        pytest.param("adamw_schedule", True, 3, marks=pytest.mark.long),
        ("adamw_schedule", False, 3),
        pytest.param("clip_adamw", False, 3, marks=pytest.mark.long),
        ("clip_adamw", True, 1),
    ],
)
def test_fit_goes_on_with_the_batches_it_would_have_seen(optimizer, stateful, every, tmp_path):
    case = NOISY
    made, sources = OPTIMIZERS[optimizer](None), []

    def run(steps, folder):
        data = Resumable(case) if stateful else (case.batch(1 + i) for i in itertools.count())
        sources.append(data)
        saving = {"checkpoint_dir": folder, "checkpoint_every": every, "keep": 2} if folder else {}
        return mt.fit(case.build(), case.loss_fn, data, made, steps=steps, progress=False, **saving)

    whole = run(7, None if every == 1 else tmp_path / "whole")
    for steps in (2, 5, 7, 7):
        parts = run(steps, tmp_path / "parts")
        assert parts.trainer.num_steps == steps
        assert len(list((tmp_path / "parts").iterdir())) <= 2
    assert [r["loss"] for r in parts.history] == [r["loss"] for r in whole.history]
    check_same_bits(everything(parts.trainer)[:2], everything(whole.trainer)[:2])
    if stateful:
        assert sources[-2].drawn <= 4  # nothing was skipped over


def test_checkpoint_options_are_checked(tmp_path, monkeypatch):
    case = CASES["nnx_tied"]
    choices: tuple[tuple[dict[str, Any], str], ...] = (
        ({"checkpoint_every": 2}, "`checkpoint_every`.*`checkpoint_dir`"),
        ({"checkpoint_dir": tmp_path, "checkpoint_every": 0}, "`checkpoint_every` .*0"),
        ({"checkpoint_dir": tmp_path, "keep": 0}, "`keep` .*0"),
    )
    for options, message in choices:
        with pytest.raises(ValueError, match=message):
            mt.fit(case.build(), case.loss_fn, [case.batch(0)], optax.sgd(0.1), **options)
    trainer = make_trainer(case, OPTIMIZERS["adam"])
    monkeypatch.chdir(tmp_path)
    trainer.save("there")
    trainer.restore("there")
    with pytest.raises(FileExistsError):
        trainer.save(tmp_path / "there")


def test_saving_never_asks_orbax_what_arrays_there_are(tmp_path, monkeypatch):
    """Orbax would keep memory for each array of each checkpoint."""
    trainer, asked = mlp_trainer(), []
    monkeypatch.setattr(v1, "metadata", lambda path: asked.append(path))
    trainer.save(tmp_path / "0")
    trainer.restore(tmp_path / "0")
    assert not asked


def test_what_cannot_be_written_harms_nothing(tmp_path, monkeypatch):
    case = NOISY
    trainer = make_trainer(case, OPTIMIZERS["adamw_schedule"])
    trainer.save(tmp_path / "0")
    (tmp_path / "file").write_text("")
    with refuses(CheckpointError, tmp_path / "file", "written"):
        trainer.save(tmp_path / "file" / "1")
    write, calls = Writer.write, []

    def full_disk(writer, rows):
        calls.append(rows)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        write(writer, rows)

    monkeypatch.setattr("megatrain_jax._src.engine.checkpoint.save.PART_BYTES", 0)
    monkeypatch.setattr(Writer, "write", full_disk)
    saving = trainer.start_saving(tmp_path / "1")
    expected = losses(trainer, [case.batch(1)])
    with pytest.raises(CheckpointError, match="No space left on device"):
        saving.wait()
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "file"]
    second = make_trainer(case, OPTIMIZERS["adamw_schedule"])
    second.restore(tmp_path / "0")
    assert losses(second, [case.batch(1)]) == expected
    trainer.save(tmp_path / "1")


@pytest.mark.by_default("1")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_checkpoint_is_written_from_the_store_without_copies(num_devices, tmp_path, monkeypatch):
    """Stacked parameters, too, and arrays that devices share; only tiny leaves would be joined."""
    monkeypatch.setattr(chunks, "_LEAST_BYTES", 16)
    mesh = Mesh(jax.devices()[:num_devices], "data")
    trainer = make_trainer(CASES["nnx_scan"], OPTIMIZERS["adamw_schedule"], mesh=mesh)
    trainer.flush()
    held = [
        np.asarray(shard.data)
        for slabs in store_of(trainer).host.values()
        for slab in slabs
        for shard in slab.addressable_shards
    ]
    write, written, copied = Writer._write, 0, []

    def watched(writer, rows):
        nonlocal written
        for entry, _, chunk in rows:
            if entry.groups:
                written += chunk.nbytes
                if not any(np.may_share_memory(chunk, array) for array in held):
                    copied.append((entry.name, chunk.shape))
        write(writer, rows)

    monkeypatch.setattr(Writer, "_write", watched)
    trainer.save(tmp_path / "0")
    assert not copied
    assert written == sum(
        x.nbytes for x in jax.tree.leaves([trainer.params, trainer.opt_state[0][1:]])
    )


@pytest.mark.by_default("adamw_schedule")
@pytest.mark.parametrize("optimizer", ["adamw_schedule", "clip_adamw"])
def test_a_step_waits_only_for_what_it_replaces(optimizer, tmp_path, monkeypatch):
    """While a checkpoint is held up, no group has two sets of arrays in the host."""
    case = NOISY
    trainer = make_trainer(case, OPTIMIZERS[optimizer], budget="least")
    losses(trainer, [case.batch(0)])
    engine, write, events, computed_before = engine_of(trainer), Writer.write, [], []
    gate = threading.Semaphore(0)

    def slowly(writer, rows):
        gate.acquire()
        write(writer, rows)

    monkeypatch.setattr(
        "megatrain_jax._src.engine.checkpoint.save.PART_BYTES", 0
    )  # each group by itself
    monkeypatch.setattr(Writer, "write", slowly)
    saving = trainer.start_saving(tmp_path / "1")
    wait = saving.wait_for

    def watched(group):
        if saving._left[group]:
            events.append(group)
            computed_before.append(obeyed.count(Op.FORWARD))
            gate.release(100)  # a step that waits without need would never get here
        wait(group)
        assert not saving._left[group], "it is on disk before its new arrays come"

    store_of(trainer).before_replacing = watched
    obeyed, obey = [], engine.obey
    monkeypatch.setattr(engine, "obey", lambda r, s: (obeyed.append(r.op), obey(r, s)))
    trainer.step(case.batch(1))
    trainer.flush()
    assert events and computed_before[0] >= len(trainer.stages) - 1 > 2
    saving.wait()


def test_groups_are_written_in_the_order_in_which_steps_replace_them(tmp_path, monkeypatch):
    trainer = make_trainer(NOISY, OPTIMIZERS["adamw_schedule"], budget="least")
    written, release = [], Saving._release

    def noted(saving, groups):
        groups = list(groups)
        written.extend(groups)
        release(saving, groups)

    monkeypatch.setattr(
        "megatrain_jax._src.engine.checkpoint.save.PART_BYTES", 0
    )  # each group by itself
    monkeypatch.setattr(Saving, "_release", noted)
    trainer.save(tmp_path / "1")
    offloads = (i.key for i in spec_of(trainer).first.schedule.cold if i.op is Op.OFFLOAD)
    replaced = dict.fromkeys(key.owner for key in offloads if key and key.kind in LASTING)
    assert written[: len(replaced)] == list(replaced) != sorted(replaced)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saves", "restores", "limits"),
    [(60, 24, (100, 200)), pytest.param(200, 20, (50, 50), marks=pytest.mark.long)],
)
def test_memory_does_not_grow_with_each_checkpoint(tmp_path, saves, restores, limits):
    program = HELPERS / "memory_of_checkpoints.py"
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", "."), str(ROOT)])
    # One arena of the C library, since what lies between live blocks of many differs by chance.
    env = {**os.environ, "PYTHONPATH": paths, "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, program, tmp_path, str(saves), str(restores)]
    out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    # KiB. Orbax's specs of 50 arrays as JSON would be some 500 of each save and 1,000 of a restore.
    kept = json.loads(out)
    assert kept["save"] < limits[0] and kept["restore"] < limits[1], kept
