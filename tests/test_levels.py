"""Models whose layers lie in nested lists are cut into these layers, at their real sizes.

Everything here is on shapes: nothing is allocated or compiled.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import nested
from megatrain_jax.adapters import adapt
from megatrain_jax.program.blocks import Leaf
from megatrain_jax.program.levels import Parameter, block_keys
from megatrain_jax.program.stages import Program
from megatrain_jax.program.trace import TracedLoss, cut_loss, leaves_of, trace_loss

TOKENS = {"tokens": np.zeros((2, 16), np.int32)}


def find(
    model: Any, loss_fn: Callable[..., Any], batch: Any
) -> tuple[TracedLoss, tuple[Leaf, ...]]:
    """The leaves of a model, with the blocks that they belong to."""
    adapted, _ = adapt(model, loss_fn, batch, 0)

    def loss(parameters, variables, batch, rng):
        return adapted.loss(loss_fn, parameters, variables, batch, rng, True)

    half = [jax.ShapeDtypeStruct(s.shape, jnp.bfloat16) for s in adapted.shapes]
    traced = trace_loss(loss, half, adapted.variable_shapes, batch)
    return traced, leaves_of(traced, adapted.paths, adapted.shapes, [True] * len(adapted.paths))


def cut(model: Any, loss_fn: Callable[..., Any], batch: Any) -> tuple[Program, dict[str, int]]:
    """The stages of a model, and the number of parameters each of them reads."""
    traced, leaves = find(model, loss_fn, batch)
    program = cut_loss(traced, leaves)
    read = {s.name: sum(math.prod(leaves[i].shape) for i in s.leaves) for s in program.stages}
    assert len(read) == len(program.stages)
    return program, read


def as_model(shapes: Any, forward: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """A tree of shapes and a loss for what its `forward` gives."""

    def loss_fn(params, batch):
        return jnp.mean(jnp.square(forward(params, batch).astype(jnp.float32)))

    return lambda: nested.zeros(shapes), loss_fn


def cut_tree(shapes: Any, forward: Callable[..., Any], batch: Any = TOKENS):
    return cut(*as_model(shapes, forward), batch)


def sizes(shapes: Any, forward: Callable[..., Any]) -> dict[str, int]:
    """Every block of a tree of shapes with its number of parameters, in order of name."""
    _, leaves = find(*as_model(shapes, forward), TOKENS)
    found: dict[str, int] = {}
    for leaf in leaves:
        if leaf.block:
            name = ".".join(map(str, leaf.block))
            found[name] = found.get(name, 0) + math.prod(leaf.shape)
    return dict(sorted(found.items()))


def blocks(program: Program) -> list[str]:
    return [stage.name for stage in program.stages if stage.is_block]


def names(template: str, *numbers: int) -> list[str]:
    """`names("a.{}.b.{}", 3, 1)`: the names for `b` 0 to 2 of `a` 0 and for `b` 0 of `a` 1."""
    return [template.format(i, j) for i, n in enumerate(numbers) for j in range(n)]


def run_all(layers, x):
    for p in layers:
        x = nested.run_layer(p, x)
    return x


def test_a_block_is_everything_under_the_first_component_with_indexed_siblings():
    paths = [
        ("embed",),
        ("layers", 0, "mlp", "Dense_0"),
        ("layers", 0, "mlp", "Dense_1"),
        ("layers", 1, "mlp", "Dense_0"),
        ("encoderblock_0", "w"),
        ("encoderblock_3", "w"),
        ("only", 0, "h", "1", "w"),
        ("only", 0, "h", "2", "w"),
        ("norm1",),
        ("norm2",),
    ]
    assert block_keys([Parameter(path=path, shape=(3, 3)) for path in paths]) == [
        None, ("layers", 0), ("layers", 0), ("layers", 1), ("encoderblock_0",),
        ("encoderblock_3",), ("only", 0, "h", "1"), ("only", 0, "h", "2"), None, None,
    ]  # fmt: skip


# Whole models


def test_a_convnext_is_cut_into_its_layers():
    depths, dims = [3, 3, 27, 3], [192, 384, 768, 1536]
    shapes = nested.convnext(depths, dims)
    assert 197e6 < nested.count(shapes) < 199e6
    program, read = cut(lambda: nested.zeros(shapes), nested.convnext_loss, nested.image_batch(64))
    assert blocks(program) == names("stages.{}.layers.{}", *depths)
    assert max(read.values()) == nested.count(shapes["stages"][3]["layers"][0])
    assert sum(read.values()) == nested.count(shapes)
    assert not program.warnings


def test_an_autoencoder_is_cut_into_its_resnets():
    shapes = nested.vae([128, 256, 512, 512])
    assert 83e6 < nested.count(shapes) < 84e6
    program, read = cut(lambda: nested.zeros(shapes), nested.vae_loss, nested.image_batch(64))
    assert sum("resnets" in name for name in blocks(program)) == len(blocks(program)) == 8 + 12 + 4
    assert max(read.values()) == nested.count(nested.resnet(512, 512))
    assert not program.warnings


class LinenConvNeXtBlock(linen.Module):
    dim: int

    @linen.compact
    def __call__(self, x):
        y = linen.Conv(self.dim, (7, 7), feature_group_count=self.dim)(x)
        y = linen.Dense(self.dim)(linen.gelu(linen.Dense(4 * self.dim)(linen.LayerNorm()(y))))
        return x + y * self.param("gamma", linen.initializers.ones, (self.dim,))


class LinenStage(linen.Module):
    dim: int
    depth: int

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(self.dim, (2, 2), (2, 2), name="downsample")(x)
        for j in range(self.depth):
            x = LinenConvNeXtBlock(self.dim, name=f"layers_{j}")(x)
        return x


class LinenConvNeXt(linen.Module):
    depths: tuple[int, ...]
    dims: tuple[int, ...]
    flat: bool = False

    @linen.compact
    def __call__(self, x):
        for k, (depth, dim) in enumerate(zip(self.depths, self.dims, strict=True)):
            if not self.flat:
                x = LinenStage(dim, depth, name=f"stages_{k}")(x)
                continue
            x = linen.LayerNorm()(linen.Conv(dim, (2, 2), (2, 2))(x))
            for _ in range(depth):
                x = LinenConvNeXtBlock(dim)(x)
        return linen.Dense(1000)(x.mean((1, 2)))


@pytest.mark.parametrize("flat", [False, True])
def test_a_linen_convnext_is_cut_into_its_layers(flat):
    model = LinenConvNeXt((2, 2, 4, 2), (128, 256, 512, 1024), flat)

    def loss_fn(model, batch):
        return jnp.mean(model(batch["image"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    program, read = cut(model, loss_fn, nested.image_batch(64))
    found = [name for name in blocks(program) if "Conv_" not in name and "LayerNorm_" not in name]
    layers = [f"LinenConvNeXtBlock_{k}" for k in range(10)]
    assert found == (layers if flat else names("stages_{}.layers_{}", 2, 2, 4, 2))
    assert max(read.values()) == read[found[-1]] < 9e6
    assert not program.warnings


class Layer(nnx.Module):
    def __init__(self, dim, rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(dim, rngs=rngs) for _ in range(2))
        self.qkv = nnx.Linear(dim, 3 * dim, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.mlp = nnx.List(
            [nnx.Linear(dim, 4 * dim, rngs=rngs), jax.nn.gelu, nnx.Linear(4 * dim, dim, rngs=rngs)]
        )

    def __call__(self, x):
        split = jnp.split(self.qkv(self.norm1(x)), 3, -1)
        q, k, v = (t.reshape(*t.shape[:-1], -1, 64) for t in split)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))
        y = self.norm2(x)
        for operation in self.mlp:
            y = operation(y)
        return x + y


class Body(nnx.Module):
    def __init__(self, dim, depth, rngs):
        self.layers = nnx.List([Layer(dim, rngs) for _ in range(depth)])

    def __call__(self, x):
        for part in self.layers:
            x = part(x)
        return x


class Tower(Body):
    def __init__(self, stem, dim, depth, rngs):
        super().__init__(dim, depth, rngs)
        self.stem, self.norm = stem, nnx.LayerNorm(dim, rngs=rngs)
        self.projection = nnx.Linear(dim, 512, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        x = super().__call__(x.reshape(x.shape[0], -1, x.shape[-1]))
        return self.projection(self.norm(x).mean(1))


def build_clip():
    rngs = nnx.Rngs(0)
    return nnx.List([
        Tower(nnx.Conv(3, 768, (32, 32), (32, 32), rngs=rngs), 768, 6, rngs),
        Tower(nnx.Embed(49408, 512, dtype=jnp.bfloat16, rngs=rngs), 512, 6, rngs),
    ])  # fmt: skip


def test_two_towers_in_a_list_are_cut_into_their_layers():
    def loss_fn(model, batch):
        image, text = model[0](batch["image"].astype(jnp.bfloat16)), model[1](batch["tokens"])
        return -jnp.mean(jax.nn.log_softmax((image @ text.T).astype(jnp.float32)))

    program, read = cut(build_clip, loss_fn, TOKENS | nested.image_batch(64))
    assert blocks(program) == names("{}.layers.{}", 6, 6)
    assert sorted(read.values())[-2:] == [7_084_800, read["between 7"]]
    assert 49408 * 512 < read["between 7"] < 49408 * 512 + 4e5
    assert len({stage.key for stage in program.stages}) < 10
    assert not program.warnings


def test_a_body_in_a_sequential_is_cut_into_its_layers():
    def build():
        rngs = nnx.Rngs(0)
        embed = nnx.Embed(1000, 256, dtype=jnp.bfloat16, rngs=rngs)
        return nnx.Sequential(embed, Body(256, 6, rngs), nnx.Linear(256, 1000, rngs=rngs))

    def loss_fn(model, batch):
        return jnp.mean(model(batch["tokens"]).astype(jnp.float32) ** 2)

    program, _ = cut(build, loss_fn, TOKENS)
    layers = [f"layers.1.layers.{k}" for k in range(6)]
    assert blocks(program) == ["layers.0", *layers, "layers.2"]


def decoder_layer(dim: int) -> Any:
    return nested.layer(dim) | {"norm3": (dim,), "cross": nested.attention(dim)}


def run_decoder_layer(p, x, memory):
    x = nested.run_layer(p, x)
    return x + nested.attend(p["cross"], nested.norm(p["norm3"], x), memory)


def test_an_encoder_and_a_decoder_in_a_list_are_cut_into_their_layers():
    dim, depth = 512, 6
    shapes = {
        "embed": (32128, dim),
        "parts": [
            {"block": [nested.layer(dim) for _ in range(depth)], "norm": (dim,)},
            {"block": [decoder_layer(dim) for _ in range(depth)], "norm": (dim,)},
        ],
    }

    def forward(p, batch):
        encoder, decoder = p["parts"]
        x = p["embed"][batch["tokens"]]
        memory = nested.norm(encoder["norm"], run_all(encoder["block"], x))
        for q in decoder["block"]:
            x = run_decoder_layer(q, x, memory)
        return nested.norm(decoder["norm"], x) @ p["embed"].T

    program, read = cut_tree(shapes, forward)
    assert blocks(program) == names("parts.{}.block.{}", depth, depth)
    assert max(n for name, n in read.items() if "parts" in name) == nested.count(decoder_layer(dim))
    assert read["between 7"] == dim  # the encoder's last norm
    assert not program.warnings


def unet(dims: list[int], depth: int) -> Any:
    """Down blocks with transformers of some depth, a middle, up blocks that take skips."""

    def transformer(d):
        return {"proj_in": (d, d), "transformer_blocks": [nested.layer(d) for _ in range(depth)]}

    down, up, skips, before = [], [], [dims[0]], dims[0]
    for d in dims:
        rows = [nested.resnet(before, d), nested.resnet(d, d)]
        down.append({"resnets": rows, "attentions": [transformer(d) for _ in rows]})
        skips, before = [*skips, d, d], d
    for d in dims[::-1]:
        rows = []
        for _ in range(2):
            rows.append(nested.resnet(before + skips.pop(), d))
            before = d
        up.append({"resnets": rows, "attentions": [transformer(d) for _ in rows]})
    return {"conv_in": (3, 3, 3, dims[0]), "down_blocks": down, "mid": nested.mid(dims[-1]),
            "up_blocks": up, "conv_out": (3, 3, dims[0], 3)}  # fmt: skip


def run_transformer(p, x):
    y = x.reshape(x.shape[0], -1, x.shape[-1]) @ p["proj_in"]
    return x + run_all(p["transformer_blocks"], y).reshape(x.shape)


def unet_forward(p, batch):
    x = nested.conv(p["conv_in"], batch["image"].astype(jnp.bfloat16))
    skips = []
    for block in p["down_blocks"]:
        for resnet, transformer in zip(block["resnets"], block["attentions"], strict=True):
            x = run_transformer(transformer, nested.run_resnet(resnet, x))
            skips.append(x)
        x = x[:, ::2, ::2]
    x = nested.run_mid(p["mid"], x)
    for block in p["up_blocks"]:
        x = x.repeat(2, 1).repeat(2, 2)
        for resnet, transformer in zip(block["resnets"], block["attentions"], strict=True):
            x = nested.run_resnet(resnet, jnp.concatenate([x, skips.pop()], -1))
            x = run_transformer(transformer, x)
    return nested.conv(p["conv_out"], x)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_unet_is_cut_into_resnets_and_transformers(depth):
    shapes = unet([320, 640, 1280], depth)
    program, read = cut_tree(shapes, unet_forward, nested.image_batch(16))
    largest = nested.count(nested.resnet(2560, 1280))
    assert max(read.values()) == largest
    assert sum("transformer_blocks" in name for name in read) == (12 * depth if depth > 1 else 0)
    assert not program.warnings


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
              "the stage head holds 3.0 MiB of the model's 4.5 MiB of fp32 parameters, because its "
              "like parts body.layer1, body.layer2, body.layer3, … have no numbers as the elements "
              "of a list have: put them into a list (`layers/3`), or call them by number "
              "(`layer_1`), and each becomes a stage"),
    "others": ([{"layers": FOUR, "others": {c: (D, D) for c in "abcdefghijklmnopqr"}}, FOUR[0]],
               lambda p, x: nested.run_layer(p[1], layers_beside_others(p[0], x)),
               "because its like parts body.0.layers.0, body.0.layers.1, body.0.layers.2, … hold "
               "less than three quarters of what is around them: move them into a list"),
    "loop": ([{"layers": FOUR}, FOUR[0]],
             lambda p, x: nested.run_layer(p[1], layers_in_a_loop(p[0], x)),
             "body.0.layers.2, … are read together by one operation (while): call them one after "
             "another outside of it, and each becomes a stage"),
    "experts": ([{"router": (D, 8), "experts": [nested.mlp(D)] * 8}] * 2,
                lambda p, x: experts(p[1], experts(p[0], x)), None),
    "convs": ([{"convs": [KERNEL] * 3}] * 3,
              lambda p, x: convs(p[2], convs(p[1], convs(p[0], x))), None),
}  # fmt: skip


@pytest.mark.parametrize("kind", LARGE)
def test_a_stage_that_stays_large_is_explained(kind):
    body, run, said = LARGE[kind]
    shapes = {"embed": (50, D), "blocks": [nested.layer(D)] * 2, "body": body}

    def forward(p, batch):
        return run(p["body"], run_all(p["blocks"], p["embed"][batch["tokens"]]))

    program, _ = cut_tree(shapes, forward)
    assert [said in warning for warning in program.warnings] == ([True] if said else [])


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
