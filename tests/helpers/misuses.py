"""Right and wrong arguments of the public functions, and how a misuse ends."""

import dataclasses
import functools
import inspect
import random
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import megatrain_jax as mt
from messages import tells

TRACED: list[str] = []
DRAWN: list[int] = []
BATCH = {"x": np.ones((4, 3), np.float32)}
MESH = AbstractMesh((2,), ("data",))


def build() -> Any:
    TRACED.append("model")
    return {"layers": [{"w": jnp.ones((3, 3))} for _ in range(2)]}


def loss_fn(model: Any, batch: Any) -> Any:
    TRACED.append("loss")
    x = batch["x"]
    for layer in model["layers"]:
        x = x @ layer["w"]
    return (x**2).mean()


class Callback:
    def __call__(self, trainer: Any, record: Any) -> None: ...

    def one(self, record: Any) -> None: ...


@dataclasses.dataclass
class Unhashable:
    def __call__(self, model: Any, batch: Any) -> Any:
        return loss_fn(model, batch)


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"there"


class Index:
    def __init__(self, value: int = 2):
        self.value = value

    def __index__(self) -> int:
        return self.value


def batches() -> Iterable[Any]:
    for _ in range(8):
        DRAWN.append(1)
        yield BATCH


def nested(depth: int) -> Any:
    tree: Any = []
    for _ in range(depth):
        tree = [tree]
    return tree


@dataclasses.dataclass(frozen=True)
class Argument:
    """The right and the wrong values of an argument; a function makes a fresh value."""

    right: tuple[Any, ...]
    wrong: tuple[Any, ...]


NOTHING_USEFUL = (object(), 1j, b"1", {1, 2}, {"a": 1}, [3], (), lambda: None, int, float("nan"))
NO_FLAGS = (0, 1, "no", "False", "", None, 1.0, *NOTHING_USEFUL)
NO_COUNTS = (
    *("5", "", "1e3", 1.5, 5.0, 1e300, float("inf"), -float("inf"), True, False, 0, -1, -(2**70)),
    *(np.int64(0), np.int8(-3), np.float32(2), np.bool_(True), np.array([2, 3]), np.array([2])),
    *(Decimal(2), Fraction(4, 2), jnp.float32(2), *NOTHING_USEFUL),
)
# A number alone is one of bytes.
NO_BYTES = ("22", "22.5", "8 gigs", "GiB", "-1GiB", 8e9)
NO_BYTES += (22, 200, np.int64(512), *(v for v in NO_COUNTS if v is not NO_COUNTS[0]))
COUNTS = (2, np.int64(2), np.uint8(4), np.array(1), jnp.int32(2), Index())
NO_PATHS = (3, 1.5, True, b"there", BytesPath(), "", "a\0b", ["there"], object(), lambda: "there")
NO_BATCHES = (
    *(3, 1.5, True, None, "data", b"data", BATCH, batches, np.float32(1), np.array(1.0)),
    *(
        jnp.float32(1),
        np.ones((8, 4)),
        jnp.ones((8, 4, 3)),
        object(),
        list,
        lambda: [BATCH],
        loss_fn,
    ),
)
NO_BATCH = (
    *(None, (), {}, 3, "batch", [1.0], {"x": [1.0]}, {"x": np.float32(1)}, {"x": np.zeros(())}),
    *({"x": np.zeros((0, 3))}, {"x": np.array(["a"])}, {"x": np.array([1, None])}, loss_fn),
    *({1: np.ones(4), "x": np.ones(4)}, nested(10_000)),
)
NO_MODELS = (
    *(None, 3, 1.5, True, "gpt", b"gpt", object(), nnx.Linear, dict, lambda size: build()),
    *({1: np.ones(3), "x": np.ones(3)}, nested(10_000)),
)
NO_LOSSES = (
    *(None, 3, "mse", {}, object(), optax, optax.adamw(1e-3), lambda model: 0.0, lambda: 0.0),
    *(lambda model, batch, rng, more: 0.0, lambda model, batch, *, scale: 0.0, Unhashable()),
)
NO_OPTIMIZERS = (
    *(None, 3, 0.1, "adam", {}, (), object(), optax.adamw, optax.GradientTransformation, optax),
    *(lambda: optax.sgd(0.1), [optax.sgd(0.1)], loss_fn),
    nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param),
)

MODEL = Argument((build, lambda: build()), NO_MODELS)
LOSS = Argument((loss_fn, lambda model, batch, rng: loss_fn(model, batch)), NO_LOSSES)
OPTIMIZER = Argument((optax.sgd(0.1), optax.adamw(1e-3)), NO_OPTIMIZERS)
SAMPLE = Argument((BATCH, {"x": jax.ShapeDtypeStruct((4, 3), np.float32)}), NO_BATCH)
RUN = {
    "microbatches": Argument((*COUNTS, "auto"), (*NO_COUNTS, None)),
    "waves": Argument((None, 1, np.int64(1)), (*NO_COUNTS, 3)),
    "precision": Argument(
        (
            mt.Precision(),
            mt.Precision(compute=jnp.float32),
            *("auto", "compact", "two_bytes", "float32", "bfloat16", "float16"),
        ),
        ("bf16", "Compact", "", jnp.bfloat16, np.dtype("float32"), None, 16, mt.Precision, {}),
    ),
    "device_budget": Argument(
        ("minimum", "least", "auto", None, 2**30, np.int64(2**30), "1 GiB", "24g"),
        ("Least", *NO_BYTES),
    ),
    "host_budget": Argument((None, 2**36, np.int64(2**36), "64GiB", "70 GB"), ("least", *NO_BYTES)),
    "disk_dir": Argument(
        (None, "/tmp", [Path("/tmp"), "/var/tmp"]),
        ([], [3], {"/tmp"}, *(x for x in NO_PATHS if x != ["there"])),
    ),
    "disk_budget": Argument((None,), NO_BYTES),
    "trainable": Argument(
        (
            *(None, "layers", ["layers"], ("0", "w$"), lambda path: True, ..., True),
            *(nnx.PathContains("layers"), lambda path, value: True, ["0", nnx.PathContains("w")]),
        ),
        (
            *(
                "(",
                "[",
                "a**",
                "(?P<1>x)",
                "a{99999999999}",
                3,
                b"layers",
                [],
                [3],
                [None],
                ["w", "("],
            ),
            *(re.compile("layers"), lambda: True, lambda path, value, more: True, object()),
        ),
    ),
    "eval_loss_fn": Argument((None, loss_fn), tuple(x for x in NO_LOSSES if x is not None)),
    "on_nonfinite": Argument(
        ("raise", "skip"), ("", "Skip", "ignore", True, None, 0, b"skip", ["skip"], np.ones(2))
    ),
    "seed": Argument(
        (0, -1, 2**63 - 1, np.uint32(7)),
        ("a", 1.5, 2.0, float("nan"), True, None, 2**63, -(2**64), np.arange(2), *NOTHING_USEFUL),
    ),
    "ema_decay": Argument(
        (None, 0, 0.5, np.float32(0.999), lambda step: 0.9),
        (1, -0.1, 2.0, float("nan"), True, "0.9", [0.9], np.ones(2), lambda: 0.9, object()),
    ),
    "max_skipped": Argument(COUNTS, (*NO_COUNTS, None)),
    "mesh": Argument(
        (None, Mesh(jax.devices()[:1], "data")),
        (
            *(1, 4, "data", True, jax.devices(), np.array(jax.devices()), P("data"), Mesh, {}),
            *(Mesh(np.array([]), "data"), Mesh(jax.devices()[:1] * 2, "data")),
            *(AbstractMesh((), ()), AbstractMesh((0,), ("data",))),
        ),
    ),
    "state_per_process": Argument((False, True, np.bool_(False), "auto"), NO_FLAGS),
    "hardware": Argument(
        (None, mt.card("H200"), mt.card("RTX 4090"), "H100", "rtx-4090"),
        ("H1000", "", 3, True, mt.Hardware, mt.this_machine, {}, {"name": "mine"}),
    ),
}
MACHINE = {
    "host_gib": Argument(
        (None, 64, 0.5, np.float32(8), np.int64(2), "64", "64GiB", "70 GB"),
        (0, -1, True, float("nan"), float("inf"), 1j, [64], np.ones(2), "64 gigs", ""),
    ),
    "num_gpus": Argument((None, 1, np.int64(1), Index(1)), NO_COUNTS),
    "hosts": Argument((None,), NO_COUNTS),
    "disk": Argument((None,), ("fast", "7 read, 2 write", "1GB/s read", (1.0,), -1.0, 0, True)),
    "network": Argument(
        (None,), (0, -1, True, float("nan"), 1j, [64], "400", "400GB", "0Gb/s", "", "fast")
    ),
    "measure": Argument((False, np.bool_(False)), (*NO_FLAGS, True)),
}
START = {
    "params": Argument(
        (None, {"layers": [{"w": np.zeros((3, 3), np.float32)}] * 2}),
        (3, 1.5, True, b"there", "", "a\0b", object(), [1.0], {"w": "x"}, loss_fn, nested(10_000)),
    ),
    "progress": Argument((False, np.bool_(False)), NO_FLAGS),
}
LOOP = {
    "data": Argument((batches, lambda: [BATCH] * 8), NO_BATCHES),
    "steps": Argument((None, *COUNTS), NO_COUNTS),
    "epochs": Argument((None,), NO_COUNTS),
    "eval_data": Argument(
        ([BATCH], lambda: iter([BATCH]), (BATCH,)),
        (
            *(3, 1.5, True, "data", b"data", BATCH, iter([BATCH]), batches(), [], (), object()),
            *(np.array(1.0), np.ones((8, 4)), lambda path: [BATCH], Callback().one),
        ),
    ),
    "eval_every": Argument((None, *COUNTS), NO_COUNTS),
    "eval_params": Argument(("trained",), ("", "average", None, True, ["ema"])),
    "checkpoint_dir": Argument((), NO_PATHS),
    "checkpoint_every": Argument((None, *COUNTS), NO_COUNTS),
    "keep": Argument(COUNTS, (*NO_COUNTS, None)),
    "stall_seconds": Argument(
        (None, 0.5, 30, np.float32(2)),
        ("5", True, 0, -1.5, float("inf"), float("nan"), np.array([2.0]), *NOTHING_USEFUL),
    ),
    "callbacks": Argument(
        ((), [Callback()], (print, lambda trainer, record: None)),
        (
            *(
                Callback(),
                print,
                lambda trainer, record: None,
                None,
                3,
                True,
                "print",
                {"a": print},
            ),
            *([None], ["print"], [3], [lambda record: None], [Callback], [Callback().one], b"f"),
        ),
    ),
    "progress": Argument((False, np.bool_(False)), NO_FLAGS),
}
RESUME = {"resume": Argument((True, False), NO_FLAGS)}
CONTINUES = {"continues": Argument((None,), NO_PATHS)}
PARTS = {"model": MODEL, "loss_fn": LOSS, "optimizer": OPTIMIZER}
ENTRIES: dict[str, tuple[Callable[..., Any], dict[str, Argument]]] = {
    "fit": (mt.fit, PARTS | LOOP | RUN | START | RESUME),
    "Trainer": (mt.Trainer, PARTS | {"sample_batch": SAMPLE} | RUN | START | CONTINUES),
    "plan": (mt.plan, PARTS | {"sample_batch": SAMPLE} | RUN | MACHINE),
}


@functools.cache
def trainer() -> mt.Trainer:
    return mt.Trainer(build, loss_fn, optax.sgd(0.1), BATCH, progress=False)


@functools.cache
def result() -> mt.FitResult:
    return mt.FitResult(trainer=trainer(), history=mt.History(), ended="done", reason="all")


def entry_of(name: str) -> tuple[Callable[..., Any], dict[str, Argument]]:
    if name in ENTRIES:
        return ENTRIES[name]
    wrong = (result(), None, 3, "trainer", object(), mt.Trainer, loss_fn, mt.plan, {})
    return mt.train, {"trainer": Argument((trainer(),), wrong)} | LOOP | RESUME


def right_value(rng: random.Random, name: str, argument: Argument) -> Any:
    value = rng.choice(argument.right)
    # A generator is used up, so it is made anew.
    return value() if name == "data" else value


def right_arguments(rng: random.Random, arguments: dict[str, Argument], folder: Path) -> Any:
    """Values that go together, of all required arguments and of some others."""
    required = {*PARTS, "trainer", "data", "sample_batch", "progress"}
    chosen = [n for n in arguments if n in required or rng.random() < 0.4]
    folders = Argument((folder / "run", str(folder / "run")), ())
    if "eval_every" in chosen:
        chosen.append("eval_data")
    if {"checkpoint_every", "keep"} & set(chosen):
        chosen.append("checkpoint_dir")
    if "num_gpus" in chosen:
        chosen = [name for name in chosen if name != "mesh"]
    values = {
        name: right_value(rng, name, folders if name == "checkpoint_dir" else arguments[name])
        for name in chosen
    }
    # A host's memory is that of some machine.
    return values | ({"hardware": mt.card("H200")} if "host_gib" in chosen else {})


def named(error: BaseException, name: str) -> bool:
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None


def outcome(argument: str, function: Callable[..., Any], /, **options: Any) -> str | None:
    """The fault in how a misuse ends; None if there is none."""
    TRACED.clear()
    DRAWN.clear()
    try:
        function(**options)
    except (TypeError, ValueError, mt.CheckpointError) as error:
        if not named(error, argument):
            return f"{type(error).__name__} does not name it: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    else:
        return "passed"
    if TRACED or DRAWN:
        return f"after {TRACED} were traced and {len(DRAWN)} batches drawn"
    return None


def check_all(function: Callable[..., Any], right: dict[str, Any], wrong: dict[str, Any]) -> None:
    """Checks that every wrong value of each argument is named, the others being right."""
    bad = [
        f"{name}={reprlib.repr(value)}: {problem}"
        for name, values in wrong.items()
        for value in values
        if (problem := outcome(name, function, **(right | {name: value}))) is not None
    ]
    assert not bad, "\n".join(bad)


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, AttributeError)) as caught:
        call()
    return str(caught.value)


def all_public(*modules: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions and records, and their public methods, by name."""
    for module in modules:
        short = "" if module is mt else module.__name__.rpartition(".")[2] + "."
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) or "__init__" in getattr(value, "__dict__", ()):
                yield short + name, value
            if isinstance(value, type):
                for own, method in vars(value).items():
                    if inspect.isfunction(method) and not own.startswith("_"):
                        yield f"{short}{name}.{own}", method


def check_hints(*modules: Any) -> None:
    """Checks that every public function names the argument that a misspelt one means."""
    for name, function in all_public(*modules):
        shown = inspect.signature(function).parameters.values()
        named = [p.name for p in shown if p.kind is p.KEYWORD_ONLY]
        if not named or any(p.kind is p.VAR_KEYWORD for p in shown) or named[0][:1] == "_":
            continue
        said = error_of(lambda f=function, n=named[-1]: f(**{f"{n}z": 3}))
        assert tells(said, f"'{named[-1]}z'", f"`{named[-1]}`"), name
