"""State in fewer bytes: held narrower than it is computed on, the same bits however it moves."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib
from orbax.checkpoint import v1

import megatrain_jax as mt
import small
from inside import on_one_device, spec_of
from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.engine.checkpoint.contents import (
    arrays_to_convert,
    coding_of,
    decoded,
    entries_of,
    flat,
)
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.steps import initial_state
from megatrain_jax._src.engine.options.options import DeviceBudget
from megatrain_jax._src.engine.report.make_plan import make_plan
from megatrain_jax._src.engine.spec.costs import coding_seconds
from messages import refuses, tells, warns
from optimizers import OPTIMIZERS
from oracle import open_model
from runs import check_same_bits, make_spec, train
from workloads import all_resident_bytes
from zoo import CASES
from zoo_case import Case

SETTINGS = {
    "bf16": mt.Precision(master=jnp.bfloat16, compute=jnp.float32),
    "bf16_state": mt.Precision(master=jnp.bfloat16, state=jnp.bfloat16, compute=jnp.float32),
    "nearest": mt.Precision(
        master=jnp.bfloat16, state=jnp.bfloat16, rounding="nearest", compute=jnp.bfloat16
    ),
    "int8": mt.Precision.compact(compute=jnp.float32),
    "int4": mt.Precision(state={"*/nu/*": "int8", "*": "int4"}, compute=jnp.float32),
    "int8_masters": mt.Precision(master="int8", state="int4", compute=jnp.float32),
}
NUM_STEPS = 4


def make_trainer(case, name, setting, budget: DeviceBudget = "least", **options):
    return mt.Trainer(
        case.build(),
        case.loss_fn,
        OPTIMIZERS[name](None),
        case.batch(0),
        precision=SETTINGS[setting],
        device_budget=budget,
        progress=False,
        **options,
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize(
    ("case", "optimizer", "setting"),
    [
        ("nnx_tied", "clip_adamw", "bf16"),
        ("nnx_tied", "adamw_schedule", "bf16_state"),
        ("linen_scan_remat", "clip_adamw", "bf16_state"),
        ("linen_scan_remat", "adamw_schedule", "int8"),
        ("nnx_tied", "muon", "int4"),
        ("linen_scan_remat", "clip_adamw", "int8_masters"),
        pytest.param("nnx_tied", "adamw_schedule", "nearest", marks=pytest.mark.long),
        pytest.param("unet", "adafactor", "bf16_state", marks=pytest.mark.long),
    ],
)
def test_streamed_resident_and_resumed_are_the_same_bits(tmp_path, case, optimizer, setting):
    case = CASES[case]
    batches = [case.batch(seed) for seed in range(NUM_STEPS)]
    streamed = make_trainer(case, optimizer, setting)
    reference = train(streamed, batches, gradients=False)
    workload = spec_of(streamed).first.workload
    resident = make_trainer(case, optimizer, setting, 10 * all_resident_bytes(workload))
    runs = [train(resident, batches, gradients=False)]
    half = make_trainer(case, optimizer, setting)
    train(half, batches[:2], gradients=False)
    half.save(tmp_path / "half")
    resumed = make_trainer(case, optimizer, setting)
    resumed.restore(tmp_path / "half")
    runs.append(train(resumed, batches[2:], gradients=False))
    for run in runs:
        assert run.losses == reference.losses[-len(run.losses) :]
        check_same_bits(run.params, reference.params)
        check_same_bits(run.opt_state, reference.opt_state)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize(
    ("case", "setting"),
    [("linen_scan_remat", "int4"), ("nnx_tied", "int8"), ("linen_scan_remat", "int8_masters")],
)
def test_checkpoints_of_numbers_and_of_codes_start_each_others_runs(tmp_path, case, setting):
    """What a compact run was is what a run in fp32 goes on from, and plain Orbax decodes it."""
    case = CASES[case]
    fp32 = mt.Precision(compute=jnp.float32)
    compact, plain = (
        mt.Trainer(
            case.build(), case.loss_fn, OPTIMIZERS["clip_adamw"](None), case.batch(0),
            precision=precision, progress=False,
        )
        for precision in (SETTINGS[setting], fp32)
    )  # fmt: skip
    train(compact, [case.batch(0)], gradients=False)
    held = compact.params, compact.opt_state
    compact.save(tmp_path / "compact")
    with pytest.warns(UserWarning, match=r"\d+ .*dtypes"):
        plain.restore(tmp_path / "compact")
    for a, b in zip(*map(jax.tree.leaves, (held, (plain.params, plain.opt_state))), strict=True):
        assert b.dtype == (jnp.float32 if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype)
        np.testing.assert_array_equal(np.asarray(a, b.dtype), b)
    facts = json.loads((tmp_path / "compact" / "megatrain.json").read_text())["coded"]
    saved = flat(v1.load(str(tmp_path / "compact")))
    paths = [path for path in saved if path[-1] == "codes"]
    exact = flat({"params": held[0], "opt_state": held[1]})
    assert {"/".join(path[:-1]) for path in paths} == set(facts)
    for path in paths:
        assert saved[path].dtype in (np.int8, np.uint8)
        found = decoded(facts["/".join(path[:-1])], saved[path], saved[(*path[:-1], "scales")])
        np.testing.assert_array_equal(found, exact[path[:-1]])
    # Saved in fp32 and read by the compact run, it is the same again: codes, too.
    plain.save(tmp_path / "plain")
    again = mt.Trainer(
        case.build(), case.loss_fn, OPTIMIZERS["clip_adamw"](None), case.batch(0),
        precision=SETTINGS[setting], progress=False,
    )  # fmt: skip
    with warns(UserWarning, "converted"):
        again.restore(tmp_path / "plain")
    check_same_bits(again.params, held[0])
    check_same_bits(again.opt_state, held[1])
    again.save(tmp_path / "again")
    for path, array in flat(v1.load(str(tmp_path / "again"))).items():
        np.testing.assert_array_equal(array, saved[path], err_msg=str(path))


class Gated(nnx.Module):
    """An embedding, two layers and a head, and a small gate beside the head."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(512, 64, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])
        self.gate = nnx.Linear(64, 2, rngs=rngs)
        self.head = nnx.Linear(64, 512, rngs=rngs)


def gated_loss(model, batch):
    x = model.embed(batch["x"])
    for layer in model.layers:
        x = jax.nn.relu(layer(x))
    return jnp.mean(model.head(x) ** 2) + jnp.mean(model.gate(x) ** 2)


GATED = Case(
    name="gated",
    build=lambda: Gated(nnx.Rngs(0)),
    loss_fn=gated_loss,
    blocks=2,
    templates=1,
    batch=lambda seed: {"x": np.zeros((2, 4), int)},
)


def codes(precision, optimizer=None):
    """A run spec of that model, and the codes of its state by path."""
    spec = make_spec(GATED, lambda _: optimizer or optax.adamw(1e-3), precision=precision)
    return spec, coding_of(spec, entries_of(spec))


def coding_time(spec):
    """Seconds of all updates for their codes, and the number of coded numbers."""
    numbers = sum(layout.num_coded for layout in spec.layouts)
    return sum(coding_seconds(spec.optimizer, spec.layouts)), numbers


def test_codes_are_for_matrices_by_default():
    """Vectors keep their state in fp32."""
    spec, coded = codes(mt.Precision.compact())
    kernels = [f"{name}/kernel/value" for name in ("layers/0", "layers/1", "gate", "head")]
    kernels.append("embed/embedding/value")
    assert set(coded) == {f"opt_state/0/{m}/{k}" for m in ("mu", "nu") for k in kernels}
    assert all(row["code"] == "dynamic" for row in coded.values())
    assert all(row["signed"] == ("/mu/" in path) for path, row in coded.items())
    vectors, matrices = 2 * 64 + 2 + 512, 2 * 64 * 64 + 2 * 64 + 2 * 64 * 512
    expected = 10 * vectors + (4 + 8 / 128) * matrices
    assert abs(make_plan(spec).host_bytes - expected) < 0.02 * expected
    _, numbers = coding_time(spec)
    assert 2 * matrices <= numbers < 1.02 * 2 * matrices


def test_an_update_takes_time_for_each_number_in_codes():
    spec, _ = codes(mt.Precision.compact())
    (seconds, numbers), workload = coding_time(spec), spec.first.workload
    moved = [2 * (s[Kind.MASTERS] + s[Kind.OPTIMIZER_STATE]) for s in workload.sizes]
    assert seconds > 0 and sum(workload.costs.update) > seconds + sum(moved) / 8e12
    # Muon's matrices lie in memory decoded.
    spec, coded = codes(mt.Precision.compact(), contrib.muon(1e-3))
    assert {row["code"] for row in coded.values()} == {"linear"}
    of_muon, its_numbers = coding_time(spec)
    assert of_muon / its_numbers > 2 * seconds / numbers


def test_paths_overrule_which_state_is_in_codes():
    _, coded = codes(mt.Precision(state={"*/nu/head/*": "int4", "*/head/*": jnp.int8}))
    assert {path: row["bits"] for path, row in coded.items()} == {
        f"opt_state/0/{m}/head/{name}/value": 4 if m == "nu" else 8
        for m in ("mu", "nu")
        for name in ("kernel", "bias")
    }  # fmt: skip


@pytest.mark.parametrize(
    "wrong", [{"state": {"*/typo/*": "int8", "*": "int8"}}, {"master": {"Head/*": "bfloat16"}}]
)
def test_a_pattern_that_fits_no_path_is_refused(wrong):
    with refuses(ValueError, "paths", "embed/embedding"):
        codes(mt.Precision(**wrong))


def test_moments_that_are_subtracted_are_not_in_codes():
    """Rounded apart, the difference of centered RMSProp's moments may fall below zero."""
    optimizer = optax.rmsprop(1e-3, centered=True)
    _, coded = codes(mt.Precision.compact(), optimizer)
    assert not coded
    for narrow in ({"*": "int4"}, "bfloat16"):
        spec, _ = codes(mt.Precision(state=narrow), optimizer)
        (warning,) = [x for x in make_plan(spec).warnings if "state" in x]
        assert tells(warning, "roots", "0/mu/embed/embedding")


@pytest.mark.exhaustive
def test_frozen_parameters_in_codes(tmp_path):
    """A frozen base in 8 bits: read as it is computed with, and a checkpoint starts other runs."""
    case = CASES["nnx_tied"]

    def make(frozen, **options):
        return mt.Trainer(
            case.build(), case.loss_fn, OPTIMIZERS["adam"](None), case.batch(0), progress=False,
            precision=mt.Precision(frozen=frozen, compute=jnp.float32),
            trainable="bias", **options,
        )  # fmt: skip

    coded, full = make("int8"), make(None)
    for a, b in zip(*map(jax.tree.leaves, (coded.params, full.params)), strict=True):
        scale = np.abs(b).max()
        assert 0 <= np.abs(a - b).max() <= 0.51 / 127 * scale
    same = make(None, params=coded.params)
    runs = [train(t, [case.batch(i) for i in range(3)], gradients=False) for t in (coded, same)]
    np.testing.assert_allclose(runs[0].losses, runs[1].losses, rtol=1e-6)
    coded.save(tmp_path / "coded")
    other = make(None, params=tmp_path / "coded")
    check_same_bits(other.params, coded.params)
    compact = make_trainer(case, "clip_adamw", "int8")
    compact.save(tmp_path / "parameters", params_only=True)  # without the state that has codes
    other = make_trainer(case, "clip_adamw", "bf16", params=tmp_path / "parameters")
    check_same_bits(other.params, compact.params)
    resumed = make("int8")
    resumed.restore(tmp_path / "coded")
    check_same_bits(resumed.params, coded.params)


@pytest.mark.exhaustive
def test_updates_round_what_fp32_gives():
    """One step: parameters and state are neighbours in bfloat16 of what plain fp32 has."""
    case = CASES["nnx_tied"]
    exact = open_model(case, case.batch(0))
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), exact.params)
    names = ("bf16_state", "nearest")
    precisions = [SETTINGS[names[0]], mt.Precision(compute=jnp.float32)]
    runs = [
        mt.Trainer(
            case.build(), case.loss_fn, OPTIMIZERS["adamw_schedule"](None), case.batch(0),
            params=start, precision=precision, progress=False,
        )
        for precision in precisions
    ]  # fmt: skip
    narrow, wide = (train(run, [case.batch(1)], gradients=False) for run in runs)
    for held, full in zip(
        jax.tree.leaves((narrow.params, narrow.opt_state)),
        jax.tree.leaves((wide.params, wide.opt_state)),
        strict=True,
    ):
        if full.dtype != jnp.float32:
            continue
        assert held.dtype == jnp.bfloat16
        down = (full.view(np.uint32) & 0xFFFF0000).view(np.float32)
        up = ((full.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
        held = held.astype(np.float32)
        assert ((held == down) | (held == up)).mean() > 0.99  # fp32 itself strays a bit
    np.testing.assert_allclose(narrow.losses, wide.losses, rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("started_once_in_test")
def test_experts_that_no_token_chose_are_updated_as_all_others():
    """Their moments decay and move them, as whole-tree Optax does with what was held before."""
    case, make = CASES["moe"], OPTIMIZERS["clip_adamw"]
    batches = [case.batch(0), {"tokens": np.full_like(case.batch(0)["tokens"], 5)}]
    streamed = make_trainer(case, "clip_adamw", "int8")
    train(streamed, batches[:1], gradients=False)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), streamed.params)
    state = streamed.opt_state
    run = train(streamed, batches[1:], gradients=False)
    room = 10 * all_resident_bytes(spec_of(streamed).first.workload)
    resident = train(make_trainer(case, "clip_adamw", "int8", room), batches, gradients=False)
    check_same_bits(run.params, resident.params)
    check_same_bits(run.opt_state, resident.opt_state)

    plain, optimizer = open_model(case, batches[1]), make(None)

    def loss(params):
        return plain.loss(params, plain.variables, batches[1], jax.random.key(0))[0]

    gradients = jax.jit(jax.grad(loss))(params)
    updates, new_state = jax.jit(optimizer.update)(gradients, state, params)
    exact = optax.apply_updates(params, updates), new_state[1][0].mu, new_state[1][0].nu
    held = run.params, run.opt_state[1][0].mu, run.opt_state[1][0].nu
    old = params, state[1][0].mu, state[1][0].nu

    def experts(trees):
        """Of each tree, the numbers of experts that this step chose for none of its tokens."""
        found = []
        for tree in trees:
            rows = [
                np.asarray(tree["blocks"][b][name][...], np.float32)[
                    ~np.asarray(gradients["blocks"][b][name][...]).any(axis=(1, 2))
                ].reshape(-1)
                for b in range(3)
                for name in ("up", "down")
            ]
            assert all(row.size for row in rows), "all tokens are alike: two experts of four"
            found.append(np.concatenate(rows))
        return found

    for (now, right, before), name in zip(
        zip(*map(experts, (held, exact, old)), strict=True), ("params", "mu", "nu"), strict=True
    ):
        off = np.abs(now - right)
        if name == "params":  # one of the neighbours in bfloat16
            assert (off <= 2.0**-7 * np.abs(right) * 1.001).all()
            assert (np.abs(before - right) > 2.0**-7 * np.abs(right)).mean() > 0.05
        else:  # as decoded, but for the scale, which decays
            assert np.isclose(now, right, rtol=1e-5, atol=0).mean() > 0.999
            assert not np.isclose(before, right, rtol=1e-5, atol=0)[right != 0].any()
    for now, right in zip(*map(jax.tree.leaves, (held, exact)), strict=True):
        largest = np.abs(right).max()
        assert np.abs(np.asarray(now, np.float32) - right).max() <= 0.9 / 64 * largest + 1e-12


@pytest.mark.exhaustive
def test_seeds_and_steps_draw_anew():
    case = CASES["nnx_tied"]
    runs = [
        train(make_trainer(case, "clip_adamw", "bf16", seed=seed), [case.batch(0)], gradients=False)
        for seed in (0, 0, 1)
    ]
    leaves = [jax.tree.leaves(run.params) for run in runs]
    assert all((a == b).all() for a, b in zip(*leaves[:2], strict=True))
    assert any((a != b).any() for a, b in zip(leaves[0], leaves[2], strict=True))


def test_codes_of_another_kind_are_converted_and_those_of_another_shape_are_not():
    spec = make_spec(CASES["nnx_tied"], OPTIMIZERS["adam"], precision=SETTINGS["int8"])
    entries = entries_of(spec)
    own = coding_of(spec, entries)
    there = {e.path: jax.ShapeDtypeStruct(e.shape, e.dtype) for e in entries}
    assert len(own) > 4 and not arrays_to_convert(entries, own, there, own)
    for name, coding in own.items():
        array = tuple(name.split("/"))
        other = coding | {"code": "linear" if coding["code"] == "dynamic" else "dynamic"}
        (found,) = arrays_to_convert(entries, own, there, own | {name: other}).items()
        assert found[0] == array and found[1].coding == other
        assert [source.path for source in found[1].sources] == [
            (*array, "codes"),
            (*array, "scales"),
        ]
        # What is there in another shape is no form of it: all differences are told before reading.
        longer = coding | {"shape": [2, *coding["shape"]]}
        assert not arrays_to_convert(entries, own, there, own | {name: longer})


def test_initial_codes_are_computed_by_the_program_and_not_by_the_compiler():
    # XLA evaluates the largest number of each block of zeros slowly: 4 seconds for 3.5 million.
    case = Case(
        name="layers", build=small.params, loss_fn=small.loss_fn, blocks=2, templates=1,
        batch=small.batch,
    )  # fmt: skip
    spec = make_spec(case, OPTIMIZERS["adam"], precision=SETTINGS["int8"])
    texts = []
    for g, layout in enumerate(spec.layouts):
        kernel = initial_state(spec.optimizer.initial_state[g], layout, on_one_device())
        text = KernelCache().get(kernel).lower(*kernel.takes or ()).compile().as_text()
        texts += [text] if "s8[" in text.partition("\n")[0] else []
    assert texts and all(" reduce(" in text or " reduce-window(" in text for text in texts)
