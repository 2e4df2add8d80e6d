"""Wrong arguments of the public functions: each is named before anything is traced or drawn.

Misuses are drawn from a table of what an argument must not be, together with right values of the
others, so that no order of checks is privileged.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import pickle
import random
import reprlib
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import signatures
from flax import linen, nnx
from jax.sharding import AbstractMesh, Mesh

import megatrain_jax as mt
from megatrain_jax import callbacks
from megatrain_jax._src.common import checks, other_libraries, outside
from megatrain_jax._src.engine.options.inputs import _check_optimizer, check_data
from megatrain_jax._src.engine.options.options import LoopOptions, Options
from megatrain_jax._src.engine.spec.run_spec import RunSpec, distinct_facts
from messages import refuses, tells
from misuses import (
    BATCH,
    DRAWN,
    ENTRIES,
    MESH,
    NO_BATCH,
    NO_BATCHES,
    NO_FLAGS,
    NO_LOSSES,
    NO_OPTIMIZERS,
    NO_PATHS,
    TRACED,
    Callback,
    batches,
    build,
    check_all,
    check_hints,
    entry_of,
    error_of,
    loss_fn,
    named,
    outcome,
    result,
    right_arguments,
    right_value,
    trainer,
)
from optimizers import OPTIMIZERS
from places import ROOT
from runs import make_spec
from zoo import CASES


@pytest.fixture(scope="module", autouse=True)
def freed():
    """Other tests look at what is in the pool."""
    yield
    result.cache_clear()
    trainer.cache_clear()


@pytest.mark.parametrize("entry", [*ENTRIES, "train"])
@pytest.mark.parametrize("seed", range(2))
def test_a_wrong_argument_is_named_before_anything_happens(entry: str, seed: int, tmp_path: Path):
    function, arguments = entry_of(entry)
    rng = random.Random(seed)
    bad = []
    for name, argument in arguments.items():
        for value in rng.sample(argument.wrong, min(8, len(argument.wrong))):
            options = right_arguments(rng, arguments, tmp_path) | {name: value}
            if name == "eval_every":
                options["eval_data"] = [BATCH]
            if name in ("checkpoint_every", "keep"):
                options["checkpoint_dir"] = tmp_path / "run"
            if (problem := outcome(name, function, **options)) is not None:
                bad.append(f"{name}={reprlib.repr(value)}: {problem}")
    assert not bad, "\n".join(bad)
    assert not any(tmp_path.iterdir())


def test_wrong_arguments_of_methods_are_named(tmp_path: Path):
    flags = {"params_only": NO_FLAGS}
    check_all(trainer().save, {"path": tmp_path / "there"}, {"path": (None, *NO_PATHS)} | flags)
    check_all(trainer().restore, {}, {"path": (None, *NO_PATHS)})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
    check_all(trainer().step, {}, {"batch": (*NO_BATCH, shapes)})
    for use in (
        lambda: trainer().evaluate([shapes]),
        lambda: mt.fit(build, loss_fn, [shapes], optax.sgd(0.1), progress=False),
    ):
        with refuses(TypeError, "batch['x']", "jax.ShapeDtypeStruct", "arrays"):
            use()
    check_all(trainer().read, {}, {"metrics": (None, 3, "loss", [1.0], loss_fn, {"a": "b"})})
    check_all(
        trainer().evaluate,
        {"batches": [BATCH]},
        {"batches": (*NO_BATCHES, [], iter(())), "loss_fn": NO_LOSSES[1:]},
    )
    check_all(mt.History([{"step": 1, "loss": 2.0}]).save, {}, {"path": (None, *NO_PATHS)})
    assert not any(tmp_path.iterdir())


def test_wrong_arguments_of_records_are_named():
    no_rates = ("fast", None, 0, -1.0, float("nan"), -float("inf"), True, 1j, [1.0])
    no_bytes = (0, -1, 8e9, float("inf"), "8GB", True)
    check_all(
        mt.Hardware,
        {"name": "mine", "link_bytes_per_s": 1e9, "flops_per_s": np.float32(1e12)},
        {
            name: (*no_rates, float("inf"), 5e-324, np.array([1e9, 2e9]))
            for name in ("link_bytes_per_s", "flops_per_s")
        }
        | {"link_out_bytes_per_s": [*(x for x in no_rates if x is not None), float("inf"), 5e-324]}
        | {name: (*no_rates, 1.5) for name in ("sustained", "sustained_attention")}
        | {"memory_bytes_per_s": no_rates}
        | {name: no_bytes for name in ("host_bytes", "device_bytes")}
        | {"widest_heads": no_bytes[1:], "has_bfloat16": (1, None, "no")}
        | {"name": (None, 3, b"mine"), "source": (None, 3)},
    )
    rates: dict[str, Any] = {"link_bytes_per_s": np.float16(6e4), "flops_per_s": np.array(1e12)}
    rates["link_out_bytes_per_s"] = Decimal(2)
    numbers = dataclasses.asdict(mt.Hardware(name="mine", **rates))
    assert [type(numbers[name]) for name in rates] == [float] * 3
    no_dtypes = (3, True, "bf16", "", "f4,,f4", {}, object(), loss_fn, int, "int8", complex, str)
    no_frozen = [*(x for x in no_dtypes if x != "int8"), "nf8"]
    no_state = (3, "", {}, object(), complex, jnp.float16, {"a": None}, {1: "int8"}, {"*": {}})
    check_all(
        mt.Precision,
        {},
        {"master": (*no_frozen, None, {"*": "int4"}), "compute": (*no_dtypes, {"*": "float32"})}
        | {"frozen": (*no_frozen, "int4", {"*": "float32"}), "state": no_state},
    )


@pytest.mark.parametrize("value", ["x", True, None, [], {}, "\ud800", -1, float("nan")])
def test_numbers_of_a_file_are_named_with_it(value: Any):
    with refuses((TypeError, ValueError), "a/config.json", "`size`"):
        outside.integer(Path("a/config.json"), "size", value)
    with refuses(ValueError, "a/config.json", "`size`", 7):
        outside.integer(Path("a/config.json"), "size", 6, least=7)


def test_arguments_that_go_together_are_named():
    pair = ("disk_read_bytes_per_s", "disk_write_bytes_per_s")
    given: dict[str, Any] = {"name": "m", "link_bytes_per_s": 1.0, "flops_per_s": 1.0}
    for name in pair:
        one: dict[str, Any] = given | {name: 1e9}
        with refuses(ValueError, *(f"`{each}`" for each in pair)):
            mt.Hardware(**one)
    two: dict[str, Any] = given | dict.fromkeys(pair, 1e9)
    both = mt.Hardware(**two)
    assert both.disk_read_bytes_per_s == both.disk_write_bytes_per_s == 1e9
    with refuses(ValueError, "`disk_budget`", 2**30, "`disk_dir`"):
        Options(disk_budget=2**30)


def test_a_number_too_large_for_a_float_or_an_id_is_out_of_bounds():
    for value in (10**400, -(10**400), float("inf")):
        with refuses(ValueError, "a:", "`size`", "finite"), outside.naming("a"):
            checks.number("size", value)
    for value in (2**31, 10**30, 10**400):
        with refuses(ValueError, "a:", "`id`", 0, 2147483647):
            outside.integer("a", "id", value)
    assert outside.integer("a", "id", 2**31 - 1) == 2**31 - 1
    assert checks.number("size", 10**30) == 1e30


def test_layers_are_named_in_order_and_once():
    assert checks.ascending("layers", (0, 2, 5)) == (0, 2, 5)
    for given in ((0, 2, 2), (2, 1), (-1, 0)):
        with pytest.raises(ValueError, match="`layers` must be"):
            checks.ascending("layers", given)


def test_errors_of_values_of_a_file_are_named_with_it():
    for error in (OverflowError("big"), RecursionError("deep"), KeyError("k"), ValueError("v")):
        with pytest.raises(ValueError, match="a.json: ") as caught, outside.naming("a.json"):
            raise error
        assert type(caught.value) is ValueError
    with pytest.raises(TypeError, match="a.json: t"), outside.naming("a.json"):
        raise TypeError("t")
    with pytest.raises(FileNotFoundError, match="^gone"), outside.naming("a.json"):
        raise FileNotFoundError("gone")


def test_json_is_as_deep_as_allowed():
    def nested(levels: int) -> str:
        return "[" * levels + "]" * levels

    assert outside.parsed_json(nested(64)) == json.loads(nested(64))
    for levels in (65, 900, 100_000):
        with refuses(ValueError, 64):
            outside.parsed_json(nested(levels))
    # Brackets that are text, or beside each other, don't count.
    assert outside.parsed_json('"' + "[" * 100 + '"') == "[" * 100
    assert outside.parsed_json("[" + "[],{}," * 100 + "0]")[-1] == 0


@pytest.mark.parametrize("given", [None, 3, "data", BATCH, np.float32(1), [], [{"x": [1.0]}]])
def test_what_eval_data_returns_is_named_when_it_is_called(given: Any):
    with pytest.raises((TypeError, ValueError)) as caught:
        mt.train(trainer(), [BATCH], eval_data=lambda: given, progress=False)
    assert named(caught.value, "eval_data")


@pytest.mark.parametrize("seed", range(6))
def test_right_arguments_of_every_kind_pass(seed: int, tmp_path: Path):
    rng = random.Random(seed)
    function, arguments = ENTRIES["plan"]
    found = function(**right_arguments(rng, arguments, tmp_path))
    assert found.num_parameters == 18


@pytest.mark.parametrize("entry", [*ENTRIES, "train"])
def test_signatures_show_every_option(entry: str):
    function, arguments = entry_of(entry)
    shown = inspect.signature(function).parameters.values()
    assert {p.name for p in shown} == set(arguments)
    with refuses(TypeError, "'microbatch'"):
        function(*(None for p in shown if p.default is p.empty), microbatch=2)


def test_options_are_written_into_all_places():
    old = [path for path, text in signatures.up_to_date().items() if path.read_text() != text]
    assert not old, "run `python tests/signatures.py`"


@pytest.mark.parametrize("call", signatures.CALLS, ids=lambda call: call[1])
def test_a_new_option_is_written_into_a_call(call: Any):
    file, name, records = call
    record, see = next(iter(records.items()))
    options = signatures.declared(Path(inspect.getfile(Options)).read_text())
    fresh = signatures.Declared(annotation="int | None", default="7", text="How many. Or none.")
    source = (ROOT / "megatrain_jax/_src" / file).read_text()
    found = signatures.written(source, name, records, {**options, record: {"fresh": fresh}})
    assert "fresh: int | None = 7" in found
    told = "How many. Or none." if see is None else "How many"
    assert f"fresh: {told}" in " ".join(found.split())


def call(entry: str, **options: Any) -> None:
    """Calls a function with right arguments in the places that must have one, and options."""
    function, arguments = (
        (mt.compare_plans, ENTRIES["plan"][1] | {"over": ENTRIES["plan"][1]["seed"]})
        if entry == "compare_plans"
        else entry_of(entry)
    )
    rng, shown = random.Random(0), inspect.signature(function).parameters
    needed = [name for name in arguments if shown[name].default is inspect.Parameter.empty]
    right = {name: right_value(rng, name, arguments[name]) for name in needed}
    function(**right | options)


@pytest.mark.parametrize(
    ("entry", "name", "hint"),
    [
        *((e, "device_bugdet", "`device_budget`") for e in (*ENTRIES, "compare_plans")),
        ("train", "step", "`steps`"),
        ("fit", "lr", "optimizer optax.adamw("),
        ("Trainer", "learning_rate", "optimizer optax.adamw("),
        ("fit", "max_grad_norm", "optimizer optax.chain("),
        ("fit", "max_steps", "`steps`"),
        ("fit", "num_epochs", "`epochs`"),
        ("Trainer", "max_steps", "`fit` `train` `steps`"),
        ("Trainer", "steps", "`fit` `train` `steps`"),
        ("train", "precision", "`Trainer` `fit` `precision`"),
        ("plan", "params", "`Trainer` `fit` `params`"),
        ("plan", "gradient_accumulation_steps", "`microbatches`"),
        ("fit", "accumulate_grad_batches", "`microbatches`"),
        ("fit", "batch_size", "data"),
        ("plan", "batch_size", "sample_batch"),
        ("train", "validation_data", "eval_data"),
        ("fit", "val_data", "eval_data"),
        ("fit", "output_dir", "checkpoint_dir"),
        ("plan", "gpus", "num_gpus"),
        ("fit", "num_gpus", "mesh mesh=jax.make_mesh((n,),"),
        ("Trainer", "host_gib", "host_budget"),
        ("compare_plans", "gpu", "hardware"),
        ("fit", "metrics", "loss_fn"),
        *(("fit", name, "device_budget host_budget") for name in ("budget", "memory")),
        ("fit", "zzz", ""),
    ],
)
def test_an_unknown_option_says_the_one_that_was_meant(entry: str, name: str, hint: str):
    trainer()  # traces, unless another test made it
    TRACED.clear()
    DRAWN.clear()
    with refuses(TypeError, f"'{name}'", *hint.split()) as caught:
        call(entry, **{name: 3})
    assert hint or "`" not in str(caught.value)
    with refuses(ValueError, "`over`", "'hardwear'", "`hardware`"):
        mt.compare_plans(over={"hardwear": ["H100"]})
    assert not TRACED and not DRAWN


@pytest.mark.parametrize(
    ("value", "named"),
    [(mt.card("H100"), "hardware"), (mt.Precision(), "precision"), (MESH, "mesh"), (3, "")],
)
def test_an_option_without_its_name_says_the_name(value: Any, named: str):
    last = {mt.fit: "optimizer", mt.train: "data"}
    functions: list[Any] = [mt.plan, mt.fit, mt.train, mt.Trainer, mt.compare_plans]
    for function in functions:
        shown = [*inspect.signature(function).parameters]
        name = last.get(function, "sample_batch")
        hint = f"{named}=..." if named in shown else ""
        with refuses(TypeError, f"`{name}`", *hint.split()) as caught:
            function(*[None] * (shown.index(name) + 1), value)
        assert hint or "=..." not in str(caught.value)


def test_an_unknown_keyword_of_a_record_says_the_one_that_was_meant():
    records: list[tuple[Any, str, str]] = [
        (mt.Precision, "masters", "master"),
        (mt.Precision, "dtype", "compute"),
        (mt.Precision.compact, "computes", "compute"),
        (mt.Precision.two_bytes, "product", "products"),
        (partial(dataclasses.replace, mt.Precision()), "param_dtype", "master"),
        (mt.Hardware, "device_byte", "device_bytes"),
    ]
    for kind, name, hint in records:
        with refuses(TypeError, f"'{name}'", f"`{hint}`"):
            kind(**{name: 3})
    with pytest.raises(TypeError, match=r"^Precision\W[^`]*'zzz'[^`]*$"):
        mt.Precision(zzz=3)  # type: ignore[call-arg]
    # A help page shows the record's own keywords.
    shown = list(inspect.signature(mt.Precision).parameters)
    assert shown == [field.name for field in dataclasses.fields(mt.Precision)]


@pytest.mark.parametrize(
    ("function", "name", "hint"),
    [
        (callbacks.EarlyStopping, "monitor", "`metric`"),
        (callbacks.EarlyStopping, "early_stopping_patience", "`patience`"),
        (callbacks.KeepBest, "filepath", "`folder`"),
        (callbacks.KeepBest, "monitor", "`metric`"),
        (callbacks.CSVLog, "filename", "`path`"),
        (callbacks.TensorBoard, "log_dir", "`folder`"),
        (callbacks.MLflow, "experiment_name", "`experiment`"),
        (mt.Precision, "fp8", "`products`"),
        (mt.Precision, "load_in_8bit", "`frozen`"),
        (mt.Trainer, "deepspeedy", ""),
        (mt.Trainer.save, "filepath", "`path`"),
        (mt.History.plot, "metric", "`metrics`"),
        (mt.fit, "logger", "`callbacks`"),
        (mt.fit, "gpu", "`hardware`"),
        (mt.fit, "freeze", "`trainable`"),
        (mt.fit, "validation_split", "`eval_data`"),
        (mt.fit, "initial_epoch", "`checkpoint_dir`"),
        (mt.fit, "accelerator", "GPU"),
    ],
)
def test_names_of_other_libraries_say_the_ones_that_were_meant(function: Any, name: str, hint: str):
    said = error_of(lambda: function(**{name: 3}))
    assert said.endswith(f"argument '{name}'") if not hint else tells(said, *hint.split())
    # A help page shows the function's own arguments.
    assert name not in inspect.signature(function).parameters


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (callbacks, "CSVLogger", "`CSVLog`"),
        (callbacks, "ModelCheckpoint", "`KeepBest`"),
        (callbacks, "LearningRateScheduler", "optimizer"),
        (callbacks, "EarlyStoping", "`EarlyStopping`"),
        (mt, "lora", "`megatrain_jax.models.lora`"),
        (mt, "TrainingArguments", "`fit`"),
        (mt, "DPOTrainer", "objectives.dpo"),
        (mt, "dpo", "`megatrain_jax.objectives.dpo`"),
        (mt, "grpo", "`megatrain_jax.models.train_grpo`"),
    ],
)
def test_public_names_of_other_libraries_say_the_ones_that_were_meant(
    module: Any, name: str, hint: str
):
    assert hint in error_of(lambda: getattr(module, name))
    assert not hasattr(module, "_mine")


@pytest.mark.parametrize("given", [(("a", "int8"), "b"), ("b", ("a", "int8"))])
def test_a_codec_by_path_needs_a_path_for_each(given: Any):
    with refuses(ValueError, "state", "int8"):
        mt.Precision(state=given)


def test_every_public_function_hints_at_a_misspelt_argument():
    check_hints(mt)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("class_weight", "loss_fn weights"),
        ("shuffle", "`data`"),
        ("initial_epoch", "`checkpoint_dir`"),
        ("logger", "callbacks.CSVLog"),
        ("ckpt_path", "`checkpoint_dir=`"),
        ("rngs", "nnx.Rngs"),
        ("grad_accum", "`microbatches`"),
        ("freeze", "`trainable`"),
        ("ema", "`ema_decay`"),
        ("patience", "callbacks.EarlyStopping"),
        ("early_stopping", "callbacks.EarlyStopping"),
        ("monitor", "callbacks.EarlyStopping"),
        ("log_dir", "callbacks.TensorBoard"),
        ("log_every", "`history`"),
    ],
)
def test_a_guessed_name_leads_to_the_way_here(name: str, hint: str):
    function: Any = mt.fit
    said = error_of(lambda: function(**{name: 3}))
    assert tells(said, name, *hint.split()) and "eval_every" not in said or "EarlyStopping" in said


@pytest.mark.parametrize(("name", "ours"), [*other_libraries.DTYPES.items(), ("BF16", "bfloat16")])
def test_a_dtype_named_as_elsewhere_is_asked_for(name: str, ours: str):
    with refuses(ValueError, "`precision`", name, f'"{ours}"?'):
        mt.Precision.of(name)


def test_public_functions_can_be_pickled():
    assert pickle.loads(pickle.dumps(mt.fit)) is mt.fit


@pytest.mark.parametrize(
    ("entry", "batches", "order"),
    [
        ("fit", "data", "fit(model, loss_fn, data, optimizer)"),
        ("Trainer", "sample_batch", "Trainer(model, loss_fn, optimizer, sample_batch)"),
        ("plan", "sample_batch", "plan(model, loss_fn, optimizer, sample_batch)"),
    ],
)
def test_arguments_in_each_other_s_places_are_told_in_one_line(
    entry: str, batches: str, order: str
):
    given = [BATCH] * 3 if batches == "data" else BATCH
    with pytest.raises(TypeError) as caught:
        call(entry, optimizer=given, **{batches: optax.sgd(0.1)})
    assert tells(str(caught.value), "`optimizer`", f"`{batches}`", order)
    with pytest.raises(TypeError) as caught:
        call(entry, optimizer=given)
    assert tells(str(caught.value), "optimizer", "float32[4, 3]")
    assert "\n" not in str(caught.value)
    for model in (build, build(), nnx.Linear(2, 2, rngs=nnx.Rngs(0)), linen.Dense(2)):
        with refuses(TypeError, "`model`", "`loss_fn`", "swapped"):
            call(entry, model=loss_fn, loss_fn=model)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("Trianer", "Trainer"), ("Plam", "Plan"), ("modles", "models")],
)
def test_an_unknown_name_of_the_package_says_the_near_one(name: str, meant: str):
    with refuses(AttributeError, f"'{name}'", f"`{meant}`"):
        getattr(mt, name)
    with pytest.raises(AttributeError, match="'zzz'[^`]*$"):
        vars(mt)["__getattr__"]("zzz")


def test_modules_of_the_package_are_there_without_an_import_of_their_own():
    # By the function itself: other tests have imported them, and Python keeps them as attributes.
    assert vars(mt)["__getattr__"]("callbacks") is importlib.import_module(
        "megatrain_jax.callbacks"
    )
    assert {"callbacks", "data", "distributed", "losses", "models", "objectives"} <= {*dir(mt)}


def test_numpy_numbers_train_as_python_numbers_do(tmp_path: Path):
    def run(kind: Callable[[int], Any], folder: Any) -> list[float]:
        found = mt.fit(
            build,
            loss_fn,
            batches(),
            optax.sgd(0.01),
            steps=kind(5),
            microbatches=kind(2),
            seed=kind(0),
            eval_data=lambda: iter([BATCH]),
            eval_every=kind(2),
            checkpoint_dir=folder,
            checkpoint_every=kind(3),
            keep=kind(1),
            callbacks=(Callback(),),
            progress=False,
        )
        assert [p.name for p in Path(folder).iterdir()] == ["5"]
        return [record["loss"] for record in found.history]

    # Of eight bits and unsigned: what is counted down or compared must not wrap around.
    assert run(np.uint8, tmp_path / "numpy") == run(int, str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("entry", "options", "message"),
    [
        ("fit", {"precision": "bf16"}, 'mean "bfloat16"'),
        ("fit", {"callbacks": Callback()}, r"`callbacks`.*\[f\]"),
        ("fit", {"callbacks": [print, 3]}, r"`callbacks\[1\]`.*\b3\b"),
        ("fit", {"steps": 5.0}, r"`steps` .*integer.* 5.0 .*int"),
        ("fit", {"keep": 0}, r"`keep` .*\b1\b.*\b0\b"),
        ("fit", {"data": batches}, "`data` .*function.*call"),
        ("fit", {"data": BATCH}, r"itertools.repeat\(batch\)"),
        ("fit", {"data": np.ones((8, 3))}, r"`data`.* \[x\[i : i \+ n\]"),
        ("fit", {"eval_every": 2}, "`eval_every`=2 .*`eval_data`"),
        ("fit", {"checkpoint_every": 2}, "`checkpoint_every`=2 .*`checkpoint_dir`"),
        ("fit", {"keep": 5}, "`keep`=5 .*`checkpoint_dir`"),
        ("fit", {"steps": 2, "epochs": 3}, "`steps`=2 and `epochs`=3"),
        ("fit", {"epochs": 3, "data": batches()}, "`epochs`=3 .*`data` .*length.*`steps`"),
        ("fit", {"epochs": 3, "data": []}, "`data` .*batch"),
        (
            "fit",
            {"data": (np.ones((4, 3)), np.ones(4, int))},
            r"tuple of arrays.*\(x\[i : i \+ n\]",
        ),
        ("fit", {"loss_fn": lambda model, x, y: 0.0}, "`y` .*x, y = batch"),
        ("plan", {"loss_fn": lambda model, x, y, z: 0.0}, "x, y = batch"),
        ("plan", {"optimizer": optax.adamw}, r"call.*optax.adamw\(1e-3\)"),
        ("fit", {"optimizer": optax.lion}, r"call.*optax.lion\(1e-3\)"),
        ("plan", {"optimizer": NO_OPTIMIZERS[-1]}, "`tx`"),
        ("fit", {"optimizer": "AdamW"}, r"`optimizer`.*optax.adamw\(1e-3\)"),
        ("plan", {"optimizer": "best"}, r"`optimizer`.*optax.adamw\(1e-3\)"),
        ("plan", {"hardware": "H1000"}, "'H1000' .*mean H100 "),
        ("fit", {"hardware": "4900"}, "`hardware`='4900'.*mean RTX 4090"),
        ("plan", {"host_budget": "22"}, "'22' .*\"22 GiB\""),
        ("plan", {"host_budget": 200}, '`host_budget`=200 .*"200 GiB"'),
        ("fit", {"device_budget": 22}, '`device_budget`=22 .*"22 GiB"'),
        ("plan", {"host_budget": "22KB"}, "`host_budget`='22KB' .*1.00 MiB"),
        ("Trainer", {"host_budget": "all"}, "`host_budget`.*'all'.*None$"),
        ("plan", {"host_gib": "much"}, "`host_gib` .*512GiB"),
        ("plan", {"host_budget": "0GiB"}, "`host_budget`='0GiB' .*1"),
        ("plan", {"host_budget": "9" * 400 + "GiB"}, "GiB' .*bytes"),
        ("plan", {"host_gib": "-1"}, "`host_gib` .*finite.* 0"),
        ("plan", {"host_gib": "64"}, "`host_gib`=64 .*`hardware`"),
        ("plan", {"waves": "auto"}, "`waves` .*None.*'auto'"),
        ("plan", {"num_gpus": 3}, "num_gpus=2"),
        ("plan", {"sample_batch": None}, "None.*arrays"),
        ("fit", {"optimizer": None}, r"`optimizer`.*optax.adamw\(1e-3\)"),
        ("plan", {"hardware": 4090}, "`hardware`.*megatrain_jax.this_machine"),
        ("plan", {"host_gib": 512}, "`host_gib`=512 .*`hardware`"),
        ("plan", {"num_gpus": 2, "mesh": MESH}, "`num_gpus`=2 and `mesh`"),
        ("Trainer", {"device_budget": "Least"}, "bytes.*.Least.*.minimum"),
        ("plan", {"mesh": 4}, r'jax.sharding.Mesh.*mesh=jax.make_mesh\(\(4,\), \("data"'),
        ("plan", {"mesh": jax.devices()[:2]}, r"mesh=jax.make_mesh\(\(2,\), "),
        ("fit", {"mesh": "data"}, r"mesh=jax.make_mesh\(\(n,\), "),
        ("plan", {"mesh": AbstractMesh((), ())}, r"`mesh` .*devices.*make_mesh\(\(n,\), "),
        ("Trainer", {"mesh": Mesh(jax.devices()[:1] * 2, "d")}, r"\b2 .*\b1 .*once"),
        ("Trainer", {"mesh": Mesh([jax.devices()[:2]] * 2, ("d", "e"))}, r"\b4 .*\b2 .*once"),
        ("fit", {"mesh": AbstractMesh((2,), ("d",))}, r"`plan` .*make_mesh\(\(2,\), "),
        ("Trainer", {"trainable": "("}, r"`trainable`='\(' .*regular"),
        ("train", {"trainer": result}, r"result\.trainer"),
    ],
)
def test_an_error_says_what_to_do(entry: str, options: dict[str, Any], message: str):
    function, arguments = entry_of(entry)
    needed = ("model", "loss_fn", "optimizer", "sample_batch", "trainer", "data")
    right = {
        name: right_value(random.Random(0), name, arguments[name])
        for name in needed
        if name in arguments
    }
    given = {name: value() if value is result else value for name, value in options.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        function(**right | given)


@functools.cache
def _spec() -> RunSpec:
    return make_spec(CASES["nnx_tied"], OPTIMIZERS["adam"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("microbatches", 2),
        ("precision", mt.Precision(compute=jnp.float32, state=jnp.bfloat16)),
        ("device_budget", "minimum"),
        ("on_nonfinite", "skip"),
        ("max_skipped", 3),
        ("seed", 1),
        ("state_per_process", True),
    ],
)
def test_processes_that_differ_in_an_option_of_the_run_are_told_so(name: str, value: Any):
    spec, batch = _spec(), CASES["nnx_tied"].batch(0)
    given: dict[str, Any] = {name: value}
    other = dataclasses.replace(spec, options=dataclasses.replace(spec.options, **given))
    ours, theirs = (distinct_facts(own, batch) for own in (spec, other))
    assert [fact for fact in ours if repr(ours[fact]) != repr(theirs[fact])] == [f"`{name}`"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 2),
        ("eval_every", 2),
        ("eval_params", "ema"),
        ("checkpoint_every", 2),
        ("keep", 2),
        ("stall_seconds", None),
    ],
)
def test_processes_that_differ_in_an_option_of_the_loop_are_told_so(name: str, value: Any):
    given: dict[str, Any] = {"steps": 4, "eval_data": [BATCH], "eval_every": 1}
    given |= {"checkpoint_dir": "run", "checkpoint_every": 1}
    ours, theirs = (LoopOptions(**given | own).agreed_options for own in ({}, {name: value}))
    assert [option for option in ours if ours[option] != theirs[option]] == [f"`{name}`"]


def test_a_tuple_of_arrays_is_a_batch_and_a_tuple_of_batches_is_none():
    x, y = np.zeros((4, 3)), np.zeros(4)
    for several in ((x, x), ({"x": x}, {"x": x}), (x, {"x": x}), [x, y], ()):
        check_data("data", several, "advice")
    for batch in ((x, y), (x, x.astype(int)), (x, {"x": x}, y)):
        with refuses(TypeError, "`data`", f"{len(batch)} batches"):
            check_data("data", batch, "advice")


@pytest.mark.parametrize(
    ("optimizer", "advised"),
    [("adam", "adam"), ("AdamW", "adamw"), ("SGD", "sgd"), ("mine", "adamw"), (optax.lion, "lion")],
)
def test_an_optimizer_by_its_name_is_advised_as_optax_has_it(optimizer, advised):
    with refuses(TypeError, "`optimizer`", f"optax.{advised}(1e-3)"):
        _check_optimizer(optimizer)
