"""Training with images, beside Transformers: a frozen or trained vision part and a decoder."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.lm.models.causal_attention import ImageRows, full_attention
from megatrain_jax._src.lm.models.pretrained import leaves, parameter_tensors
from messages import refuses

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

from families import named  # noqa: E402
from published import PUBLISHED  # noqa: E402
from tiny_images import IMAGE, batch, checkpoint, inputs, loss_of, make_processor  # noqa: E402

STEPS, RATE, EPS = 5, 1e-3, 1e-4
TEXT = r"^(?!vision/)"


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> tuple[Any, models.Pretrained]:
    """Transformers' model, and the same opened by us."""
    model, folder = checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return model, models.load_pretrained(folder, images=True)


def trained(pretrained: models.Pretrained, trainable: str | None, steps: int, **options: Any):
    trainer = mt.Trainer(
        pretrained.model,
        models.next_token_loss,
        optax.adamw(RATE, eps=EPS, weight_decay=0.01),
        batch(),
        params=pretrained.params,
        trainable=trainable,
        precision=mt.Precision(compute=jnp.float32),
        **options,
    )
    return trainer, [trainer.read(trainer.step(batch(seed)))["loss"] for seed in range(steps)]


def by_name(model: Any) -> dict[str, np.ndarray]:
    """Transformers' parameters by the names of the files."""
    found = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return {n.removeprefix("model."): array for n, array in named(found, model).items()}


@pytest.mark.by_default("frozen")
@pytest.mark.parametrize("trainable", [TEXT, None], ids=["frozen", "all"])
def test_five_steps_are_those_of_transformers(trainable, tmp_path):
    model, folder = checkpoint(tmp_path / "m")
    pretrained = models.load_pretrained(folder, images=True)
    trainer, losses = trained(pretrained, trainable, STEPS)
    if trainable:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("vision" not in name and "projector" not in name)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=RATE, eps=EPS, weight_decay=0.01)
    expected = []
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model.train(), batch(seed))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    found, parameters = dict(leaves(trainer.model)), by_name(model)
    for entry in parameter_tensors(pretrained.config):
        want, got = parameters[entry.names[0]], np.asarray(found[entry.path])
        assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want), entry.names[0]
    if trainable:
        check_export(trainer, folder, tmp_path)


def check_export(trainer: mt.Trainer, source: Any, folder: Any) -> None:
    """The vision part is exported untouched, and Transformers gives the trained model's logits."""
    models.save_pretrained(trainer, folder / "saved")
    read, saved = (load_file(at / "model.safetensors") for at in (source, folder / "saved"))
    assert read.keys() == saved.keys()
    for name, array in saved.items():
        if not name.startswith("language_model."):
            assert array.tobytes() == read[name].tobytes()
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder / "saved").eval()
    with torch.no_grad():
        logits = model(**inputs(batch())).logits.numpy()
    np.testing.assert_allclose(logits_of(trainer.model, batch()), logits, atol=2e-6)


def logits_of(model: models.Decoder, arrays: dict[str, np.ndarray]) -> np.ndarray:
    def function(model, tokens, pixels):
        hidden, _ = model.hidden(tokens, pixel_values=pixels)
        return model.logits_of(hidden)

    return np.asarray(nnx.jit(function)(model, arrays["tokens"], arrays["pixel_values"]))


def test_packed_documents_are_as_each_alone(given):
    _, pretrained = given
    model = filled(pretrained)
    arrays = batch()
    tokens, pixels = arrays["tokens"], arrays["pixel_values"]
    # The last row's document, with one image, follows the first row's, with three.
    both = np.concatenate([tokens[:1], tokens[2:]], axis=1)
    images = np.concatenate([pixels[:1], pixels[2:, :1]], axis=1)
    segments = np.repeat([[1, 2]], tokens.shape[1], axis=1)
    hidden, _ = nnx.jit(
        lambda model, *args: model.hidden(*args[:2], args[2], pixel_values=args[3])
    )(model, both, None, segments, images)
    alone = logits_of(model, arrays)
    found = np.asarray(model.logits_of(hidden))[0]
    np.testing.assert_allclose(found, np.concatenate([alone[0], alone[2]]), atol=2e-6)


def filled(pretrained: models.Pretrained, dtype: Any = jnp.float32) -> models.Decoder:
    model = pretrained.model()
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    for path, variable in state:
        value: Any = pretrained.params
        for key in path:
            value = value[key]
        variable.set_value(jnp.asarray(np.asarray(value), dtype))
    nnx.update(model, nnx.from_flat_state(state))
    return model


def test_half_precision_stays_half(given):
    _, pretrained = given
    model, arrays = filled(pretrained, jnp.bfloat16), batch()
    hidden, _ = nnx.eval_shape(
        lambda m: m.hidden(arrays["tokens"], pixel_values=arrays["pixel_values"]), model
    )
    assert hidden.dtype == jnp.bfloat16


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_in_rows_is_its_definition(packed, window, monkeypatch):
    # Small pieces, so that images cross their borders.
    monkeypatch.setattr("megatrain_jax._src.lm.models.causal_attention._PIECE_BYTES", 1)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 41, 2, 8)) for key in keys)
    images = np.zeros((2, 41), np.int32)
    images[0, 3:9], images[0, 10:16], images[1, 12:25] = 1, 2, 1
    segments = np.repeat([[1, 2]], [17, 24], axis=1).repeat(2, axis=0)
    segments[1] = 1
    here, there = np.mgrid[:41, :41]
    mask = (there <= here) | (images[:, :, None] == images[:, None]) & (images > 0)[:, :, None]
    mask &= here - there < (window or 41)
    if packed:
        mask &= segments[:, :, None] == segments[:, None]

    def defined(q, k, v):
        scores = jnp.einsum("bmhd,bnhd->bhmn", q, k) * 0.3
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhmn,bnhd->bmhd", weights, v)

    def ours(q, k, v):
        rows = ImageRows(jnp.asarray(segments) if packed else None, jnp.asarray(images), 13)
        return models.attention(q, k, v, segments=rows, window=window, scale=0.3)

    check_alike(ours, defined, q, k, v)


def check_alike(ours: Any, defined: Any, *arrays: jax.Array) -> None:
    found, pulled = jax.vjp(ours, *arrays)
    expected, pull = jax.vjp(defined, *arrays)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    weights = jax.random.normal(jax.random.key(1), found.shape)
    for one, other in zip(pulled(weights), pull(weights), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_attention_in_a_tower_sees_all(monkeypatch):
    monkeypatch.setattr("megatrain_jax._src.lm.models.causal_attention._PIECE_BYTES", 1)
    keys = jax.random.split(jax.random.key(0), 3)

    def defined(q, k, v):
        scores = jnp.einsum("bmhd,bnhd->bhmn", q, k) * 8**-0.5
        return jnp.einsum("bhmn,bnhd->bmhd", jax.nn.softmax(scores, axis=-1), v)

    check_alike(full_attention, defined, *(jax.random.normal(key, (2, 37, 2, 8)) for key in keys))


def test_older_names_of_tensors_are_read_and_kept(given, tmp_path):
    _, pretrained = given
    tensors = load_file(pretrained.folder / "model.safetensors")
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): array
        for name, array in tensors.items()
    }
    (tmp_path / "older").mkdir()
    save_file(renamed, tmp_path / "older" / "model.safetensors")
    config = (pretrained.folder / "config.json").read_text()
    (tmp_path / "older" / "config.json").write_text(config)
    older = models.load_pretrained(tmp_path / "older", images=True)
    models.save_pretrained(filled(older), tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {n: a.tobytes() for n, a in saved.items()} == {
        n: a.tobytes() for n, a in renamed.items()
    }


def test_adapters_of_a_decoder_with_images(given):
    _, pretrained = given
    adapted = models.lora(
        pretrained.model, targets="layers/.*/[qv]_proj", rank=2, params=pretrained.params
    )
    assert not any("vision" in name for name in adapted.targets)
    trainer = mt.Trainer(
        adapted.model,
        models.next_token_loss,
        optax.adamw(1e-2),
        batch(),
        params=adapted.params,
        trainable=adapted.trainable,
        precision=mt.Precision(compute=jnp.float32, frozen="bfloat16"),
    )
    losses = [trainer.read(trainer.step(batch()))["loss"] for _ in range(3)]
    assert losses[2] < losses[0]


def test_batches_that_do_not_fit_are_refused(given, tmp_path):
    _, pretrained = given
    model, arrays = pretrained.model(), batch()
    model.check_batch(arrays)
    tokens = arrays["tokens"].copy()
    tokens[1, 4] = IMAGE
    with refuses(ValueError, "row 1", 1, 4):
        model.check_batch(arrays | {"tokens": tokens})
    with refuses(ValueError, "row 0", 12, 2):
        model.check_batch(arrays | {"pixel_values": arrays["pixel_values"][:, :2]})
    with refuses(ValueError, "shape", "(rows, images, channels"):
        model.check_batch(arrays | {"pixel_values": arrays["pixel_values"][..., :20]})
    with refuses(ValueError, "vision"):
        models.next_token_loss(models.load_pretrained(pretrained.folder).model(), arrays)


def test_texts_are_continued_as_without_a_vision_part(given):
    _, pretrained = given
    both = filled(pretrained), filled(models.load_pretrained(pretrained.folder))
    (one,), (other,) = (models.generate(model, [[2, 5, 6]], max_tokens=4) for model in both)
    assert one.ids.tolist() == other.ids.tolist()
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
    tokenizer = make_processor().tokenizer
    with refuses(ValueError, "`prompts`", "image", "text"):
        models.generate(both[0], [question], tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mm_tokens_per_image": 5}, "`mm_tokens_per_image` = 5"),
        ({"image_token_index": 99}, "`image_token_index` = 99 .*`vocab_size`.* 99"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "siglip_vision_model"),
        ({"vision_config": {"num_attention_heads": 5}}, "`hidden_size`"),
        ({"vision_config": {"extra": 1}}, "fields.*extra"),
    ],
)
def test_configurations_that_are_not_supported_are_named(given, change, message, tmp_path):
    folder = given[1].folder
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "other")
    (tmp_path / "other").write_bytes((folder / "model.safetensors").read_bytes())
    models.load_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        models.load_pretrained(tmp_path, images=True)


def test_a_published_checkpoint_has_as_many_parameters():
    (released,) = (one for one in PUBLISHED.values() if one.config["model_type"] == "gemma3")
    config = models.DecoderConfig.from_hf(released.config, images=True)
    sizes = [math.prod(entry.shape) for entry in parameter_tensors(config)]
    assert sum(sizes) == 4_300_079_472


def test_families_without_images_are_refused(given, tmp_path):
    config = json.loads((given[1].folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config["text_config"]))
    tensors = load_file(given[1].folder / "model.safetensors")
    text = {
        name.removeprefix("language_model."): array
        for name, array in tensors.items()
        if name.startswith("language_model.")
    }
    save_file(text, tmp_path / "model.safetensors")
    with refuses(ValueError, "gemma3_text", "gemma3"):
        models.load_pretrained(tmp_path, images=True)
