"""The decoder against Transformers: logits, gradients, packed documents, in every family."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megatrain_jax._src.lm.models.pretrained import parameter_tensors
from megatrain_jax.models import (
    Decoder,
    DecoderConfig,
    Pretrained,
    load_pretrained,
    next_token_loss,
)

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

from families import (  # noqa: E402
    ALIKE,
    FAMILIES,
    LENGTH,
    file_name,
    make_torch,
    named,
    random_tokens,
    save,
)
from families_images import IMAGES  # noqa: E402
from filled_models import filled  # noqa: E402


def _marked(long: set[str]) -> list[Any]:
    return [n if n not in long else pytest.param(n, marks=pytest.mark.long) for n in FAMILIES]


_MARKED, _OF_TEXT = _marked({*ALIKE}), _marked({*ALIKE, *IMAGES})


@pytest.fixture(scope="module", params=_MARKED)
def pair(request, tmp_path_factory) -> tuple[str, Any, Pretrained]:
    """One family: its name, Transformers' model, and the same opened by us."""
    model = make_torch(request.param)
    folder = save(model, tmp_path_factory.mktemp("checkpoint"))
    return request.param, model, load_pretrained(folder)


def forward(model: Decoder, *args: Any) -> np.ndarray:
    return np.asarray(nnx.jit(lambda m, *a: m(*a))(model, *args))


def theirs(model: Any, tokens: np.ndarray, **options: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens).long(), **options).logits.numpy()


@pytest.mark.by_default(
    *("cohere2", "llama4", "hunyuan-dense", "ministral3"),
    *("apertus", "deepseek-v2", "deepseek-v3.2", "gemma4", "falcon-h1-plain"),
)
@pytest.mark.parametrize(
    "pair",
    ["llama", "mistral", "qwen3-moe", "gemma2", "gemma3", "phi3", "olmo3", "smollm3", "granite"]
    + [
        "qwen2-moe",
        "glm4",
        "phi",
        "gemma3-multimodal",
        "ministral3",
        "mistral3",
        "gpt-oss",
        "glm4-moe",
        "qwen3-next",
        "qwen3.5-moe-multimodal",
        "gemma4-shared",
        "cohere2",
        "exaone4",
        "hunyuan-dense",
        "lfm2",
        "gemma3n",
        "llama4",
        "falcon-h1",
        "granite4",
        "afmoe",
        "nemotron-h",
        "olmo-hybrid",
        "kimi-linear",
        "deepseek-v3.2",
        "glm-moe-dsa",
        "apertus",
        "deepseek-v2",
        "gemma4",
        "falcon-h1-plain",
    ],
    indirect=True,
)
def test_packed_documents_are_as_each_alone(pair):
    name, reference, pretrained = pair
    # Its wavelengths follow from the longest document of a call.
    first = 12 if name == "phi3" else 7
    tokens = random_tokens(1)[:, : 2 * 12]
    segments = np.full(tokens.shape, 2, np.int32)
    segments[:, :first] = 1
    packed = forward(filled(pretrained), tokens, None, segments)
    alone = [theirs(reference, part) for part in np.split(tokens, [first], axis=1)]
    np.testing.assert_allclose(packed, np.concatenate(alone, axis=1), atol=1e-4)


@pytest.mark.by_default(
    *("glm4-moe", "granite4", "olmo2", "nemotron", "llama", "llama-dynamic", "minimax-m2", "qwen3"),
    *("afmoe", "cohere", "lfm2-moe", "nemotron-h", "olmo-hybrid", "qwen3-vl-moe"),
)
def test_logits_and_gradients(pair):
    _, reference, pretrained = pair
    tokens = random_tokens()
    weights = np.random.default_rng(1).normal(size=(*tokens.shape, 1)).astype(np.float32)

    def loss(model: Decoder) -> tuple[jax.Array, jax.Array]:
        logits = model(tokens)
        return jnp.mean(weights * jax.nn.log_softmax(logits)), logits

    grads, ours = nnx.jit(nnx.grad(loss, has_aux=True))(filled(pretrained))
    reference.zero_grad()
    logits = reference(torch.tensor(tokens).long()).logits
    (torch.tensor(weights) * logits.log_softmax(-1)).mean().backward()
    np.testing.assert_allclose(ours, logits.detach().numpy(), atol=1e-4)
    check_gradients(grads, reference, pretrained)


def check_gradients(grads: Any, reference: Any, pretrained: Pretrained, share: float = 1e-4):
    expected = named_gradients(reference)
    found = {path: np.asarray(value) for path, value in leaves_of(grads)}
    for entry in parameter_tensors(pretrained.config):
        if not entry.trained:
            continue
        got = found.pop(entry.path)
        # Transformers computes indexers without gradients.
        parts = [got * 0] if ".indexer." in entry.names[0] else map(expected.pop, entry.names)
        want = np.stack([*parts]).reshape(got.shape)
        np.testing.assert_allclose(
            got, want, atol=share * np.abs(want).max(), err_msg=entry.names[0]
        )
    assert not found and not expected


def leaves_of(state: Any) -> list[tuple[Any, Any]]:
    return [(path, variable.get_value()) for path, variable in nnx.to_flat_state(state)]


def named_gradients(model: Any) -> dict[str, np.ndarray]:
    """Returns gradients by the names of the files; parts that see no text have none."""
    parameters = model.named_parameters()
    return named({n: p.grad.numpy() for n, p in parameters if p.grad is not None}, model)


@pytest.mark.by_default("gemma3n")
@pytest.mark.parametrize("pair", _OF_TEXT, indirect=True)
def test_gradients_at_embeddings_of_zeros_are_those_of_transformers(pair):
    """As padding's embedding is in Transformers; its hidden states are zeros, too."""
    name, reference, pretrained = pair
    model, embedding = filled(pretrained), reference.get_input_embeddings().weight
    before = embedding.data[0].clone()
    # Where a row's length decides the rotations, the reference needs the same length.
    first = LENGTH if name in ("phi3", "llama-dynamic") else 13
    embedding.data[0] = 0
    table = model.embed_tokens.weight
    table[...] = table[...].at[0].set(0)
    tokens = np.maximum(random_tokens(), 1)
    tokens[1, first:] = 0
    # There, gemma3n's gradients are NaN in Transformers, and all scores of an indexer are equal.
    if name not in ("gemma3n", "deepseek-v3.2", "glm-moe-dsa"):
        tokens[0, [0, 9]] = 0
    segments = np.ones(tokens.shape, np.int32)
    segments[1, first:] = 0
    weights = np.random.default_rng(1).normal(size=(*tokens.shape, 1)).astype(np.float32)

    def loss(model: Decoder) -> jax.Array:
        logs = jax.nn.log_softmax(model(tokens, None, segments))
        return jnp.where(segments[..., None] > 0, weights * logs, 0).sum()

    grads = nnx.jit(nnx.grad(loss))(model)
    reference.zero_grad()
    for row, end in enumerate((LENGTH, first)):
        logits = reference(torch.tensor(tokens[row : row + 1, :end]).long()).logits
        (torch.tensor(weights[row, :end]) * logits.log_softmax(-1)).sum().backward()
    embedding.data[0] = before
    # The gradient of a zero is multiplied by 1 / sqrt(eps) in each norm, and loses digits.
    table = grads.embed_tokens.weight
    assert np.isfinite(table[0]).all()
    table[...], embedding.grad[0] = table[...].at[0].set(0), 0
    check_gradients(grads, reference, pretrained, share=5e-4)


@pytest.mark.parametrize(
    ("name", "padding"),
    [("qwen3-moe-mixed", 5), ("mixtral", 0), ("qwen2-moe", 5), ("gpt-oss", 0)]
    + [("qwen3-next", 5), ("minimax-m2", 5), ("ernie4.5-moe", 0)],
)
def test_balancing_loss(name, padding, tmp_path):
    reference = make_torch(name)
    model = filled(load_pretrained(save(reference, tmp_path / "m")))
    tokens = random_tokens()
    mask = np.ones(tokens.shape, np.int32)
    mask[1, LENGTH - padding :] = 0
    _, balance = nnx.jit(lambda m, *a: m.hidden(*a))(model, tokens, None, mask if padding else None)
    with torch.no_grad():
        out = reference(
            torch.tensor(tokens).long(),
            attention_mask=torch.tensor(mask) if padding else None,
            output_router_logits=True,
        )
    assert float(balance) == pytest.approx(float(out.aux_loss), rel=1e-5)


@pytest.mark.parametrize("balanced", [False, True, None])
def test_the_balancing_loss_is_added_where_transformers_adds_it(balanced, tmp_path):
    reference = make_torch("qwen3-moe", output_router_logits=bool(balanced))
    folder = save(reference, tmp_path / "m")
    if balanced is None:
        config = json.loads((folder / "config.json").read_text())
        del config["output_router_logits"]
        (folder / "config.json").write_text(json.dumps(config))
    tokens = random_tokens()
    labels = np.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    batch = {
        "tokens": tokens,
        "labels": labels,
        "mask": labels * 0 + (np.arange(LENGTH) < LENGTH - 1),
    }
    loss, _ = nnx.jit(next_token_loss)(filled(load_pretrained(folder)), batch)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens).long(), labels=torch.tensor(tokens).long()).loss
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(("name", "length"), [("phi3", 16), ("phi3", 17), ("llama-dynamic", 12)])
def test_both_sides_of_a_length_that_changes_wavelengths(name, length, tmp_path):
    reference = make_torch(name)
    model = filled(load_pretrained(save(reference, tmp_path / "m")))
    tokens = random_tokens(1, length)
    np.testing.assert_allclose(forward(model, tokens), theirs(reference, tokens), atol=1e-4)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in {*ALIKE, *IMAGES}])
def test_parameters_and_the_least_variance_of_each_norm_are_those_of_transformers(name):
    with torch.device("meta"):
        reference = make_torch(name)
    known = reference.config.to_dict() | {"architectures": [type(reference).__name__]}
    config = DecoderConfig.from_hf(known)
    half = {"param_dtype": jnp.bfloat16}
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **half))
    parameters = [(n, p) for n, p in reference.named_parameters() if p.requires_grad]
    numbers = {n: np.broadcast_to(0, p.shape) for n, p in parameters}
    names = {name for entry in parameter_tensors(config) if entry.trained for name in entry.names}
    assert names == named(numbers, reference).keys()
    trained = leaves_of(nnx.state(model, nnx.Param))
    assert {value.dtype for _, value in trained} == {jnp.dtype(jnp.bfloat16)}
    found = {path: vars(module).get("eps") for path, module in nnx.iter_modules(model)}
    modules = {file_name(name, reference): m for name, m in reference.named_modules()}
    count = 0
    for entry in parameter_tensors(config):
        if isinstance(eps := found[entry.path[:-1]], float):
            norm = modules[entry.names[0].rpartition(".")[0]]
            assert eps == getattr(norm, "variance_epsilon", getattr(norm, "eps", None)), entry.path
            count += 1
    assert count > config.num_layers


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_half_precision_stays_half(name, tmp_path):
    reference = make_torch(name)
    model = filled(load_pretrained(save(reference, tmp_path / "m")), jnp.bfloat16)
    tokens = random_tokens()
    hidden, balance = jax.eval_shape(lambda t: model.hidden(t), tokens)
    assert hidden.dtype == jnp.bfloat16 and balance.dtype == jnp.float32
    ours = forward(model, tokens)
    assert ours.dtype == jnp.bfloat16
    expected = theirs(reference, tokens)
    assert np.abs(ours.astype(np.float32) - expected).mean() < 0.05 * np.abs(expected).mean()
