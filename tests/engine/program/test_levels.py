"""Models whose layers lie in nested lists are cut into these layers, at their real sizes.

Everything here is on shapes: nothing is allocated or compiled.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import nested
from cuts import TOKENS, blocks, cut, cut_tree, names, run_all
from megatrain_jax._src.engine.program.layers.blocks import Parameter, block_keys


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


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        # Keras numbers only the second layer and those after it.
        (["block", "block_1", "block_2"], ["block", "block_1", "block_2"]),
        (["net/block", "net/block_1"], ["net/block", "net/block_1"]),
        (["conv", "conv_2", "conv_3"], ["conv", "conv_2", "conv_3"]),
        # With `block_0`, `block` is no layer of the list; nor is a module that is unlike it.
        (["block", "block_0", "block_1"], [None, "block_0", "block_1"]),
        (["head", "layer_1", "layer_2"], [None, "layer_1", "layer_2"]),
        (["block", "block_7", "block_8"], [None, "block_7", "block_8"]),
    ],
)
def test_a_first_layer_without_a_number_belongs_to_the_list(paths, expected):
    rows = [(*path.split("/"), name) for path in paths for name in ("up", "down")]
    found = block_keys([Parameter(path=row, shape=(3, 3)) for row in rows])
    assert [key and "/".join(map(str, key)) for key in found[::2]] == expected
    assert found[::2] == found[1::2]


def test_an_unlike_module_or_a_single_matrix_is_no_first_layer():
    def keys(*rows):
        parameters = [Parameter(path=tuple(path.split("/")), shape=shape) for path, shape in rows]
        return [key and "/".join(map(str, key)) for key in block_keys(parameters)]

    layers = ("block_1/w", (9, 9)), ("block_2/w", (9, 9))
    assert keys(("block/w", (9, 7)), *layers) == [None, "block_1", "block_2"]
    assert keys(("block/w", (9, 9)), *layers) == ["block", "block_1", "block_2"]
    assert keys(("norm/scale", (9,)), ("norm_1/scale", (9,))) == [None, None]
    assert keys(("dense/w", (9, 9)), ("dense_1/w", (9, 9))) == [None, None]


# Keys that are paths

DENSE = {"kernel": (64, 64), "bias": (64,)}


def flattened(tree, separator, path=()):
    """A flat dict whose keys are paths, as safetensors files and `flatten_dict` have them."""
    items = enumerate(tree) if isinstance(tree, list) else getattr(tree, "items", list)()
    rows = {
        key: leaf
        for part, node in items
        for key, leaf in flattened(node, separator, (*path, str(part))).items()
    }
    return rows or {separator.join(path): tree}


def nested_again(flat, separator):
    tree: dict[str, Any] = {}
    for key, leaf in flat.items():
        *above, name = key.split(separator)
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = leaf
    return tree


@pytest.mark.by_default("flat-.")
@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("wrapped", [False, True], ids=["flat", "below_a_module"])
def test_keys_that_are_paths_are_cut_as_nested_dicts(separator, wrapped):
    shapes = {"embed": (50, 64), "layers": [nested.layer(64)] * 12, "head": {"kernel": (64, 50)}}

    def forward(p, batch):
        layers = [p["layers"][str(k)] for k in range(12)]
        return run_all(layers, p["embed"][batch["tokens"]]) @ p["head"]["kernel"]

    def forward_flat(p, batch):
        return forward(nested_again(p["params"] if wrapped else p, separator), batch)

    flat = flattened(shapes, separator)
    assert f"layers{separator}11{separator}mlp{separator}up" in flat
    program, read = cut_tree({"params": flat} if wrapped else flat, forward_flat)
    as_nested = nested_again(flattened(shapes, "/"), "/")
    expected, expected_read = cut_tree(as_nested, forward)
    above = "params." if wrapped else ""
    assert blocks(program) == [above + name for name in blocks(expected)]
    assert blocks(expected) == [f"layers.{k}" for k in range(12)]
    assert [*read.values()] == [*expected_read.values()]
    assert not program.warnings


def test_module_names_that_are_paths_are_cut_below_their_names():
    # Haiku's form of parameters.
    modules = [f"net/~/layer_{k}/{part}" for k in range(3) for part in ("attention", "mlp")]
    shapes = {module: {"up": (64, 96), "down": (96, 64)} for module in modules}

    def forward(p, batch):
        x = batch["x"].astype(jnp.bfloat16)
        for module in modules:
            x = x + jnp.tanh(x @ p[module]["up"]) @ p[module]["down"]
        return x

    program, _ = cut_tree(shapes, forward, {"x": jax.ShapeDtypeStruct((2, 64), jnp.float32)})
    assert blocks(program) == [f"net.~.layer_{k}" for k in range(3)]


def test_names_with_a_number_inside_are_cut_at_the_number():
    # As in functional models of Keras.
    parts = "attention", "mlp"
    shapes = {
        f"block_{k}_{part}": {"up": (64, 96), "down": (96, 64)} for k in range(3) for part in parts
    }
    # One matrix with its bias is no block, if the bias is a row, too.
    dense = DENSE | {"bias": (1, *DENSE["bias"])}
    shapes |= {f"dense_{k}_{name}": {"w": shape} for k in range(2) for name, shape in dense.items()}

    def forward(p, batch):
        x = batch["x"].astype(jnp.bfloat16)
        for k in range(3):
            for module in (p[f"block_{k}_{part}"] for part in parts):
                x = x + jnp.tanh(x @ module["up"]) @ module["down"]
        for k in range(2):
            x = x @ p[f"dense_{k}_kernel"]["w"] + p[f"dense_{k}_bias"]["w"]
        return x

    program, _ = cut_tree(shapes, forward, {"x": jax.ShapeDtypeStruct((2, 64), jnp.float32)})
    assert blocks(program) == ["block_0", "block_1", "block_2"]


def test_stacked_arrays_of_a_flat_dict_are_separated():
    shapes = {"embed/w": (50, 64), "layers/up": (4, 64, 96), "layers/down": (4, 96, 64)}

    def forward(p, batch):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        stack = {name: p[f"layers/{name}"] for name in ("up", "down")}
        return jax.lax.scan(layer, p["embed/w"][batch["tokens"]], stack)[0]

    program, _ = cut_tree(shapes, forward)
    assert blocks(program) == [f"layers.{k}" for k in range(4)]


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


class LinenPair(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(256)(linen.gelu(linen.Dense(512)(x)))


class LinenNamed(linen.Module):
    name_of: str

    @linen.compact
    def __call__(self, x):
        for i in range(4):
            x = LinenPair(name=self.name_of.format(i))(x)
        return linen.Dense(1, name="head")(x)


@pytest.mark.parametrize("name", ["block_{}", "block-{}", "block.{}", "{}"])
def test_numbers_of_names_are_apart_from_them(name):
    program, _ = cut(
        LinenNamed(name),
        lambda model, batch: jnp.mean(model(batch["x"]).astype(jnp.float32) ** 2),
        {"x": jax.ShapeDtypeStruct((8, 256), jnp.float32)},
    )
    assert blocks(program) == [name.format(i) for i in range(4)]
    assert len({stage.key for stage in program.stages}) == 2


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


@pytest.mark.by_default("True")
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


@pytest.mark.by_default("1")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_unet_is_cut_into_resnets_and_transformers(depth):
    shapes = unet([320, 640, 1280], depth)
    program, read = cut_tree(shapes, unet_forward, nested.image_batch(16))
    largest = nested.count(nested.resnet(2560, 1280))
    assert max(read.values()) == largest
    assert sum("transformer_blocks" in name for name in read) == (12 * depth if depth > 1 else 0)
    assert not program.warnings
