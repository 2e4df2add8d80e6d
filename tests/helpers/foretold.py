"""Choices and estimates of small runs, and the table of those that are known.

    PYTHONPATH=.:tests/helpers python tests/helpers/foretold.py

makes the table, `foretold.json`, anew and prints what has changed. Results are right whatever a
search chooses, so no other test notices most of its errors. Models are made of few primitives, so
that no figure depends on the version of JAX.
"""

import functools
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

import megatrain_jax as mt
from megatrain_jax._src.common.remembering import remembering
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.program.flops import flops_by_kind
from megatrain_jax._src.engine.program.layers.blocks import Parameter, block_keys
from megatrain_jax._src.engine.report.plan import REST
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.least_time import least_seconds
from megatrain_jax._src.engine.schedule.schedule import BudgetError, Schedule
from megatrain_jax._src.engine.schedule.search import find_schedule
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.tile_search import TileFinder
from megatrain_jax._src.engine.spec.work import forward_work
from megatrain_jax._src.engine.state.placement import placed_on
from workloads import LISTS, random_workload

_TABLE = Path(__file__).with_suffix(".json")
TOLERANCE = 1e-6
GIB = 2**30
_OF_PROCESS = {"host_process_bytes", "host_fixed_bytes", f"host_parts {REST}"}
Figures = dict[str, float | str]
_Row = tuple[str, Callable[[], Figures]]
ADAM, CLIPPED = optax.adam(1e-3), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
_LION = optax.lion(1e-3)
MUON = optax.contrib.muon(1e-3)


def _of_schedule(schedule: Schedule) -> Figures:
    """Seconds and bytes of a schedule, and what it keeps and copies."""
    found: Figures = {
        name: getattr(schedule, name)
        for name in (
            *("seconds", "cautious_seconds", "peak_bytes", "smallest_bytes", "limit"),
            *("evaluation_bytes", "num_tasks", "left_out", "selective"),
        )
    }
    found |= {
        f"transient {f.name}": getattr(schedule.transient, f.name)
        for f in fields(schedule.transient)
    }
    found["kept"] = " ".join(map(str, sorted(schedule.kept)))
    found["resident"] = " ".join(sorted(f"{k.kind.name[0]}{k.owner}" for k in schedule.resident))
    for name in LISTS:
        ops = Counter(row.op for row in getattr(schedule, name))
        found[name] = " ".join(f"{ops[op]}" for op in Op)
        found[f"{name} bytes"] = sum(schedule.ledger[name])
    return found


def _of_plan(plan: mt.Plan) -> Figures:
    """All numbers of a plan."""
    found: Figures = {}
    for field in fields(mt.Plan):
        value = getattr(plan, field.name)
        if isinstance(value, int | float) or field.name == "update_mode":
            found[field.name] = value
    for name in (name for name, of in vars(mt.Plan).items() if isinstance(of, property)):
        if isinstance(value := getattr(plan, name), int | float | str):
            found[name] = value
    for name in "host_parts", "busy":
        for part, value in (getattr(plan, name) or {}).items():
            if isinstance(value, tuple):
                found[f"{name} {part}"] = value[1]
                found[f"{name} {part} bound"] = value[0]
            else:
                found[f"{name} {part}"] = value
    for n, row in enumerate(plan.groups):
        found[f"group {n}"] = f"{row.count} {row.num_parameters} {row.host_bytes} {row.template}"
    for n, row in enumerate(plan.tiles):
        found[f"tile {n}"] = f"{row.count} {row.what} {row.num_tiles} {row.num_rows}"
    found["warnings"] = len(plan.warnings)
    assert plan.workload is not None and plan.schedule is not None
    costs = plan.workload.costs
    for name in "forward", "backward", "recompute", "update":
        found[f"seconds of {name}"] = sum(getattr(costs, name))
    found["activations"] = sum(plan.workload.activations.values())
    found["num_activations"] = len(plan.workload.activations)
    found["residuals"] = sum(plan.workload.residuals)
    found |= _of_schedule(plan.schedule)
    if plan.hardware is None:  # what this process takes of this machine
        found = {k: v for k, v in found.items() if k not in _OF_PROCESS}
    return found


def _scheduled(seed: int, share: float, waves: int, room: float) -> Figures:
    workload = random_workload(seed)
    workload = replace(workload, accumulate=waves > 1 or workload.accumulate).in_waves(waves)
    least = find_schedule(workload, None).smallest_bytes
    budget = None if not share else round(share * least)
    try:
        schedule = find_schedule(workload, budget, None, room)
    except BudgetError as error:
        return {"refused": error.smallest}
    return _of_schedule(schedule) | {
        "least_seconds": least_seconds(workload, None, budget or least, room)
    }


def schedules() -> Iterator[_Row]:
    """Schedules of random workloads."""
    for seed in range(24):
        share, waves = (0, 1.3, 2, 4)[seed % 4], (1, 1, 3)[seed % 3]
        room = (math.inf, 40.0)[seed % 5 == 0]
        yield f"workload {seed}", functools.partial(_scheduled, seed, share, waves, room)


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def _mlp(layer: Any, x: jax.Array) -> jax.Array:
    return x + jax.lax.logistic(_normed(x) @ layer["up"]) @ layer["down"]


def _bounded(layer: Any, x: jax.Array) -> jax.Array:
    """Its second product takes far longer, for the bytes of its results, than its first."""
    return x + jax.lax.logistic(jax.lax.logistic(x @ layer["up"]) @ layer["down"])


def _attention(layer: Any, x: jax.Array) -> jax.Array:
    """One head, without a mask."""
    q, k, v = (x @ layer[name] for name in "qkv")
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return (
        x + jnp.einsum("bqk,bkd->bqd", weights / weights.sum(-1, keepdims=True), v) @ layer["out"]
    )


def _experts(layer: Any, x: jax.Array) -> jax.Array:
    """All experts on all rows."""
    weights = _normed(x @ layer["router"])
    hidden = jax.lax.logistic(jnp.einsum("rd,edf->ref", x, layer["experts"]["up"]))
    return x + jnp.einsum("ref,efd,re->rd", hidden, layer["experts"]["down"], weights)


def _chain(*blocks: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """A loss of layers, with an embedding before and a head behind if there are some."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        if "embed" in params:
            x = params["embed"][x]
        for layer in params["layers"]:
            for block in blocks:
                x = block(layer, x)
        if "head" in params:
            x = x @ params["head"]
        return (x.astype(jnp.float32) ** 2).mean()

    return loss_fn


def _scanned(params: Any, batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, layer: (_mlp(layer, x), None), batch["x"], params["layers"])
    return (x.astype(jnp.float32) ** 2).mean()


def _unet(params: Any, batch: Any) -> jax.Array:
    x, skipped = batch["x"], []
    half = len(params["layers"]) // 2
    for layer in params["layers"][:half]:
        skipped.append(x)
        x = _mlp(layer, x)
    for layer in params["layers"][half:]:
        x = _mlp(layer, x + skipped.pop())
    return (x.astype(jnp.float32) ** 2).mean()


def _layers(number: int, **shapes: tuple[int, ...]) -> Callable[[], Any]:
    made = lambda: {name: jnp.zeros(shape) for name, shape in shapes.items()}  # noqa: E731
    return lambda: {"layers": [made() for _ in range(number)]}


def _of_mlp(number: int, width: int, hidden: int | None = None) -> Callable[[], Any]:
    hidden = hidden or 4 * width
    return _layers(number, up=(width, hidden), down=(hidden, width))


def _stacked(number: int, width: int) -> Callable[[], Any]:
    return lambda: {
        "layers": {
            "up": jnp.zeros((number, width, 4 * width)),
            "down": jnp.zeros((number, 4 * width, width)),
        }
    }


def _of_attention(number: int, width: int, vocabulary: int) -> Callable[[], Any]:
    square = dict.fromkeys(("q", "k", "v", "out"), (width, width))
    layers = _layers(number, **square, up=(width, 4 * width), down=(4 * width, width))
    ends = {"embed": (vocabulary, width), "head": (width, vocabulary)}
    return lambda: layers() | {name: jnp.zeros(shape) for name, shape in ends.items()}


def _of_experts(number: int, width: int, experts: int) -> Callable[[], Any]:
    def build() -> Any:
        up, down = jnp.zeros((experts, width, width)), jnp.zeros((experts, width, width))
        layer = {"router": jnp.zeros((width, experts)), "experts": {"up": up, "down": down}}
        return {"layers": [layer for _ in range(number)]}

    return build


def _rows(number: int, width: int) -> Any:
    return {"x": jax.ShapeDtypeStruct((number, width), jnp.bfloat16)}


def _tokens(rows: int, length: int) -> Any:
    return {"x": jax.ShapeDtypeStruct((rows, length), jnp.int32)}


_MLP, _DECODER, _MIXTURE = _chain(_mlp), _chain(_attention, _mlp), _chain(_experts)
_WIDE = _of_mlp(8, 4096)


def plans() -> Iterator[_Row]:
    """Plans of toy models that each exercise a search."""

    def row(
        name: str, model: Any, loss_fn: Any, optimizer: Any, batch: Any, **options: Any
    ) -> _Row:
        return name, lambda: _of_plan(mt.plan(model, loss_fn, optimizer, batch, **options))

    small = replace(mt.card("RTX 4090"), device_bytes=6 * GIB)
    tiny = replace(mt.card("RTX 4090"), device_bytes=5 * GIB // 2)
    hopper: Any = {"hardware": "H100", "host_gib": 256}
    ada: Any = {"hardware": "RTX 4090", "host_gib": 64}
    little: Any = {"hardware": small, "host_gib": 64}
    yield row("all resident", _of_mlp(4, 1024), _MLP, ADAM, _rows(4096, 1024), **ada)
    yield row("no machine", _WIDE, _MLP, CLIPPED, _rows(4096, 4096), microbatches=2)
    yield row("streamed", _WIDE, _MLP, ADAM, _rows(4096, 4096), **little)
    yield row("minimum", _WIDE, _MLP, CLIPPED, _rows(4096, 4096), device_budget="minimum", **ada)
    yield row(
        "budget",
        _WIDE,
        _MLP,
        CLIPPED,
        _rows(16384, 4096),
        device_budget=4 * GIB,
        microbatches=4,
        **ada,
    )
    yield row("waves", _WIDE, _MLP, CLIPPED, _rows(65536, 4096), microbatches=16, **little)
    yield row(
        "microbatches",
        _of_mlp(4, 4096),
        _MLP,
        ADAM,
        _rows(32768, 4096),
        microbatches="auto",
        precision="compact",
        **little,
    )
    yield row("parts", _of_mlp(3, 8192), _MLP, ADAM, _rows(512, 8192), hardware=small, host_gib=128)
    yield row("tiles", _of_mlp(4, 2048, 16384), _MLP, ADAM, _rows(65536, 2048), **little)
    yield row(
        "tiles waves",
        _of_mlp(4, 2048, 16384),
        _MLP,
        CLIPPED,
        _rows(262144, 2048),
        microbatches=16,
        **little,
    )
    yield row("long", _of_attention(3, 2048, 8192), _DECODER, CLIPPED, _tokens(4, 8192), **little)
    yield row(
        "costliest",
        _of_mlp(8, 1024, 16384),
        _chain(_bounded),
        CLIPPED,
        _rows(32768, 1024),
        **little,
    )
    yield row(
        "decoder",
        _of_attention(3, 2048, 32768),
        _DECODER,
        CLIPPED,
        _tokens(8, 2048),
        precision="two_bytes",
        microbatches=2,
        **little,
    )
    yield row(
        "experts",
        _of_experts(2, 2048, 16),
        _MIXTURE,
        ADAM,
        _rows(512, 2048),
        hardware=tiny,
        host_gib=64,
    )
    yield row(
        "small host",
        _WIDE,
        _MLP,
        CLIPPED,
        _rows(65536, 4096),
        hardware=small,
        host_gib=20,
        microbatches=8,
    )
    yield row(
        "disk",
        _WIDE,
        _MLP,
        CLIPPED,
        _rows(16384, 4096),
        hardware=small,
        host_gib=12,
        disk="5GB/s read, 3GB/s write",
    )
    yield row(
        "float8",
        _WIDE,
        _MLP,
        ADAM,
        _rows(16384, 4096),
        precision=mt.Precision(products="float8"),
        device_budget="minimum",
        **hopper,
    )
    yield row(
        "float8 resident",
        _WIDE,
        _MLP,
        ADAM,
        _rows(16384, 4096),
        precision=mt.Precision(products="float8"),
        **hopper,
    )
    yield row(
        "frozen",
        _WIDE,
        _MLP,
        ADAM,
        _rows(8192, 4096),
        precision=mt.Precision(frozen="nf4"),
        trainable="down",
        **little,
    )
    yield row(
        "four devices",
        _WIDE,
        _MLP,
        CLIPPED,
        _rows(16384, 4096),
        num_gpus=4,
        **hopper | {"hardware": "L40S"},
    )
    yield row(
        "hosts",
        _WIDE,
        _MLP,
        ADAM,
        _rows(32768, 4096),
        num_gpus=2,
        hosts=2,
        network="400Gb/s",
        state_per_process="auto",
        **hopper,
    )
    yield row(
        "copies",
        _WIDE,
        _MLP,
        ADAM,
        _rows(32768, 4096),
        num_gpus=2,
        hosts=2,
        network="100Gb/s",
        state_per_process=True,
        microbatches=2,
        **ada,
    )
    yield row(
        "average",
        _stacked(8, 2048),
        _scanned,
        MUON,
        _rows(8192, 2048),
        ema_decay=0.99,
        on_nonfinite="skip",
        **little,
    )
    yield row(
        "unet",
        _of_mlp(8, 2048),
        _unet,
        _LION,
        _rows(32768, 2048),
        precision=mt.Precision(sums="bfloat16"),
        microbatches=4,
        **little,
    )


def _between(rng: random.Random, x: jax.Array) -> jax.Array:
    """What a model may compute between two blocks, wider or narrower than what it passes on."""
    kind = rng.choice(("norm", "wide", "float32", "pooled", "apart"))
    if kind == "norm":
        return _normed(x)
    if kind == "wide":
        both = jax.lax.logistic(jax.lax.concatenate([x, x * 2], 1))
        return jax.lax.slice_in_dim(both, 0, x.shape[1], axis=1) + x
    if kind == "float32":
        return jax.lax.logistic(x.astype(jnp.float32)).astype(x.dtype)
    if kind == "pooled":
        pooled = x.reshape(-1, 2, x.shape[1]).sum(1)
        return jax.lax.concatenate([pooled, pooled * 3], 0)
    return x * 2 - jax.lax.rev(x, (0,))


def _random_model(seed: int) -> tuple[Callable[[], Any], Callable[[Any, Any], jax.Array], Any]:
    """A model of equal and other layers, once or again, with something between some of them."""
    rng = random.Random(seed)
    width, kinds = 16 * rng.randint(1, 3), rng.choices((_mlp, _mlp, _bounded), k=rng.randint(2, 4))
    order = [*range(len(kinds))] * rng.choice((1, 1, 2))
    follows = [rng.randint(0, 2) for _ in order]
    counts = [rng.random() < 0.3 for _ in order]
    is_tied, is_scaled = rng.random() < 0.5, rng.random() < 0.3
    layer = {"up": jnp.zeros((width, 4 * width)), "down": jnp.zeros((4 * width, width))}
    params = {"layers": [layer for _ in kinds], "scale": jnp.zeros(width)}
    params |= {name: jnp.zeros((96, width)) for name in ("embed", "head")}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, total, drawn = params["embed"][batch["x"]], jnp.float32(0), random.Random(seed)
        for n, number, is_counted in zip(order, follows, counts, strict=True):
            x = kinds[n](params["layers"][n], x)
            total += x.astype(jnp.float32).sum() if is_counted else 0
            for _ in range(number):
                x = _between(drawn, x)
            x = x * params["scale"] if is_scaled else x
        logits = x @ params["embed" if is_tied else "head"].T
        return (logits.astype(jnp.float32) ** 2).mean() + total

    return (
        lambda: params,
        loss_fn,
        {"x": jax.ShapeDtypeStruct((4 * rng.randint(16, 64),), jnp.int32)},
    )


def _cut(seed: int) -> Figures:
    """The stages of a random model, and the bytes of its functions whole and in tiles."""
    build, loss_fn, batch = _random_model(seed)
    adapted, _ = adapt(build, loss_fn, batch, 0)
    step = make_run_spec(adapted, loss_fn, ADAM, batch, Options()).first
    found: Figures = {}
    templates: dict[Any, int] = {}
    for n, bound in enumerate(step.stages):
        stage = bound.stage
        passed = [
            sum(step.program.num_bytes(i, 1) for i in ids) for ids in (stage.inputs, stage.outputs)
        ]
        template = templates.setdefault(stage.key, len(templates))
        flops = flops_by_kind(stage.jaxpr).total
        residuals = bound.residuals.num_bytes if bound.residuals else 0
        found[f"stage {n}"] = f"{stage.leaves} {template} {passed} {flops} {residuals}"
    finder = TileFinder(KernelCache(platform="gpu"), placed_on(AbstractMesh((1,), ("data",))))
    found["functions"] = most = finder.most(step)
    divided = finder.within(step, (0.7, 0.3)[seed % 2] * most)
    found["functions in tiles"] = finder.most(divided)
    for n, bound in enumerate(divided.stages):
        for name, tiling in bound.tiles.items():
            found[f"stage {n} {name}"] = f"{tiling.num_tiles} {tiling.num_rows}"
    return found


def _other_batches(waves: int) -> Figures:
    """Schedules of a run's steps and evaluations on batches of other sizes."""
    build, loss_fn, batch = _of_mlp(4, 256), _MLP, _rows(1024, 256)
    adapted, _ = adapt(build, loss_fn, batch, 0)
    options = Options(microbatches=4, waves=waves, device_budget=24 * 2**20)
    spec = make_run_spec(adapted, loss_fn, CLIPPED, batch, options)
    found: Figures = {}
    for rows in 256, 1022, 1536:
        for train in (True, False) if rows % 4 == 0 else (False,):
            name = f"{rows} {'trained' if train else 'evaluated'}"
            try:
                step = spec.bound_step(_rows(rows, 256), train=train)
            except ValueError:
                found[name] = "refused"
                continue
            found |= {f"{name} {k}": v for k, v in _of_schedule(step.schedule).items()}
            found[f"{name} waves"] = f"{step.microbatches} {step.waves}"
    return found


def _in_float8(seed: int) -> Figures:
    """The operations of each stage in float8, where products of some sizes read the same data."""
    rng = random.Random(seed)
    width = rng.choice((1536, 2048, 3072))
    widths = [[rng.choice((512, 1024, 2048, 4096, 6144)) for _ in range(3)] for _ in range(2)]
    turns, is_wide, is_tied = rng.choice((0, 2)), rng.random() < 0.3, rng.random() < 0.5

    def build() -> Any:
        layers = [
            {"in": [jnp.zeros((width, n)) for n in of], "out": [jnp.zeros((n, width)) for n in of]}
            for of in widths
        ]
        return {"layers": layers, "first": jnp.zeros((width, width)), "last": jnp.zeros(width)}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ params["first"]
        for number, layer in enumerate(params["layers"]):

            def block(x: jax.Array, layer: Any = layer, number: int = number) -> jax.Array:
                read = [x, x.reshape(2, -1, width).reshape(-1, width), x * 2][: 3 - number]
                read = [read[n % len(read)] for n in range(3)]
                hidden = [a @ w for a, w in zip(read, layer["in"], strict=True)]
                hidden = [h.astype(jnp.float32) if is_wide else h for h in hidden]
                pairs = zip(hidden, layer["out"], strict=True)
                return x + sum(jax.lax.logistic(h).astype(x.dtype) @ w for h, w in pairs)

            x = (
                jax.lax.scan(lambda x, _: (block(x), None), x, length=turns)[0]
                if turns
                else block(x)
            )
        logits = x @ params["first"].T if is_tied else x * params["last"]
        return (logits.astype(jnp.float32) ** 2).mean()

    batch = {"x": jax.ShapeDtypeStruct((4096, width), jnp.bfloat16)}
    adapted, _ = adapt(build, loss_fn, batch, 0)
    options = Options(precision=mt.Precision(products="float8"))
    stages = [x.stage for x in make_run_spec(adapted, loss_fn, ADAM, batch, options).first.stages]
    works = enumerate(forward_work(stages))
    return {f"stage {n}": f"{work.flops:.7g} {work.float8:.7g}" for n, work in works}


def _blocks(seed: int) -> Figures:
    """The blocks of parameters in random lists of lists."""
    rng = random.Random(seed)
    found: list[Parameter] = []

    def add(path: tuple[str | int, ...], shape: tuple[int, ...], is_last: bool = True) -> None:
        before = (1 << len(found)) - 1 if is_last else rng.getrandbits(len(found) + 1) // 2
        upstream = None if rng.random() < 0.05 else before
        found.append(Parameter(path=path, shape=shape, upstream=upstream))

    def fill(path: tuple[str | int, ...], depth: int, kind: int) -> None:
        drawn = random.Random(f"{seed} {depth} {kind}")
        for n in range(drawn.randint(0 if depth else 1, 3)):
            add((*path, f"w{n}"), tuple(drawn.choices((1, 2, 8, 8, 16), k=drawn.randint(1, 2))))
        if depth == 3 or depth and drawn.random() < 0.4:
            return
        for stem in drawn.sample(("layers", "h", "norm", "mlp"), k=drawn.randint(1, 2)):
            form, first = drawn.choice(("/", "_", "")), drawn.choice((0, 0, 1, 2))
            serial = drawn.random() < 0.7
            for n in range(drawn.randint(1, 4)):
                inner = drawn.choice((0, 0, 0, n))
                number = (stem, n + first) if form == "/" else (f"{stem}{form}{n + first}",)
                number = (stem,) if first and not n else number
                if not serial:
                    add((*path, *number, "first"), (8, 8), is_last=False)
                fill((*path, *number), depth + 1, inner)
                for extra in range(rng.choice((0, 0, 2, 4))):
                    add((*path, *number, f"extra{extra}"), (8, 8))

    fill((), 0, 0)
    keys = [".".join(map(str, key)) if key else "-" for key in block_keys(found)]
    runs = [(key, len(list(same))) for key, same in itertools.groupby(keys)]
    return {"blocks": " ".join(f"{key}*{number}" for key, number in runs)}


def cuts() -> Iterator[_Row]:
    """Other batches; and blocks, stages, tiles and float8 products of random models."""
    for waves in 1, 2, 4:
        yield f"other batches in {waves} waves", functools.partial(_other_batches, waves)
    for make, name, number in (
        (_cut, "model", 6),
        (_in_float8, "products", 6),
        (_blocks, "lists", 40),
    ):
        for seed in range(number):
            yield f"{name} {seed}", functools.partial(make, seed)


ROWS = dict([*schedules(), *cuts(), *plans()])


def read(table: Path = _TABLE) -> dict[str, Figures]:
    """A table: for each run, its figures by name."""
    return json.loads(table.read_text())


def differing(figures: Mapping[str, float | str], known: Mapping[str, float | str]) -> list[str]:
    """The figures that aren't the known ones, in words."""
    return [
        f"{name}: {known.get(name)} is now {figures.get(name)}"
        for name in {**known, **figures}
        if not _is_near(figures.get(name), known.get(name))
    ]


def _is_near(one: float | str | None, other: float | str | None) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=TOLERANCE)
    return one == other


def renew(rows: Mapping[str, Callable[[], Figures]], table: Path = _TABLE) -> None:
    """Makes a table anew, and prints what has changed."""
    known = read(table) if table.exists() else {}
    lines = []
    for name, make in rows.items():
        with remembering():
            figures = make()
        lines.append(f"{json.dumps(name)}: {json.dumps(figures)}")
        if name not in known:
            print(f"{name} is new")
            continue
        for line in differing(figures, known[name]):
            print(f"{name}: {line}")
    table.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    renew(ROWS)
