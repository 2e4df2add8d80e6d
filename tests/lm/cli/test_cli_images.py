"""The command `megatrain-jax finetune` on conversations with images."""

import io
import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from safetensors.numpy import load_file

from megatrain_jax import data
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.models.decoder import IMAGE_ARRAYS
from messages import tells

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

from tiny_images import (  # noqa: E402
    IMAGE,
    KINDS,
    TEMPLATE,
    VECTORS,
    VIDEO,
    checkpoint,
    inputs,
    make_processor,
    picture,
    save_processor,
)

STEPS = 3


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return make_given(tmp_path_factory.mktemp("given"))


def make_given(folder: Any, kind: str = "gemma3") -> Any:
    """A checkpoint with its processor, and rows of a question about images, or without one."""
    checkpoint(folder / "tiny", kind)
    save_processor(make_processor(kind), folder / "tiny")
    rows = []
    for number in range(12):
        content: Any = "which digit"
        if number % 3:
            picture(number, 12 + number, 30).save(folder / f"{number}.png")
            part = {"type": "image", "path": f"{number}.png"}
            if kind.endswith("-videos"):
                (folder / f"{number}").mkdir()
                for frame in range(3):
                    image = picture(number + frame, 12 + number, 30)
                    image.save(folder / f"{number}" / f"{frame}.png")
                part = {"type": "video", "video": f"{number}", "fps": number}
            content = [part, {"type": "text", "text": "and"}]
            content += content[:1] * (number % 3 - 1)
        answer = {"role": "assistant", "content": str(number)}
        rows.append({"messages": [{"role": "user", "content": content}, answer]})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def length_of(given: Any) -> int:
    """A length of rows that have room for a question."""
    config = json.loads((given / "tiny" / "config.json").read_text())
    return {"gemma4": 1024, "llama4": 96}.get(config["model_type"], 128)


def tune(given: Any, out: str, *options: str) -> int:
    paths = ["--model", given / "tiny", "--data", given / "rows.jsonl", "--out", given / out]
    sizes = ["--length", str(length_of(given)), "--batch", "2", "--steps", str(STEPS)]
    return main(["finetune", *map(str, paths), *sizes, *options])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "llama4"])
def test_questions_about_images_are_answered_as_by_transformers(
    kind, tmp_path, capsys, monkeypatch
):
    given = make_given(tmp_path, kind)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(given / "tiny")
    processor, folder = make_processor(kind), str(given / "tiny")

    def answer(*messages: Any) -> str:
        inputs = processor.apply_chat_template(
            list(messages),
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        inputs = inputs.to(torch.float32)
        found = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        return processor.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def question(text: str, *numbers: int) -> dict[str, Any]:
        files = [given / f"{number}.png" for number in numbers]
        parts = [{"type": "image", "image": Image.open(file)} for file in files]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    images = f"[{given / '1.png'}, {given / '4.png'}]"
    words = ["chat", folder, "--images", images, "--max-tokens", "6", "--temperature", "0"]
    assert main([*words, "--prompt", "which digit"]) == 0
    first = answer(question("which digit", 1, 4))
    assert capsys.readouterr().out.split() == first.split() and first.strip()
    monkeypatch.setattr("sys.stdin", io.StringIO("which digit\nand\n"))
    assert main(words) == 0
    said = {"role": "assistant", "content": [{"type": "text", "text": first}]}
    second = answer(question("which digit", 1, 4), said, question("and"))
    assert capsys.readouterr().out.split() == [*first.split(), *second.split()]
    for more in (["--prompt", "and"], []):
        assert main(["chat", folder, "--images", "missing.png", *more]) == 2
        assert tells(capsys.readouterr().err, "`images`", "missing.png")
    assert main(["chat", folder, "--images", "1.png", "--library", "transformers"]) == 2
    assert tells(capsys.readouterr().err, "`images`", "`library`")


def test_a_run_is_that_of_transformers(given, capsys):
    check_run(given, make_processor(), capsys)


# Videos take the way of images, and decoders with experts have the processors of those without.
_LONG = {kind for kind in KINDS if kind.endswith(("-videos", "-moe"))}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.long] * (kind in _LONG))
        for kind in KINDS
        if kind not in ("gemma3", "gemma4-plain")
    ],
)
def test_a_run_on_images_of_any_size_is_that_of_transformers(kind, tmp_path, capsys):
    check_run(make_given(tmp_path, kind), make_processor(kind), capsys)


def check_run(given: Any, processor: Any, capsys: Any) -> None:
    rates = ["--learning_rate", "0.1", "--warmup", "0", "--decay", "constant", "--clip", "null"]
    rates += ["--optimizer", "sgd"]
    assert tune(given, "run", "--held_out", "0", "--compute", "float32", *rates) == 0
    printed = capsys.readouterr().out
    assert "vision.tower.blocks.0 (frozen)" in printed
    report = json.loads((given / "run" / "report.json").read_text())
    losses = [record["loss"] for record in report["history"]]
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        given / "tiny", attn_implementation="eager"
    )
    towers = ("vision", "visual", "projector")
    trained = [p for n, p in model.named_parameters() if not any(part in n for part in towers)]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    options = {"length": length_of(given), "batch_size": 2, "epochs": None, "progress": False}
    batches = islice(data.image_chat(given / "rows.jsonl", given / "tiny", **options), STEPS)
    expected = []
    for batch in batches:
        loss = documents_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    check_export(given, processor)


def documents_loss(model: Any, batch: dict[str, np.ndarray]) -> Any:
    """Transformers' loss of a packed batch, each document by itself."""
    total = 0
    arrays = {name: batch[name] for name in IMAGE_ARRAYS if name in batch}
    for row, numbers in enumerate(batch["segments"]):
        own = {name: array[row] for name, array in arrays.items()}
        for number in range(1, numbers.max() + 1):
            here = numbers == number
            given = {"tokens": batch["tokens"][row][here]}
            taken, own = divided(own, given["tokens"])
            found = inputs({name: array[None] for name, array in (given | taken).items()})
            wanted = np.where(batch["mask"][row], batch["labels"][row], -100)[here]
            total = total + torch.nn.functional.cross_entropy(
                model(**found).logits[0], torch.tensor(wanted).long(), reduction="sum"
            )
    return total / batch["mask"].sum()


def divided(arrays: dict[str, np.ndarray], tokens: np.ndarray) -> tuple[Any, Any]:
    """The arrays of the images of a document, and those of the documents behind it."""
    inside = (tokens == IMAGE) | (tokens == VIDEO)
    counts = dict.fromkeys(arrays, int((inside & ~np.append(False, inside[:-1])).sum()))
    if (grids := arrays.get("image_grid_thw")) is not None:
        sizes = grids.prod(axis=1).cumsum()
        counts = dict.fromkeys(arrays, int(np.searchsorted(sizes, 4 * inside.sum()) + inside.any()))
        counts["pixel_values"] = 4 * int(inside.sum())
    elif "image_position_ids" not in arrays:
        counts = dict.fromkeys(arrays, int(inside.sum()) // VECTORS)
    return (
        {name: array[: counts[name]] for name, array in arrays.items()},
        {name: array[counts[name] :] for name, array in arrays.items()},
    )


def check_export(given: Any, processor: Any) -> None:
    """The export has its processor, and the vision part of the checkpoint."""
    exported = given / "run" / "model"
    transformers.AutoModelForImageTextToText.from_pretrained(exported)
    again = transformers.AutoImageProcessor.from_pretrained(exported)
    assert again.to_dict() == processor.image_processor.to_dict()
    read, saved = (load_file(at / "model.safetensors") for at in (given / "tiny", exported))
    changed = {name for name in read if read[name].tobytes() != saved[name].tobytes()}
    assert changed and not any("vis" in name or "projector" in name for name in changed)


@pytest.mark.long
def test_adapters_are_trained_with_images(given):
    options = ["--lora_rank", "2", "--lora_targets", "layers/.*/[qv]_proj", "--export_as", "model"]
    assert tune(given, "adapters", "--held_out", "0.2", *options) == 0
    transformers.AutoModelForImageTextToText.from_pretrained(given / "adapters" / "model")


def test_a_folder_is_a_video_of_its_frames(given, tmp_path, capsys):
    picture(0).save(tmp_path / "0.png")
    question = ["chat", str(given / "tiny"), "--images", str(tmp_path), "--prompt", "and"]
    assert main(question) == 2
    assert tells(capsys.readouterr().err, "`images`", "video", "Gemma 3")
    (tmp_path / "a.mp4").write_bytes(b"no folder")
    question[3] = str(tmp_path / "a.mp4")
    assert main(question) == 2
    said = capsys.readouterr().err
    assert tells(said, "`images`", "a.mp4", "ffmpeg") and "conversations" not in said


@pytest.mark.exhaustive
def test_images_need_a_processor(given, tmp_path, capsys):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((given / "tiny" / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    command = ["finetune", "--model", tmp_path, "--data", given / "rows.jsonl"]
    command += ["--out", tmp_path / "out", "--length", 48, "--batch", 2, "--steps", 1]
    assert main(list(map(str, command))) == 2
    assert tells(capsys.readouterr().err, "content", "text")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--objective", "dpo"], "images `objective`=dpo"),
        (["--new_tokens", "[<a>]"], "`new_tokens`"),
        (["--too_long", "cut"], "`too_long`"),
    ],
)
def test_settings_that_images_can_not_have(given, options, message, capsys):
    assert tune(given, "refused", "--held_out", "0", *options) == 2
    assert tells(capsys.readouterr().err, *message.split())
