"""Which lists inside a block stay whole, which stacks and nestings are opened, and what is said.

Everything here is on shapes: nothing is allocated or compiled.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nested
from cuts import blocks, cut_tree, names, run_all, sizes
from messages import tells

# What stays together


def experts(p, x):
    gates = jax.nn.softmax(x @ p["router"])
    out = jnp.zeros_like(x)
    for k, expert in enumerate(p["experts"]):
        out = out + gates[..., k : k + 1] * nested.run_mlp(expert, x)
    return x + out


def heads(p, x):
    parts = []
    for head in p["heads"]:
        scores = jax.nn.softmax((x @ head["q"]) @ (x @ head["k"]).swapaxes(-1, -2))
        parts.append(scores @ (x @ head["v"]))
    return x + jnp.concatenate(parts, -1) @ p["out"]


def convs(p, x):
    y = x.reshape(x.shape[0], 4, 4, -1)
    for kernel in p["convs"]:
        y = nested.conv(kernel["kernel"], jax.nn.relu(y))
    return x + y.reshape(x.shape)


def two_attentions(p, x):
    for attention in p["attentions"]:
        x = x + nested.attend(attention, x)
    return x + nested.run_mlp(p["mlp"], x)


def sublayers(p, x):
    x = x + nested.attend(p["layer"][0], nested.norm(p["layer"][0]["norm"], x))
    return x + nested.run_mlp(p["layer"][1], nested.norm(p["layer"][1]["norm"], x))


def deep_mlps(p, x):
    for part in ("edges", "nodes"):
        y = x
        for w in p[part]["layers"]:
            y = jax.nn.silu(y @ w["kernel"])
        x = x + y
    return x


def conformer(p, x):
    x = x + nested.run_mlp(p["feed_forward"][0], x)
    x = x + nested.attend(p["attention"], x)
    x = x + jax.nn.glu(x @ p["conv"]["in"]) @ p["conv"]["out"]
    return x + nested.run_mlp(p["feed_forward"][1], x)


def adapted(p, x):
    y = x
    for w in p["mlp"]:
        y = jnp.tanh(y @ w["kernel"] + y @ w["a"] @ w["b"])
    return x + y


D = 128
KERNEL = {"kernel": (3, 3, D, D)}
BLOCKS = {
    "experts": ({"router": (D, 8), "experts": [nested.mlp(D)] * 8}, experts),
    "heads": ({"heads": [dict.fromkeys("qkv", (D, 16))] * 8, "out": (D, D)}, heads),
    "convs": ({"convs": [KERNEL, KERNEL]}, convs),
    "attentions": ({"attentions": [nested.attention(D)] * 2, "mlp": nested.mlp(D)}, two_attentions),
    "sublayers": ({"layer": [{"norm": (D,), **nested.attention(D)},
                             {"norm": (D,), **nested.mlp(D)}]}, sublayers),
    "mlps": (dict.fromkeys(("edges", "nodes"), {"layers": [{"kernel": (D, D)}] * 3}), deep_mlps),
    "conformer": ({"feed_forward": [nested.mlp(D)] * 2, "attention": nested.attention(D),
                   "conv": {"in": (D, 2 * D), "out": (D, D)}}, conformer),
    "adapters": ({"mlp": [{"kernel": (D, D), "a": (D, 2), "b": (2, D)}] * 2}, adapted),
}  # fmt: skip


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_with_a_list_inside_stays_whole(kind, penalty):
    block, run = BLOCKS[kind]
    shapes = {"embed": (50, D), "blocks": [block] * 4, "head": (D, 50)}

    def forward(p, batch):
        x = p["embed"][batch["tokens"]]
        for q in p["blocks"]:
            x = run(q, x)
        out = x @ p["head"]
        # What adds up all parameters orders none of them.
        return out + sum(jnp.sum(w * w) for w in jax.tree.leaves(p)) if penalty else out

    assert list(sizes(shapes, forward)) == [f"blocks.{k}" for k in range(4)]


# Stacks


def stacked(shapes: Any, n: int) -> Any:
    return jax.tree.map(lambda s: (n, *s), shapes, is_leaf=nested.is_shape)


def scan(run, stack, x):
    return lax.scan(lambda x, p: (run(p, x), None), x, stack)[0]


def test_stacks_in_a_list_of_towers_are_cut_into_their_layers():
    dims = (256, 128)
    shapes = [{"embed": (99, d), "layers": stacked(nested.layer(d), 5), "norm": (d,)} for d in dims]

    def forward(p, batch):
        out = []
        for tower in p:
            x = scan(nested.run_layer, tower["layers"], tower["embed"][batch["tokens"]])
            out.append(nested.norm(tower["norm"], x))
        return out[0].mean() * out[1]

    assert list(sizes(shapes, forward)) == names("{}.layers.{}", 5, 5)


def test_a_scan_over_groups_is_cut_into_the_layers_of_each_group():
    group: Any = {"bridge": (D, D), **{f"layers_{j}": nested.layer(D) for j in range(3)}}
    shapes = {"embed": (99, D), "groups": stacked(group, 4)}

    def run_group(p, x):
        return run_all([p[f"layers_{j}"] for j in range(3)], x @ p["bridge"])

    def forward(p, batch):
        return scan(run_group, p["groups"], p["embed"][batch["tokens"]])

    program, read = cut_tree(shapes, forward)
    assert blocks(program) == [f"groups.{k}.layers_{j}" for k in range(4) for j in range(3)]
    assert sum(n == D * D for n in read.values()) == 3  # and the first one beside the embedding
    assert sum(read.values()) == nested.count(shapes)


def test_a_scan_over_the_experts_of_a_block_stays_in_its_block():
    block = {"attention": nested.attention(D), "experts": stacked(nested.mlp(D), 8)}
    shapes = {"embed": (99, D), "blocks": [block] * 3}

    def forward(p, batch):
        x = p["embed"][batch["tokens"]]
        for q in p["blocks"]:
            x = x + nested.attend(q["attention"], x)
            y = x
            x = lax.scan(lambda s, e, y=y: (s + nested.run_mlp(e, y), None), x, q["experts"])[0]
        return x

    assert list(sizes(shapes, forward)) == [f"blocks.{k}" for k in range(3)]


# What is said of stages that stay large


def layers_by_name(p, x):
    return run_all([p[name] for name in sorted(p)], x)


def layers_beside_others(p, x):
    for w in p["others"].values():
        x = x + jnp.tanh(x @ w)
    return run_all(p["layers"], x)


def layers_in_a_loop(p, x):
    fixed = lax.stop_gradient(p["layers"])
    return x + lax.while_loop(lambda y: y.sum() > 0, lambda y: run_all(fixed, y), x)


FOUR = [nested.layer(D)] * 4
LARGE = {
    "names": ({f"layer{c}": nested.layer(D) for c in "1234"}, layers_by_name,
              "head, 3.00 MiB, 4.53 MiB, body.layer1, body.layer2, body.layer3, numbers, "
              "`layers/3`, `layer_1`"),
    "others": ([{"layers": FOUR, "others": {c: (D, D) for c in "abcdefghijklmnopqr"}}, FOUR[0]],
               lambda p, x: nested.run_layer(p[1], layers_beside_others(p[0], x)),
               "body.0.layers.0, body.0.layers.1, body.0.layers.2, three quarters, list"),
    "loop": ([{"layers": FOUR}, FOUR[0]],
             lambda p, x: nested.run_layer(p[1], layers_in_a_loop(p[0], x)),
             "body.0.layers.2, (while), loop, sequence"),
    "experts": ([{"router": (D, 8), "experts": [nested.mlp(D)] * 8}] * 2,
                lambda p, x: experts(p[1], experts(p[0], x)), None),
    "convs": ([{"convs": [KERNEL] * 3}] * 3,
              lambda p, x: convs(p[2], convs(p[1], convs(p[0], x))), None),
}  # fmt: skip


@pytest.mark.by_default("names", "experts", "convs")
@pytest.mark.parametrize("kind", LARGE)
def test_a_stage_that_stays_large_is_explained(kind):
    body, run, said = LARGE[kind]
    shapes = {"embed": (50, D), "blocks": [nested.layer(D)] * 2, "body": body}

    def forward(p, batch):
        return run(p["body"], run_all(p["blocks"], p["embed"][batch["tokens"]]))

    program, _ = cut_tree(shapes, forward)
    assert len(program.warnings) == bool(said)
    assert all(tells(warning, *said.split(", ")) for warning in program.warnings)


def test_alternating_parts_without_numbers_are_explained_in_a_model_without_blocks():
    names = [f"{kind}{k}" for k in range(4) for kind in ("attn", "mlp")]
    size = 1024
    kinds = {
        "attn": {"q": (size, size), "o": (size, size)},
        "mlp": {"up": (size, size), "down": (size, size)},
    }

    def warnings(names):
        def forward(p, batch):
            x = batch["x"].astype(jnp.bfloat16)
            for name in names:
                first, second = p[name].keys()
                x = x + jnp.tanh(x @ p[name][second]) @ p[name][first]
            return x

        shapes = {name: kinds[name[:-1]] for name in names}
        batch = {"x": np.zeros((2, size), np.float32)}
        return nested.count(shapes), cut_tree(shapes, forward, batch)[0].warnings

    count, (warning,) = warnings(names)
    assert count == 2**24 and "attn0" in warning and "numbers" in warning
    # A smaller model fits any device as a whole.
    count, found = warnings(names[:4])
    assert count < 2**24 and not found


def recurrence(p, batch, cells):
    """Cells with four gates each, in one loop over time or in one loop for each cell."""

    def cell(p, state, x):
        h, c = state
        gates = {name: h @ w["h"] + x @ w["x"] for name, w in p.items()}
        c = c * jax.nn.sigmoid(gates["forget"]) + jnp.tanh(gates["cell"]) * gates["in"]
        return jax.nn.sigmoid(gates["out"]) * jnp.tanh(c), c

    x = batch["x"].astype(jnp.bfloat16)
    zero = x[0], x[0]
    for group in cells:

        def step(states, x, group=group):
            new = []
            for k, state in zip(group, states, strict=True):
                new.append(cell(p["cells"][k], state, x))
                x = new[-1][0]
            return new, x

        x = lax.scan(step, [zero] * len(group), x)[1]
    return x


GATES = {name: {"x": (D, D), "h": (D, D)} for name in ("cell", "forget", "in", "out")}
SEQUENCE = {"x": np.zeros((5, 2, D), np.float32)}


def test_layers_of_a_recurrence_in_one_loop_are_told_to_have_their_own():
    shapes = {"cells": [GATES] * 5}
    together = cut_tree(shapes, lambda p, b: recurrence(p, b, [range(5)]), SEQUENCE)[0]
    (warning,) = together.warnings
    assert tells(warning, "cells.0 + cells.1", "loop")
    # As it says, with few layers, too, each of which is a large part of the model.
    for number in (2, 3, 5):
        alone = [[k] for k in range(number)]
        apart, read = cut_tree(
            {"cells": [GATES] * number}, lambda p, b, at=alone: recurrence(p, b, at), SEQUENCE
        )
        assert blocks(apart) == [f"cells.{k}" for k in range(number)] and not apart.warnings
        assert set(read.values()) == {nested.count(GATES)}


def stacked_in_time(read):
    """A recurrence with stacked layers, each of them computed in every pass over time."""

    def forward(p, batch):
        def step(states, x):
            return read(p["w"], states, x)

        x = batch["x"].astype(jnp.bfloat16)
        zeros = jnp.zeros((p["w"].shape[0], *x.shape[1:]), x.dtype)
        return lax.scan(step, zeros, x)[1]

    return forward


def scanned(w, states, x):
    def layer(x, of_layer):
        x = jnp.tanh(x @ of_layer[0] + of_layer[1])
        return x, x

    x, states = lax.scan(layer, x, (w, states))
    return states, x


def one_by_one(w, states, x):
    rows = []
    for k in range(len(states)):
        x = jnp.tanh(x @ w[k] + states[k])
        rows.append(x)
    return jnp.stack(rows), x


STACKED_IN_TIME = {
    "scanned": scanned,
    "one by one": one_by_one,
    "in a call": lambda *given: jax.jit(jax.checkpoint(scanned))(*given),
}


@pytest.mark.parametrize("kind", STACKED_IN_TIME)
def test_stacked_layers_in_a_loop_over_time_are_told_to_have_their_own(kind):
    shapes, batch = {"w": (5, 2000, 2000)}, {"x": np.zeros((3, 2, 2000), np.float32)}
    program, _ = cut_tree(shapes, stacked_in_time(STACKED_IN_TIME[kind]), batch)
    (warning,) = program.warnings
    assert tells(warning, "w", "loop")

    def apart(p, batch):
        def layer(x, w):
            def cell(h, x):
                return (new := jnp.tanh(x @ w + h)), new

            return lax.scan(cell, x[0], x)[1], None

        return lax.scan(layer, batch["x"].astype(jnp.bfloat16), p["w"])[0]

    program, _ = cut_tree(shapes, apart, batch)
    assert len(blocks(program)) == 5 and not program.warnings


def test_gates_of_a_recurrence_are_not_told_to_run_one_after_another():
    large = {name: {"x": (1500, 1500), "h": (1500, 1500)} for name in GATES}
    batch = {"x": np.zeros((5, 2, 1500), np.float32)}
    program, _ = cut_tree({"cells": {"a": large}}, lambda p, b: recurrence(p, b, ["a"]), batch)
    (warning,) = program.warnings
    assert "cells.a.forget" in warning and "after another" not in warning
    assert tells(warning, "gates", "together")


# Any nesting

KINDS = {
    "layer": (nested.layer, nested.run_layer),
    "mlp": (nested.mlp, lambda p, x: x + nested.run_mlp(p, x)),
    "experts": (lambda d: {"router": (d, 4), "experts": [nested.mlp(d)] * 4}, experts),
    "convs": (lambda d: {"convs": [{"kernel": (3, 3, d, d)}] * 2}, convs),
}


def random_tree(rng: np.random.Generator, depth: int, path: str, layers: list[str], kind: str):
    """A list of lists of ... of layers of one kind, whose names it adds to `layers`."""
    if depth == 0:
        layers.append(path)
        return KINDS[kind][0](D)
    form = rng.choice(["list", "dict", "numbered"])
    key = "{}.part_{}" if form == "numbered" else "{}.parts.{}"
    rows = [random_tree(rng, depth - 1, key.format(path, k), layers, kind)
            for k in range(rng.integers(2, 5))]  # fmt: skip
    if form == "numbered":
        node: dict[str, Any] = {f"part_{k}": row for k, row in enumerate(rows)}
    else:
        node = {"parts": rows if form == "list" else {str(k): r for k, r in enumerate(rows)}}
    if rng.random() < 0.5:
        node["before"] = (D, D)
    if rng.random() < 0.5:
        node["after"] = (D,)
    return node


def run_tree(node, depth, kind, x):
    if depth == 0:
        return KINDS[kind][1](node, x)
    x = x @ node["before"] if "before" in node else x
    parts = node.get("parts", {k: v for k, v in node.items() if k.startswith("part_")})
    for part in parts.values() if isinstance(parts, dict) else parts:
        x = run_tree(part, depth - 1, kind, x)
    return nested.norm(node["after"], x) if "after" in node else x


@pytest.mark.by_default(*map(str, range(8)))
@pytest.mark.parametrize("seed", range(16))
def test_random_nestings_are_cut_into_their_layers(seed):
    rng = np.random.default_rng(seed)
    depth, kind = int(rng.integers(1, 4)), str(rng.choice(list(KINDS)))
    layers: list[str] = []
    tree = random_tree(rng, depth, "body", layers, kind)
    shapes = {"embed": (50, D), "body": tree, "head": (D, 50)}

    def forward(p, batch):
        return run_tree(p["body"], depth, kind, p["embed"][batch["tokens"]]) @ p["head"]

    layer = nested.count(KINDS[kind][0](D))
    assert sizes(shapes, forward) == dict.fromkeys(sorted(layers), layer)
