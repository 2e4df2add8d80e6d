"""Training with images, beside Transformers: a frozen or trained vision part and a decoder."""

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import megatrain_jax as mt
from drawn import in_turn
from megatrain_jax import callbacks, models
from megatrain_jax._src.lm.models.causal_attention import ImageRows, full_attention
from megatrain_jax._src.lm.models.decoder import IMAGE_ARRAYS
from megatrain_jax._src.lm.models.families.gemma import read_siglip
from megatrain_jax._src.lm.models.families.qwen_vision import QwenVisionConfig, squares_of
from megatrain_jax._src.lm.models.generation.generation_memory import GenerationMemory
from megatrain_jax._src.lm.models.generation.weight_source import open_source
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.pretrained import leaves, parameter_tensors
from megatrain_jax._src.lm.models.rotary import Rope
from messages import refuses

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')
import transformers  # noqa: E402

from families import named  # noqa: E402
from published import PUBLISHED  # noqa: E402
from tiny_images import (  # noqa: E402
    IMAGE,
    KINDS,
    MOST,
    VECTORS,
    batch,
    checkpoint,
    inputs,
    is_sized,
    loss_of,
    make_config,
    make_processor,
)

STEPS, RATE, EPS = 5, 1e-3, 1e-4
TEXT = r"^(?!vision/)"


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> tuple[Any, models.Pretrained]:
    """Transformers' model, and the same opened by us."""
    model, folder = checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return model, models.load_pretrained(folder, images=True)


def trained(
    pretrained: models.Pretrained, trainable: str | None, steps: int, kind: str = "gemma3"
) -> tuple[mt.Trainer, list[Any]]:
    trainer = mt.Trainer(
        pretrained.model,
        models.next_token_loss,
        optax.adamw(RATE, eps=EPS, weight_decay=0.01),
        batch(kind=kind),
        params=pretrained.params,
        trainable=trainable,
        precision=mt.Precision(compute=jnp.float32),
    )
    taken = [trainer.step(batch(seed, kind)) for seed in range(steps)]
    return trainer, [trainer.read(step)["loss"] for step in taken]


def by_name(model: Any, gradients: bool = False) -> dict[str, np.ndarray]:
    """Transformers' parameters, or their gradients, by the names of the files."""
    given = {name: p.grad if gradients else p for name, p in model.named_parameters()}
    found = {name: p.detach().numpy().copy() for name, p in given.items()}
    # Transformers reads and writes those of these families without this beginning.
    start = "model." if model.config.model_type in ("gemma3", "internvl") else ""
    return {n.removeprefix(start): array for n, array in named(found, model).items()}


ALONE = ["gemma4", "internvl", "llama4", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-videos"]


GRADIENTS = [*ALONE, "gemma4-plain", "gemma4-videos", "qwen2.5-vl-videos"]


@pytest.mark.by_default(*ALONE)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_logits_and_gradients_are_those_of_transformers(kind, tmp_path):
    theirs, folder = checkpoint(tmp_path, kind)
    model, arrays = filled(models.load_pretrained(folder, images=True)), batch(kind=kind)
    loss_of(theirs, arrays).backward()
    with torch.no_grad():
        logits = theirs(**inputs(arrays)).logits.numpy()

    def loss(model):
        hidden, _ = model.hidden(arrays["tokens"], **images_of(arrays))
        return models.next_token_loss(model, arrays)[0], model.logits_of(hidden)

    grads, found = nnx.jit(nnx.grad(loss, has_aux=True))(model)
    np.testing.assert_allclose(found, logits, atol=1e-5 * max(1, np.abs(logits).max()))
    ours = dict(leaves(grads))
    theirs_by_name = by_name(theirs, gradients=True)
    for entry in parameter_tensors(model.config):
        if not entry.trained:
            continue
        (name,) = entry.names
        want, got = theirs_by_name[name], np.asarray(ours[entry.path])
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), name


# Long: all parameters of kinds whose gradients are compared by themselves, towers of kinds that
# others have, and videos, which take the way of images.
CASES = [
    pytest.param(
        kind,
        trainable,
        id=f"{kind}-{'frozen' if trainable else 'all'}",
        marks=[pytest.mark.long]
        * (
            kind.endswith(("videos", "-moe" if trainable else "videos"))
            or (kind in GRADIENTS if trainable is None else kind == "gemma4-plain")
        ),
    )
    for trainable in (TEXT, None)
    for kind in KINDS
]


@pytest.mark.by_default("gemma3-frozen")
@pytest.mark.parametrize(("kind", "trainable"), CASES)
def test_five_steps_are_those_of_transformers(kind, trainable, tmp_path):
    model, folder = checkpoint(tmp_path / "m", kind)
    pretrained = models.load_pretrained(folder, images=True)
    trainer, losses = trained(pretrained, trainable, STEPS, kind)
    if trainable:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in ("vis", "projector")))
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=RATE, eps=EPS, weight_decay=0.01)
    expected = []
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model.train(), batch(seed, kind))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    found, parameters = dict(leaves(trainer.model)), by_name(model)
    for entry in parameter_tensors(pretrained.config):
        if not entry.trained:
            continue
        wanted = [parameters[name] for name in entry.names]
        want, got = np.stack(wanted) if entry.stacked else wanted[0], np.asarray(found[entry.path])
        assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want), entry.names[0]
    if trainable:
        check_export(trainer, folder, tmp_path, kind)


def check_export(trainer: mt.Trainer, source: Any, folder: Any, kind: str) -> None:
    """The vision part is exported untouched, and Transformers gives the trained model's logits."""
    models.save_pretrained(trainer, folder / "saved")
    read, saved = (load_file(at / "model.safetensors") for at in (source, folder / "saved"))
    assert read.keys() == saved.keys()
    for name, array in saved.items():
        if any(part in name for part in ("vision_", "visual.", "_vision.", "projector.")):
            assert array.tobytes() == read[name].tobytes()
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder / "saved").eval()
    with torch.no_grad():
        logits = model(**inputs(batch(kind=kind))).logits.numpy()
    found = logits_of(trainer.model, batch(kind=kind))
    np.testing.assert_allclose(found, logits, atol=2e-6 * max(1, np.abs(logits).max()))


def logits_of(model: models.Decoder, arrays: dict[str, np.ndarray], segments: Any = None) -> Any:
    def function(model, images):
        hidden, _ = model.hidden(arrays["tokens"], None, segments, **images)
        return model.logits_of(hidden)

    return np.asarray(nnx.jit(function)(model, images_of(arrays)))


def images_of(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(arrays[name]) for name in IMAGE_ARRAYS if name in arrays}


@pytest.mark.by_default("gemma3", "qwen2.5-vl")
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_as_each_alone(kind, tmp_path):
    _, folder = checkpoint(tmp_path, kind)
    model, arrays = filled(models.load_pretrained(folder, images=True)), batch(kind=kind)
    alone = logits_of(model, arrays)
    # The last row's document, with one image, follows the first row's, with three.
    names = ("tokens", *(name for name in IMAGE_ARRAYS if name in arrays))
    first, last = ([arrays[name][at] for name in names] for at in (0, 2))
    counts = [len(first[0]), MOST, MOST]
    if "qwen" in kind:
        counts[1] = arrays["image_grid_thw"][0].prod(axis=-1).sum()
    elif "gemma4" in kind:
        counts[1:] = [(arrays["image_position_ids"][0] >= 0).any(axis=(1, 2)).sum()] * 2
    both = [np.concatenate(pair)[None] for pair in zip(first, last, strict=True)]
    for array, other, count in zip(both[1:], last[1:], counts[1:], strict=False):
        array[0, count : count + len(other)] = other
    segments = np.repeat([[1, 2]], counts[0], axis=1)
    found = logits_of(model, dict(zip(names, both, strict=False)), segments)
    expected = np.concatenate([alone[0], alone[2]])
    np.testing.assert_allclose(found[0], expected, atol=2e-6 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen3-vl"])
def test_padding_of_patches_has_no_effect(kind, tmp_path):
    _, folder = checkpoint(tmp_path, kind)
    model, arrays = filled(models.load_pretrained(folder, images=True)), batch(kind=kind)
    wider, padded = dict(arrays), np.full((3, 160, arrays["pixel_values"].shape[2]), 1e3)
    for row, (pixels, grids) in enumerate(
        zip(arrays["pixel_values"], arrays["image_grid_thw"], strict=True)
    ):
        used = grids.prod(axis=-1).sum()
        padded[row, :used] = pixels[:used]
    wider["pixel_values"] = padded.astype(np.float32)
    wider["image_grid_thw"] = np.pad(arrays["image_grid_thw"], ((0, 0), (0, 2), (0, 0)))
    found, expected = (logits_of(model, given) for given in (wider, arrays))
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())


def test_padding_of_an_image_and_unused_images_have_no_effect(tmp_path):
    _, folder = checkpoint(tmp_path, "gemma4")
    model, arrays = filled(models.load_pretrained(folder, images=True)), batch(kind="gemma4")
    wider = dict(arrays)
    for name, unused in (("pixel_values", 1e3), ("image_position_ids", -1)):
        beside = ((0, 0), (0, 0), (0, 16), (0, 0))
        wider[name] = np.pad(arrays[name], beside, constant_values=unused)
        # Generation has zeros behind a row's images: their patches are all in one place.
        wider[name] = np.pad(wider[name], ((0, 0), (0, 2), (0, 0), (0, 0)))
    found, expected = (logits_of(model, given) for given in (wider, arrays))
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())


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


@pytest.mark.parametrize("most", [None, 4], ids=["any", "few"])
@pytest.mark.parametrize("divided", [False, True])
def test_attention_in_a_tower_sees_all_of_a_segment(divided, most, monkeypatch):
    monkeypatch.setattr("megatrain_jax._src.lm.models.causal_attention._PIECE_BYTES", 1)
    keys = jax.random.split(jax.random.key(0), 3)
    segments = np.repeat(np.arange(12), [4, 3, 4, 2, 1, 4, 4, 3, 4, 1, 4, 3])
    segments = np.stack([segments, segments[::-1]]) if divided else np.zeros((2, 37), int)
    mask = segments[:, None, :, None] == segments[:, None, None]

    def defined(q, k, v):
        scores = jnp.where(mask, jnp.einsum("bmhd,bnhd->bhmn", q, k) * 8**-0.5, -jnp.inf)
        return jnp.einsum("bhmn,bnhd->bmhd", jax.nn.softmax(scores, axis=-1), v)

    def ours(q, k, v):
        if not divided:
            return full_attention(q, k, v)
        return full_attention(q, k, v, jnp.asarray(segments), most)

    check_alike(ours, defined, *(jax.random.normal(key, (2, 37, 2, 8)) for key in keys))


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


ADAPTED = r"layers/.*/[qv]_proj"
IN_TOWERS = r"|vision/tower/.*/(qkv|q_proj|fc1|gate_proj)(/linear)?|vision/projector/.*(fc|embed)"


# Long: adapters of the decoder alone, which are among all, but for one kind.
@pytest.mark.by_default("decoder-gemma3")
@pytest.mark.parametrize(
    ("more", "kind"),
    [
        pytest.param(
            more,
            kind,
            id=f"{'all' if more else 'decoder'}-{kind}",
            marks=[pytest.mark.long] * (not more and kind != "gemma3"),
        )
        for more in ("", IN_TOWERS)
        for kind in ("gemma3", "gemma4", "llama4", "qwen2.5-vl", "qwen3-vl", "qwen2.5-vl-videos")
    ],
)
def test_adapters_of_a_decoder_with_images(kind, more, tmp_path):
    _, folder = checkpoint(tmp_path / "m", kind)
    pretrained = models.load_pretrained(folder, images=True)
    adapted = models.lora(
        pretrained.model, targets=ADAPTED + more, rank=2, params=pretrained.params
    )
    assert any("vision" in name for name in adapted.targets) == bool(more)
    trainer = mt.Trainer(
        adapted.model,
        models.next_token_loss,
        optax.adamw(1e-2),
        batch(kind=kind),
        params=adapted.params,
        trainable=adapted.trainable,
        precision=mt.Precision(compute=jnp.float32, frozen=None if more else "bfloat16"),
    )
    losses = [trainer.read(trainer.step(batch(kind=kind)))["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    if more:
        models.save_pretrained(trainer, tmp_path / "merged")
        from transformers import AutoModelForImageTextToText

        merged = AutoModelForImageTextToText.from_pretrained(
            tmp_path / "merged", attn_implementation="eager"
        )
        found = loss_of(merged, batch(kind=kind)).item()
        expected = trainer.read(trainer.step(batch(kind=kind)))["loss"]
        np.testing.assert_allclose(found, expected, rtol=2e-6)


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


def test_batches_of_images_of_any_size_that_do_not_fit_are_refused(tmp_path):
    _, folder = checkpoint(tmp_path, "qwen3-vl")
    model, arrays = models.load_pretrained(folder, images=True).model(), batch(kind="qwen3-vl")
    model.check_batch(arrays)
    model.check_batch({"tokens": arrays["tokens"][1:2]})
    tokens, grids = arrays["tokens"].copy(), arrays["image_grid_thw"]
    tokens[1, 4] = IMAGE
    with refuses(ValueError, "row 1", 1, 0):
        model.check_batch(arrays | {"tokens": tokens})
    with refuses(ValueError, "row 0", 27, 26):
        model.check_batch(arrays | {"pixel_values": arrays["pixel_values"][:, :104]})
    with refuses(ValueError, "row 0", 27, 0):
        model.check_batch({"tokens": tokens[:1]})
    fewer = arrays["tokens"].copy()
    fewer[0, np.flatnonzero(fewer[0] == IMAGE)[-1]] = 1
    with refuses(ValueError, "row 0", 26, 27):
        model.check_batch(arrays | {"tokens": fewer})
    with refuses(ValueError, "image_grid_thw", [1, 5, 4], "image 1", "row 0"):
        model.check_batch(arrays | {"image_grid_thw": np.insert(grids, 1, (1, 5, 4), axis=1)})
    with refuses(ValueError, "row 0", 27, 35):
        model.check_batch(arrays | {"image_grid_thw": np.insert(grids, 1, (2, 4, 4), axis=1)})
    for name, array in (("pixel_values", grids), ("image_grid_thw", grids[..., :2])):
        with refuses(ValueError, name, "(rows,"):
            model.check_batch(arrays | {name: array})
    with refuses(TypeError, "image_grid_thw"):
        names = ("tokens", "labels", "pixel_values")
        models.next_token_loss(model, {name: arrays[name] for name in names})
    with refuses(ValueError, "second_per_grid_ts", (3, 3), (3, 2)):
        models.next_token_loss(model, arrays | {"second_per_grid_ts": np.ones((3, 2), np.float32)})


def test_batches_of_patches_with_places_that_do_not_fit_are_refused(tmp_path):
    _, folder = checkpoint(tmp_path, "gemma4")
    model, arrays = models.load_pretrained(folder, images=True).model(), batch(kind="gemma4")
    model.check_batch(arrays)
    model.check_batch({"tokens": arrays["tokens"][1:2]})
    tokens = arrays["tokens"].copy()
    tokens[1, 4] = IMAGE + 4
    with refuses(ValueError, "row 1", IMAGE + 4, "sound"):
        model.check_batch(arrays | {"tokens": tokens})
    with refuses(ValueError, "`prompts`", IMAGE + 4, "sound"):
        models.generate(model, [tokens[1]])
    for token in (IMAGE, IMAGE + 3):
        tokens[1, 4] = token
        with refuses(ValueError, "row 1", 1, 0):
            model.check_batch(arrays | {"tokens": tokens})
    with refuses(ValueError, "row 0", 27, 0):
        model.check_batch({"tokens": arrays["tokens"]})
    places = arrays["image_position_ids"].copy()
    places[0, 0, 0, 1] = 80
    with refuses(ValueError, "image_position_ids", 80, "position_embedding_size"):
        model.check_batch(arrays | {"image_position_ids": places})
    for name, array in (("pixel_values", places), ("image_position_ids", places[:, :, :4])):
        with refuses(ValueError, name, "(rows,"):
            model.check_batch(arrays | {name: array})
    with refuses(TypeError, "image_position_ids"):
        names = ("tokens", "labels", "pixel_values")
        models.next_token_loss(model, {name: arrays[name] for name in names})


def test_a_fresh_decoder_beside_a_part_for_sound_is_not_saved(tmp_path):
    values = make_config("gemma4").to_dict() | {"audio_config": {"model_type": "gemma4_audio"}}
    config = models.DecoderConfig.from_hf(values, images=True)
    with refuses(ValueError, "gemma4", "checkpoint"):
        models.save_pretrained(models.Decoder(config, rngs=nnx.Rngs(0)), tmp_path / "saved")


def test_texts_are_continued_as_without_a_vision_part(given):
    _, pretrained = given
    both = filled(pretrained), filled(models.load_pretrained(pretrained.folder))
    (one,), (other,) = (models.generate(model, [[2, 5, 6]], max_tokens=4) for model in both)
    assert one.ids.tolist() == other.ids.tolist()
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
    tokenizer = make_processor().tokenizer
    with refuses(ValueError, "`prompts`", "image", "text"):
        models.generate(both[0], [question], tokenizer=tokenizer)
    pixels = batch()["pixel_values"][0, :1]
    prompt = {"tokens": [2, IMAGE, 6], "pixel_values": pixels}
    with refuses(ValueError, "`prompts`", "pixel_values", "images=True"):
        models.generate(both[1], [prompt])
    with refuses(ValueError, "`prompts`", "placeholders"):
        models.generate(both[0], [prompt])
    with refuses(ValueError, "`prompts`", "ends in an image"):
        models.generate(both[0], [{**prompt, "tokens": [2, *[IMAGE] * VECTORS]}])
    whole = [2, *[IMAGE] * VECTORS, 6]
    with refuses(ValueError, "`prompts`", "without images", "data.image_prompts"):
        models.generate(both[0], [whole])
    with refuses(ValueError, "`prompts`", "more images", 1):
        models.generate(
            both[0], [{"tokens": whole, "pixel_values": batch()["pixel_values"][0, :2]}]
        )
    with refuses(TypeError, "`prompts`", "uint8", "pixel_values"):
        models.generate(both[0], [{"tokens": whole, "pixel_values": pixels.astype(np.uint8)}])
    with refuses(TypeError, "`prompts`", "data.image_prompts", "`tokens`"):
        models.generate(both[0], [{"input_ids": whole, "pixel_values": pixels}])


@pytest.mark.exhaustive
def test_samples_answer_questions_with_images(given):
    trainer, _ = trained(given[1], TEXT, 1)
    tokenizer, pixels = make_processor().tokenizer, batch()["pixel_values"][0]
    prompt = {"tokens": [2, *[IMAGE] * VECTORS, 11], "pixel_values": pixels[:1]}
    (sample,) = callbacks.Samples([prompt], tokenizer, num_tokens=3, stop=[]).draw(trainer)
    options: Any = {"tokenizer": tokenizer, "max_tokens": 3, "stop": []}
    (one,) = models.generate(trainer, [prompt], **options)
    assert sample["text"] == one.text
    assert sample["prompt"] == tokenizer.decode([2, 11], skip_special_tokens=True)
    with refuses(ValueError, "`prompts`", "images", "`logits`"):
        callbacks.Samples([prompt], tokenizer, logits=lambda _, batch: batch["tokens"])


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen3-vl"])
def test_memory_counts_the_images_of_the_largest_prompt(kind, tmp_path):
    """A single prompt's patches take more than its tokens, wherever it stands."""
    model = filled(models.load_pretrained(checkpoint(tmp_path, kind)[1], images=True))
    arrays = batch(kind=kind)
    many, none = arrays["tokens"][0], [2, 5, 6]
    images = {name: array[0] for name, array in images_of(arrays).items()}
    prompt = {"tokens": many[: np.flatnonzero(many < IMAGE)[-1] + 1], **images}
    memory = GenerationMemory(open_source(model), None)
    entries, *patch = images["pixel_values"].shape
    vision: Any = model.config.vision
    patches = vision.num_patches((1 << (entries - 1).bit_length(), *patch))
    size = 32 if len(prompt["tokens"]) + 2 <= 32 else 48
    budget = memory.with_images(patches).needs(size, 1, resident=False)
    assert budget > memory.needs(size, 1, resident=False)
    just = GenerationMemory(open_source(model), budget).with_images(patches)
    assert just.choose(size, 1).num_rows == 1
    with refuses(MemoryError, "device_budget", "images"):
        models.generate(model, [none, prompt, none], max_tokens=2, device_budget=budget - 1)
    assert GenerationMemory(open_source(model), budget - 1).choose(size, 1).num_rows == 1


def test_prompts_of_equal_tokens_have_their_own_images(given):
    model, pixels = filled(given[1]), batch()["pixel_values"][0]
    ids = [2, *[IMAGE] * VECTORS, 6]
    prompts = [{"tokens": ids, "pixel_values": pixels[i : i + 1]} for i in (0, 1)]
    # As a row of a batch, with zeros in the unused place, and in another precision.
    padded = np.concatenate([pixels[:1], 0 * pixels[:1]])
    same = {"tokens": ids, "pixel_values": padded.astype(np.float64)}
    (row,) = models.generate(model, [same], max_tokens=1)
    both = models.generate(model, prompts, max_tokens=1)
    np.testing.assert_allclose(row.log_probs, both[0].log_probs, atol=1e-6)
    alone = [models.generate(model, [prompt], max_tokens=1)[0] for prompt in prompts]
    for one, other in zip(both, alone, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-6)
    assert abs(alone[0].log_probs - alone[1].log_probs) > 1e-3


@pytest.mark.by_default("qwen3-vl-streamed", "gemma3-resident")
@pytest.mark.parametrize(
    ("kind", "streamed"),
    in_turn(KINDS, {"resident": False, "streamed": True}, "qwen3-vl-streamed"),
)
def test_prompts_with_images_are_continued_as_by_transformers(
    kind, streamed, tmp_path, monkeypatch
):
    """Rows with three images, none and one are written side by side, two samples of each."""
    theirs, folder = checkpoint(tmp_path, kind)
    model, arrays = filled(models.load_pretrained(folder, images=True)), batch(kind=kind)
    prompts: list[Any] = []
    for row, tokens in enumerate(arrays["tokens"]):
        ids = tokens[: np.flatnonzero(tokens < IMAGE)[-1] + 1]
        images = {name: array[row] for name, array in images_of(arrays).items()}
        if not is_sized(kind):
            images = {name: x[: (ids == IMAGE).sum() // VECTORS] for name, x in images.items()}
        prompts.append({"tokens": ids, **images} if (ids >= IMAGE).any() else ids)
    options: Any = {"stop": [], "temperature": 4.0, "num_samples": 2, "max_batch": 3}
    if streamed:  # whatever its size
        form = GenerationMemory(open_source(model), None).choose(64, 3)._replace(resident=False)
        monkeypatch.setattr(GenerationMemory, "choose", lambda *_: form)
    found = models.generate(model, prompts, max_tokens=6, **options)
    for one in found:
        # A drawn placeholder is a word to us, and an image without pixels to them.
        count = next((i for i, token in enumerate(one.ids) if token >= IMAGE), 5)
        own = {name: np.asarray(x)[[one.prompt]] for name, x in images_of(arrays).items()}
        own["tokens"] = np.concatenate([one.prompt_ids, one.ids[:count]])[None]
        with torch.no_grad():
            logits = theirs(**inputs(own)).logits[0].log_softmax(-1).numpy()
        wanted = logits[len(one.prompt_ids) - 1 :][np.arange(count + 1), one.ids[: count + 1]]
        np.testing.assert_allclose(one.log_probs[: count + 1], wanted, atol=1e-5)
    assert sum(token < IMAGE for one in found for token in one.ids[:3]) > 9


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
    check_refused(given[1].folder, change, message, tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gemma4", {"model_type": "siglip_vision_model"}, "siglip.*gemma4_vision"),
        ("gemma4", {"head_dim": 6}, "`head_dim`"),
        ("gemma4", {"num_key_value_heads": 3}, "`num_key_value_heads`"),
        ("gemma4", {"rope_parameters": {"rope_type": "yarn"}}, "`rope_type` = 'yarn'"),
        ("gemma4", {"window_size": 16}, "fields.*window_size"),
        ("qwen3-vl", {"model_type": "clip"}, "clip.*qwen3_vl_vision"),
        ("qwen3-vl", {"num_heads": 5}, "`num_heads` = 5"),
        ("qwen3-vl", {"num_position_embeddings": 24}, "`num_position_embeddings` = 24"),
        ("qwen3-vl", {"out_hidden_size": 31}, "`out_hidden_size` = 31"),
        ("qwen3-vl", {"deepstack_visual_indexes": [0, 2]}, "`deepstack_visual_indexes`"),
        ("qwen3-vl", {"deepstack_visual_indexes": [1, 0]}, "`deepstack_visual_indexes`"),
        ("qwen3-vl", {"rope_parameters": {"rope_type": "yarn"}}, "`rope_type` = 'yarn'"),
        ("qwen3-vl", {"window_size": 16}, "fields.*window_size"),
        ("llama4", {"model_type": "clip"}, "clip.*llama4_vision_model"),
        ("llama4", {"projector_dropout": 0.1}, "`projector_dropout`"),
        ("llama4", {"num_attention_heads": 4}, "`num_attention_heads`"),
        ("llama4", {"pixel_shuffle_ratio": 0.3}, "`pixel_shuffle_ratio`"),
        ("llama4", {"intermediate_size": 48}, "`intermediate_size` = 48"),
        ("llama4", {"vision_output_dim": 48}, "vision_output_dim.*48"),
        ("llama4", {"rope_parameters": {"rope_type": "yarn"}}, "`rope_type`.*yarn"),
        ("internvl", {"norm_type": "batch_norm"}, "`norm_type` = 'batch_norm'"),
        ("internvl", {"image_size": [16, 20]}, r"`image_size` = \[16, 20\]"),
        ("internvl", {"image_size": 24}, "`image_seq_length` = 4"),
        ("internvl", {"use_mean_pooling": False}, "`use_mean_pooling`"),
        ("internvl", {"num_attention_heads": 5}, "`hidden_size`"),
    ],
)
def test_towers_that_are_not_supported_are_named(kind, change, message, tmp_path):
    _, folder = checkpoint(tmp_path / "given", kind)
    values = json.loads((folder / "config.json").read_text())
    check_refused(folder, {"vision_config": values["vision_config"] | change}, message, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_field_that_is_left_out_has_its_default(kind):
    """Of the vision part, and beside it, where other fields have other values than by default."""
    full = make_config(kind).to_dict()
    left_out = []
    for inner, fields in ((None, full), ("vision_config", full["vision_config"])):
        for name in fields.keys() - {"model_type", "text_config", "vision_config"}:
            rest = {key: value for key, value in fields.items() if key != name}
            values = rest if inner is None else full | {inner: rest}
            try:
                ours = models.DecoderConfig.from_hf(values, images=True)
            except ValueError:  # what no default stands for, or what contradicts it
                continue
            given = {key: value for key, value in values.items() if key != "model_type"}
            filled = transformers.AutoConfig.for_model(values["model_type"], **given).to_dict()
            assert ours == models.DecoderConfig.from_hf(filled, images=True), (inner, name)
            left_out.append(name)
    assert len(left_out) > 20


def test_pairs_turn_by_the_dimension_that_transformers_takes(tmp_path):
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    _, folder = checkpoint(tmp_path, "qwen3-vl")
    vision = models.load_pretrained(folder, images=True).config.vision
    assert isinstance(vision, QwenVisionConfig)
    for sections in ((24, 20, 20), (11, 11, 10), (40, 4, 20)):
        pairs = sum(sections)
        each = torch.arange(3.0).reshape(3, 1, 1, 1).expand(3, 1, 1, pairs).clone()
        theirs: Any = SimpleNamespace(mrope_section=sections)
        expected = Qwen3VLTextRotaryEmbedding.recomposition_frequencies(theirs, each)
        found = dataclasses.replace(vision, sections=sections).axes(Rope(dim=2 * pairs, base=1e4))
        np.testing.assert_array_equal(found, expected[0, 0, :pairs])


@pytest.mark.parametrize("kind", ["qwen2.5-vl-videos", "qwen3-vl-videos"])
def test_positions_are_those_of_transformers(kind, tmp_path):
    theirs, folder = checkpoint(tmp_path, kind)
    vision, arrays = models.load_pretrained(folder, images=True).config.vision, batch(kind=kind)
    assert isinstance(vision, QwenVisionConfig)
    given = inputs(arrays)
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    names += ("second_per_grid_ts",) * (kind == "qwen2.5-vl-videos")
    wanted, _ = theirs.model.get_rope_index(**{name: given[name] for name in names})
    tokens, grids = arrays["tokens"], arrays["image_grid_thw"]
    seconds = arrays.get("second_per_grid_ts", np.ones(grids.shape[:2], np.float32))
    squares = squares_of(jnp.asarray(grids), jnp.asarray(seconds), 32, vision.merge)
    found = vision.positions(jnp.asarray(vision.is_placeholder(tokens)), None, squares)
    np.testing.assert_array_equal(found, wanted.permute(1, 2, 0))
    for row, position in enumerate(found[:, -1, 0]):  # of text behind everything else
        images = {name: arrays[name][row] for name in IMAGE_ARRAYS if name in arrays}
        assert vision.advance(images) == position + 1 - tokens.shape[1]


def test_sections_that_do_not_fit_a_head_are_named(tmp_path):
    _, folder = checkpoint(tmp_path / "given", "qwen2.5-vl")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    for sections, message in (([2, 1], "three"), ([2, 1, 2], "sum to 4")):
        text["rope_parameters"]["mrope_section"] = sections
        check_refused(folder, {"text_config": text}, f"`mrope_section`.*{message}", tmp_path)


def check_refused(folder: Any, change: dict[str, Any], message: str, tmp_path: Any) -> None:
    """A checkpoint with this change is read for text, and refused for images."""
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    models.load_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        models.load_pretrained(tmp_path, images=True)


@pytest.mark.parametrize(
    ("family", "count"),
    [("gemma3", 4_300_079_472), ("qwen2_5_vl", 8_292_166_656), ("qwen3_vl", 8_767_123_696)],
)
def test_a_published_checkpoint_has_as_many_parameters(family, count):
    (released,) = (one for one in PUBLISHED.values() if one.config["model_type"] == family)
    config = models.DecoderConfig.from_hf(released.config, images=True)
    sizes = [math.prod(entry.shape) for entry in parameter_tensors(config)]
    assert sum(sizes) == count


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "internvl", "llama4", "qwen3-vl"])
def test_a_planned_batch_has_the_arrays_of_a_real_one_with_as_many_images_as_fit(kind):
    real, length = batch(kind=kind), 600
    vision = models.DecoderConfig.from_hf(make_config(kind).to_dict(), images=True).vision
    assert vision is not None
    planned = vision.batch_shapes(2, length)
    assert planned.keys() == {name for name in IMAGE_ARRAYS if name in real}
    for name, shape in planned.items():
        assert shape.dtype == real[name].dtype and shape.ndim == real[name].ndim
        assert (shape.shape[0], shape.shape[-1]) == (2, real[name].shape[-1])
    patches, of_real = (vision.num_patches(x["pixel_values"].shape[1:]) for x in (planned, real))
    vectors = patches / (4 if is_sized(kind) else of_real / (MOST * VECTORS))
    if kind == "qwen3-vl":
        assert vectors == length
    else:  # four tokens of text around each image
        images = planned["pixel_values"].shape[1]
        assert images <= length / (vectors / images + 4) < images + 1


def test_checkpoints_without_a_vision_part_are_refused():
    with refuses(ValueError, "gemma4", "`vision_config`"):
        values = make_config("gemma4").to_dict() | {"vision_config": None}
        models.DecoderConfig.from_hf(values, images=True)


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


def test_a_tower_has_the_defaults_of_transformers():
    from transformers import SiglipVisionConfig

    found = vars(read_siglip(Fields({})))
    assert vars(read_siglip(Fields({"vision_use_head": True}))) == found
    theirs = SiglipVisionConfig().to_dict()
    names = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    names |= {"num_channels": "channels", "layer_norm_eps": "norm_eps"}
    shared = {names.get(name, name): value for name, value in theirs.items()}
    assert len(found.keys() & shared.keys()) == 8
    assert {n: x for n, x in shared.items() if n in found} == {
        n: found[n] for n in found if n in shared
    }
