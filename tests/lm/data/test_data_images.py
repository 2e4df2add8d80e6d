"""Conversations with images as batches, beside Transformers' processor."""

import io
import json
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from megatrain_jax import data
from megatrain_jax._src.lm.data.image_files import ImageForm, ImageReference
from megatrain_jax._src.lm.data.image_processors import image_processor
from megatrain_jax._src.lm.models.decoder import IMAGE_ARRAYS
from messages import refuses, tells

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

import transformers  # noqa: E402

from tiny_images import (  # noqa: E402
    IMAGE,
    LENGTH,
    TEMPLATE,
    VECTORS,
    arrays_of,
    conversation,
    made,
    make_processor,
    own,
    picture,
    save_processor,
)

KINDS = ["gemma3", "gemma4", "internvl", "llama4", "qwen2.5-vl", "qwen3-vl"]


@pytest.fixture(scope="module")
def processor():
    return make_processor()


ROWS = [
    conversation([*own(picture(0)), "which digit is this"], "3"),
    conversation(["this ", *own(picture(1, 50, 9)), " and ", "this ", *own(picture(2, 7, 8))], "4"),
    conversation(["which digit"], "5"),
    conversation([*own(picture(3), picture(4), picture(5)), "and"], "6"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ROWS, ids=["one", "two", "none", "three"])
def test_tokens_and_pixels_are_those_of_transformers(row, kind):
    processor = make_processor(kind)
    (batch,) = made([row], processor, length=256 if kind == "gemma4" else 96)
    expected = processor.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_tensors="pt"
    )
    expected = arrays_of(expected)
    ids = expected["input_ids"][0]
    assert batch["tokens"][0, : len(ids)].tolist() == ids.tolist()
    assert not batch["segments"][0, len(ids) :].any()
    learned = batch["labels"][batch["mask"]]
    answer = row["messages"][1]["content"][0]["text"]
    assert processor.tokenizer.decode(learned).split() == [answer, "<end_of_turn>"]
    count, least = len(expected.get("pixel_values", ())), 4 if "qwen" in kind else 1
    assert (batch["pixel_values"][0, :count] == expected.get("pixel_values", 0)).all()
    assert batch["pixel_values"].shape[1] == max(least, count)
    grids = expected.get("image_grid_thw", [[0, 0, 0]])
    assert "qwen" not in kind or (batch["image_grid_thw"] == grids).all()
    places = expected.get("image_position_ids", -1)
    assert kind != "gemma4" or (batch["image_position_ids"][0] == places).all()


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "llama4", "qwen3-vl"])
def test_prompts_are_those_of_transformers(kind, tmp_path):
    processor = make_processor(kind)
    picture(1, 50, 9).save(tmp_path / "one.png")
    asked = [row["messages"][:1] for row in ROWS]
    in_a_file = conversation(["this ", *own("one.png", picture(2, 7, 8)), " and"])["messages"][:1]
    same = conversation(["this ", *own(picture(1, 50, 9), picture(2, 7, 8)), " and"])
    found = data.image_prompts([*asked, in_a_file], processor, folder=tmp_path)
    for prompt, messages in zip(found, [*asked, same["messages"][:1]], strict=True):
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        wanted = processor.apply_chat_template(messages, add_generation_prompt=True, **options)
        wanted = arrays_of(wanted)
        assert prompt.keys() == (wanted.keys() & {*IMAGE_ARRAYS}) | {"tokens"}
        assert prompt["tokens"].tolist() == wanted["input_ids"][0].tolist()
        for name in prompt.keys() - {"tokens"}:
            np.testing.assert_array_equal(prompt[name], wanted[name])
    with refuses(ValueError, "conversations[1]", "two.png"):
        data.image_prompts([asked[0], conversation(own("two.png"))["messages"][:1]], processor)
    with refuses(TypeError, "conversations", "list of such lists"):
        data.image_prompts(asked[0], processor)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3-vl"])
@pytest.mark.parametrize("marked", [False, True])
def test_answers_between_images_are_learned(marked, kind):
    processor = make_processor(kind)
    template, said = processor.chat_template, "{{ m.content | trim }}"
    if marked:
        own_part = "{% if m.role == 'assistant' %}{% generation %}"
        own_part += f"{said}<end_of_turn>{{% endgeneration %}}{{% else %}}{said}{{% endif %}}"
        template = template.replace(said, own_part)
    first, second = conversation([*own(picture(0, 8, 40)), "which"], "3"), ROWS[1]
    row = {"messages": first["messages"] + second["messages"]}
    (batch,) = made([row], processor, chat_template=template)
    learned = batch["labels"][batch["mask"]]
    end = "<end_of_turn>"
    assert processor.tokenizer.decode(learned).split() == ["3", end, "4", end]


def test_placeholders_are_never_labels(processor):
    (batch,) = made([ROWS[1]], processor, train_on="all")
    labels = batch["labels"][0]
    inside = np.isin(labels, (IMAGE, IMAGE + 1, IMAGE + 2))
    assert inside.sum() == 2 * (VECTORS + 2)
    assert not batch["mask"][0, inside].any()
    text = (batch["segments"][0, 1:] == 1) & ~inside[:-1]
    assert batch["mask"][0, :-1][text].all()


def in_column(count: int, places: bool, plain: bool) -> dict[str, Any]:
    images = [picture(seed) for seed in range(count)]
    row = conversation([*[{}] * count * places, "which digit"])
    if plain:
        row["messages"][0]["content"] = "which digit"
    return row | ({"images": images} if count > 1 else {"image": images[0]})


@pytest.mark.parametrize(
    "row",
    [in_column(2, True, False), in_column(2, False, False), in_column(2, False, True)]
    + [
        {"images": [picture(0), picture(1)], "prompt": "which digit", "completion": "7"},
        {
            "images": [picture(0), picture(1)],
            "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}],
            "completion": [{"role": "assistant", "content": "7"}],
        }
        | {"merge": None},
    ],
)
def test_a_column_of_images(row, processor):
    row = {name: value for name, value in row.items() if name != "merge"}
    if isinstance(row.get("prompt"), list):
        row["prompt"][0]["content"].append({"type": "text", "text": "which digit"})
    given = [(row, None)]
    given += [({**row, "images": None, "shots": row["images"]}, {"images": "shots"})]
    if "messages" in row:
        given += [(row | {"messages": json.dumps(row["messages"])}, None)]
    if "messages" in row:
        # As in a table of rows of several kinds, where every turn has all names.
        names = {"role": "from", "content": "value"}
        turns = [{names[name]: x for name, x in turn.items()} for turn in row["messages"]]
        given += [(row | {"messages": [dict.fromkeys(names) | turn for turn in turns]}, None)]
    (expected,) = made([conversation([*own(picture(0), picture(1)), "which digit"])], processor)
    for one, columns in given:
        (batch,) = made([one], processor, columns=columns)
        for name, array in expected.items():
            assert (batch[name] == array).all(), name
        assert data.has_images([one], columns=columns)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    image.save(file := io.BytesIO(), kind)
    return file.getvalue()


def test_images_in_files_are_those_in_memory(processor, tmp_path):
    datasets = pytest.importorskip("datasets")
    image = picture(0)
    (tmp_path / "pictures").mkdir()
    image.save(tmp_path / "pictures" / "a.png")
    # Turned by its camera: the pixels lie on their side, and a tag says so.
    exif = Image.Exif()
    exif[274] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    given = [image, encoded(image), str(tmp_path / "pictures" / "a.png"), tmp_path / "turned.png"]
    (expected,) = made([conversation([*own(image), "which"])], processor)
    sources: list[Any] = [[conversation([*own(one), "which"])] for one in given]
    lines = json.dumps(conversation([*own("pictures/a.png"), "which"]))
    (tmp_path / "rows.jsonl").write_text(lines)
    rows = datasets.Dataset.from_list([conversation([{}, "which"]) | {"images": [image]}])
    features = rows.features | {"images": datasets.List(datasets.Image())}
    rows = rows.cast(datasets.Features(features))
    rows.to_parquet(tmp_path / "rows.parquet")
    inside = datasets.Dataset.from_list([conversation([*own(encoded(image)), "which"])])
    turn = inside.features["messages"].feature
    turn["content"] = datasets.List(turn["content"].feature | {"image": datasets.Image()})
    inside = inside.cast(datasets.Features({"messages": datasets.List(turn)}))
    sources += [tmp_path / "rows.jsonl", rows, tmp_path / "rows.parquet", inside]
    for source in sources:
        (batch,) = made(source, processor)
        assert batch["tokens"].tolist() == expected["tokens"].tolist()
        assert (batch["pixel_values"] == expected["pixel_values"]).all()
    # Images of `datasets` stay encoded.
    for source in (rows, inside):
        (reference,) = made(source, processor)._corpus.images[0]
        assert isinstance(reference, ImageReference) and isinstance(reference.source, bytes)


def in_modes() -> dict[str, Image.Image]:
    """Pictures with transparency, with a palette, turned by a tag, and with other numbers."""
    image, rng = picture(0, 30, 20), np.random.default_rng(0)
    alpha = Image.fromarray(rng.integers(0, 255, (image.height, image.width), dtype=np.uint8))
    clear, of_colours = image.convert("RGBA"), image.quantize(16)
    clear.putalpha(alpha)
    turned, palette = image.copy(), of_colours.copy()
    turned.getexif()[274] = 6
    palette.info["transparency"] = 3
    grey, numbers = (
        clear.convert("LA"),
        Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30)),
    )
    found = {"alpha": clear, "colours": of_colours, "palette": palette, "turned": turned}
    return found | {"grey": grey, "cmyk": image.convert("CMYK"), "numbers": numbers}


@pytest.mark.parametrize("name", in_modes())
def test_pixels_of_any_mode_are_those_of_transformers(name, processor, tmp_path, monkeypatch):
    image = in_modes()[name]
    file = tmp_path / ("image.tiff" if name == "cmyk" else "image.png")
    image.save(file, exif=image.getexif())
    datasets = pytest.importorskip("datasets")
    column = datasets.Dataset.from_dict({"images": [{"bytes": file.read_bytes(), "path": None}]})
    decoded = column.cast_column("images", datasets.Image())[0]["images"]
    with Image.open(file) as opened:
        opened.load()
    # With fields of the published Gemma 3, which leaves this one open.
    monkeypatch.setattr(processor.image_processor, "do_convert_rgb", None)
    for given, theirs in ((str(file), str(file)), (opened, opened), (file.read_bytes(), decoded)):
        (batch,) = made([conversation([*own(given), "which"])], processor)
        expected = processor.apply_chat_template(
            conversation([*own(theirs), "which"])["messages"],
            tokenize=True,
            return_dict=True,
            return_tensors="np",
        )
        assert (batch["pixel_values"][0] == expected["pixel_values"]).all(), type(given)


def test_premultiplied_grey_is_read_as_grey_with_transparency(processor):
    """Pillow gives such images, and converts them to nothing else."""
    grey = in_modes()["grey"].convert("La")
    found = [
        made([conversation([*own(image), "which"])], processor)
        for image in (grey, grey.convert("LA"))
    ]
    ours, expected = ([batch["pixel_values"] for batch in batches] for batches in found)
    np.testing.assert_array_equal(ours, expected)


def test_images_follow_their_documents(processor):
    rows = [
        conversation([*own(*[picture(10 * n + k) for k in range(n % 4)]), "which digit"], str(n))
        for n in range(20)
    ]
    dataset = made(rows, processor, shuffle=True, epochs=3, batch_size=2)
    counts = set()
    for batch in dataset:
        counts.add(batch["pixel_values"].shape[1])
        names = ("tokens", "segments", "pixel_values", "labels", "mask")
        for tokens, segments, pixels, labels, mask in zip(*map(batch.get, names), strict=True):
            at = 0
            for number in range(1, segments.max() + 1):
                answer = labels[mask & (segments == number)]
                n = int(processor.tokenizer.decode(answer[:1]))
                for k in range(n % 4):
                    expected = processor.image_processor([picture(10 * n + k)], return_tensors="np")
                    assert (pixels[at] == expected["pixel_values"][0]).all()
                    at += 1
            assert at == (tokens == IMAGE).sum() // VECTORS
            assert not pixels[at:].any()
    assert len(counts) == 1


@pytest.mark.parametrize("kind", ["gemma4", "internvl", "llama4", "qwen3-vl"])
def test_images_of_any_size_follow_their_documents(kind, tmp_path):
    processor = make_processor(kind)
    options = {"crop_to_patches": True} if kind == "internvl" else {}
    sizes = [(8, 40), (16, 16), (20, 30), (50, 9)]
    rows = []
    for n in range(16):
        for k in range(n % 4):
            picture(n, *sizes[(n + k) % 4]).save(tmp_path / f"{n}-{k}.png")
        files = [str(tmp_path / f"{n}-{k}.png") for k in range(n % 4)]
        rows.append(conversation([*own(*files), "which digit"], str(n)))
    save_processor(processor, tmp_path)
    # Which resizes by torchvision if that is installed.
    reader = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    length = 256 if kind == "gemma4" else 96
    dataset = made(rows, tmp_path, length=length, shuffle=True, epochs=3, batch_size=2)
    shapes, packed = set(), 0
    for batch in dataset:
        grids = batch.get("image_grid_thw", batch.get("image_position_ids", batch["segments"]))
        shapes.add((batch["pixel_values"].shape[1:], grids.shape[1:]))
        arrays = (batch[name] for name in ("segments", "pixel_values", "labels", "mask"))
        for segments, pixels, labels, mask, grid in zip(*arrays, grids, strict=True):
            given = []
            for number in range(1, segments.max() + 1):
                answer = labels[mask & (segments == number)]
                n = int(processor.tokenizer.decode(answer[:1]))
                given += [picture(n, *sizes[(n + k) % 4]) for k in range(n % 4)]
            packed += segments.max() > 1
            expected: Any = {}
            if given:
                expected = reader(given, return_tensors="pt", **options)
                expected = arrays_of(expected)
            kept = [("pixel_values", pixels, 0)]
            kept += [("image_grid_thw", grid, 0)] if "qwen" in kind else []
            kept += [("image_position_ids", grid, -1)] if kind == "gemma4" else []
            for name, array, unused in kept:
                count = len(expected.get(name, ()))
                assert (array[:count] == expected.get(name, unused)).all()
                assert (array[count:] == unused).all()
    assert len(shapes) == 1 and packed


@pytest.mark.parametrize("tiles", [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_tokens_between_tiles_are_those_of_transformers(tiles):
    """Without the processor of images, which needs torchvision."""

    class ImageProcessor(SimpleNamespace):
        def __call__(self, **_):
            pixels = torch.zeros((1, 3, 16, 16), dtype=torch.bfloat16)
            return {"pixel_values": pixels, "aspect_ratios": [[1, 1]]}

    other = make_processor()
    theirs = transformers.Llama4Processor(other.image_processor, other.tokenizer, patch_size=4)
    theirs.image_processor = ImageProcessor(size={"height": 16, "width": 16})
    ours = image_processor(theirs)
    rows, columns = tiles
    form = ImageForm(VECTORS * (rows * columns + (rows * columns > 1)), rows, columns)
    assert ours.expanded(form) == theirs._prompt_split_image(tiles, VECTORS)


def test_tiles_are_those_of_an_upright_image(tmp_path):
    # It lies on its side, where it would be one tile instead of three, and a tag says so.
    exif, processor = Image.Exif(), make_processor("internvl")
    exif[274] = 6
    picture(0, 6, 9).save(tmp_path / "a.png", exif=exif)
    for given in (tmp_path / "a.png", (tmp_path / "a.png").read_bytes()):
        (batch,) = made([conversation([*own(given), "which"])], processor)
        with Image.open(tmp_path / "a.png") as image:
            upright = ImageOps.exif_transpose(image)
        expected = processor.image_processor([upright], return_tensors="np", crop_to_patches=True)
        assert batch["pixel_values"].shape[1] == 3
        assert (batch["pixel_values"][0] == expected["pixel_values"]).all()


def test_an_image_of_another_size_than_before_is_named(tmp_path):
    picture(0).save(tmp_path / "a.png")
    rows = [conversation([*own(tmp_path / "a.png"), "a"])]
    dataset = made(rows, make_processor("qwen3-vl"))
    picture(0, 40, 40).save(tmp_path / "a.png")
    with refuses(ValueError, "row 1", 9, 8):
        next(iter(dataset))


def test_an_image_that_the_processor_refuses_is_named():
    rows = [conversation([*own(picture(0, 1, 201)), "a"]), ROWS[0]]
    with refuses(data.DataError, "row 1", "201 × 1", "image"):
        made(rows, make_processor("qwen3-vl"))
    assert made(rows, make_processor("qwen3-vl"), invalid="drop").num_documents == 1


def test_any_document_of_a_length_has_room_for_its_images(processor):
    def size_of(row: Any) -> int:
        return made([row], processor).num_tokens

    def blank(spaces: int) -> dict[str, Any]:
        return conversation([f"which{' ' * spaces}digit"])

    row = conversation([*own(picture(0), picture(1)), "which"])
    as_long = blank(1 + size_of(row) - size_of(blank(1)))
    assert size_of(as_long) == size_of(row)
    expected = processor.image_processor([picture(0), picture(1)], return_tensors="np")
    for rows in ([row, as_long], [as_long, row]):
        batches = made(rows, processor, length=size_of(row))
        batch = next(one for one in batches if (one["tokens"] == IMAGE).any())
        assert (batch["pixel_values"][0] == expected["pixel_values"]).all()


def test_documents_differ_by_their_images(processor, tmp_path):
    rows = [conversation([*own(picture(n)), "which digit"]) for n in range(6)]
    same = made(rows[:3], processor), made(rows[:2] + rows[3:4], processor)
    assert same[0].fingerprint != same[1].fingerprint
    train, held = made(rows, processor).split(0.5)
    assert (train.num_documents, held.num_documents) == (3, 3)
    colours = picture(0).quantize(4)
    other = colours.copy()
    other.putpalette([255 - x for x in colours.getpalette() or []])
    made_of = [
        made([conversation([*own(x), "a"])], processor).fingerprint for x in (colours, other)
    ]
    assert made_of[0] != made_of[1]
    # A file is known by its name and its size.
    digests = set()
    for colour in (picture(0), picture(0).quantize(4)):
        colour.save(tmp_path / "a.png")
        digests.add(made([conversation([*own(tmp_path / "a.png"), "a"])], processor).fingerprint)
    assert len(digests) == 2
    twice = made([rows[0], rows[0]], processor)
    with refuses(ValueError, "two", "documents"):
        twice.split(0.5)


def test_mixtures_have_one_number_of_images(processor):
    one, three = made(ROWS[:1], processor, epochs=4), made(ROWS[3:], processor, epochs=4)
    shapes = {batch["pixel_values"].shape for batch in data.mix([one, three], [1, 1])}
    assert shapes == {(1, 3, 3, 24, 24)}
    text = data.chat([ROWS[2]], processor.tokenizer, length=LENGTH, batch_size=1, progress=False)
    with refuses(ValueError, "`image_chat`"):
        data.mix([one, text])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (conversation([*own("none.png"), "a"]), "image .*read.*none.png"),
        (conversation([*own(b"no image"), "a"]), "image .*read"),
        (conversation([*own("https://a.org/b.png")]), "image .*file.*https://a.org"),
        (conversation([*own(3), "a"]), "image .*kind.*int"),
        (conversation([{}, "a"]), "fewer images"),
        (conversation([{}, "a"]) | {"images": [picture(0)] * 2}, "images .*place.*1"),
        (conversation(["a", {"type": "video", "video": "a.mp4"}]), "video"),
        (conversation([{"type": "table"}, *own(picture(0))]), "content .*text .*image"),
        (conversation(["\ue0f1", *own(picture(0))]), "private"),
        (conversation(["<start_of_image>", *own(picture(0))]), "special"),
        (
            {"messages": [*ROWS[2]["messages"][:1], {**ROWS[0]["messages"][0], "role": "gpt"}]},
            "image .*turn 2",
        ),
    ],
)
def test_rows_that_can_not_be_used_are_named(row, message, processor):
    with pytest.raises(data.DataError, match=message):
        made([row, ROWS[0]], processor)
    assert made([row, ROWS[0]], processor, invalid="drop").num_documents == 1


def test_a_system_message_may_have_an_image(processor):
    (question, answer), image = ROWS[2]["messages"], {"type": "image", "image": picture(0)}
    row = {"messages": [{"role": "system", "content": [image]}, question, answer]}
    (batch,) = made([row], processor)
    expected = processor.image_processor([picture(0)], return_tensors="np")
    assert (batch["pixel_values"][0] == expected["pixel_values"]).all()
    assert (batch["tokens"] == IMAGE).sum() == VECTORS


def test_advice_on_long_conversations_can_be_taken(processor):
    with refuses(data.DataError, 'too_long="drop"') as caught:
        made([ROWS[3], ROWS[2]], processor, length=16)
    assert '"split"' not in str(caught.value)
    assert made([ROWS[3], ROWS[2]], processor, length=16, too_long="drop").num_documents == 1


def test_a_template_that_leaves_images_out_is_refused(processor):
    template = TEMPLATE.replace("<start_of_image>", "")
    with refuses(data.DataError, "`chat_template`", "images", 0, 1):
        made(ROWS[:1], processor, chat_template=template)


def test_an_image_that_vanishes_is_named(processor, tmp_path):
    picture(0).save(tmp_path / "a.png")
    dataset = made([conversation([*own(tmp_path / "a.png"), "a"])], processor)
    (tmp_path / "a.png").unlink()
    with pytest.raises(ValueError, match=r"`source`, row 1, \S*a.png, .*read"):
        next(iter(dataset))


def test_a_damaged_image_is_named_with_advice(processor, tmp_path):
    file = tmp_path / "a.png"
    picture(0, 50, 50).save(file)
    file.write_bytes(file.read_bytes()[:-40])
    rows = [conversation([*own(file), "a"]), ROWS[0]]
    dataset = made(rows[:1], processor)
    with pytest.raises(ValueError, match=r"row 1, \S*a.png, .*read.*Repair"):
        next(iter(dataset))
    # Only a whole decode finds the damage; a file, its bytes, and what PIL has opened of it.
    with Image.open(file) as opened:
        for given in (file, file.read_bytes(), opened):
            rows[0] = conversation([*own(given), "a"])
            dataset = made(rows, processor, invalid="drop")
            assert dataset.num_documents == 1
            ((why, number),) = dataset.summary.left_out.items()
            assert tells(why, "image", "read") and number == 1


def of_format(name: str) -> bytes:
    file = io.BytesIO()
    picture(0).convert("RGB").save(file, name)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge", "EPS", "PDF", "PSD"])
def test_only_ordinary_images_are_opened(kind, processor, tmp_path, monkeypatch):
    def spawn(*_, **__):
        raise AssertionError("another program was started")

    monkeypatch.setattr("subprocess.Popen", spawn)
    file, given = tmp_path / "a.png", []
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    elif kind == "huge":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 24 * 30 - 1)
        picture(0, 30, 24).save(file)
    else:
        # The header of a PSD file, which Pillow doesn't write.
        size = (20).to_bytes(4, "big")
        psd = b"8BPS\0\1" + bytes(6) + b"\0\3" + size + size + b"\0\x08\0\3" + bytes(14)
        file.write_bytes(psd if kind == "PSD" else of_format(kind))
    if file.is_file() and kind != "huge":
        given.append(file.read_bytes())
        if kind == "EPS":
            given.append(Image.open(io.BytesIO(file.read_bytes())))
    if kind == "huge":
        given.append(picture(0, 30, 24))
    faults = dict.fromkeys(("pipe", "device", "folder"), "regular") | {"huge": ""}
    for one in (file, *given):
        other = "format" if isinstance(one, Image.Image) else "formats"
        why = faults.get(kind, other)
        rows = [conversation([*own(one), "a"]), ROWS[2]]
        with pytest.raises(data.DataError, match=rf"row 1: .*image .*read: .*{why}"):
            made(rows, processor)
        assert made(rows, processor, invalid="drop").num_documents == 1
    if kind == "huge":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 24 * 30)
        assert made([conversation([*own(file), "a"])], processor).num_documents == 1


@pytest.mark.parametrize("name", ["BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"])
def test_pictures_of_the_usual_formats_are_read(name, processor, tmp_path):
    content = of_format(name)
    (tmp_path / "a").write_bytes(content)
    for given in (content, tmp_path / "a"):
        (batch,) = made([conversation([*own(given), "a"])], processor)
        with Image.open(tmp_path / "a") as image:
            expected = processor.image_processor([image.convert("RGB")], return_tensors="np")
        assert (batch["pixel_values"][0] == np.asarray(expected["pixel_values"])).all()


def test_a_picture_that_becomes_a_pipe_is_refused(processor, tmp_path):
    picture(0).save(tmp_path / "a.png")
    dataset = made([conversation([*own(tmp_path / "a.png"), "a"])], processor)
    (tmp_path / "a.png").unlink()
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"row 1, \S*a.png, .*read.*pipe"):
        next(iter(dataset))


def test_what_is_not_supported_is_refused(processor, tmp_path):
    with refuses(data.DataError, "`data.image_chat`", "images"):
        data.chat([ROWS[0]], processor.tokenizer, length=LENGTH, batch_size=1, progress=False)
    with refuses(TypeError, "`processor`", "folder"):
        made(ROWS, processor.tokenizer)

    class OtherProcessor:
        image_processor = None

    with refuses(ValueError, "OtherProcessor", "Gemma3Processor"):
        made(ROWS, OtherProcessor())
    cutting = make_processor()
    cutting.image_processor.do_pan_and_scan = True
    with refuses(ValueError, "crops"):
        made(ROWS, cutting)
    with pytest.raises(ValueError, match="`too_long`"):
        made(ROWS, processor, too_long="cut")
    with refuses(ValueError, "`processor`", tmp_path):
        made(ROWS, tmp_path)


def test_rows_with_images_are_found(processor, tmp_path):
    assert data.has_images(ROWS) and not data.has_images([ROWS[2]])
    assert not data.has_images([ROWS[2], ROWS[0]], most=1)
    assert data.has_images([{"image": "a.png", "prompt": "a", "completion": "b"}])
    linked = {"type": "image_url", "image_url": {"url": "a.png"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(conversation([linked, "a"])) + "\nno JSON\n")
    assert data.has_images(tmp_path / "a.jsonl")
    # A file need not have every column that is named.
    names = {"prompt": "q", "completion": "a", "images": "picture"}
    rows = [{"q": "what", "a": "a cat"}, {"q": "what", "a": "a cat", "picture": "a.png"}]
    assert data.has_images([[row] for row in rows], columns=names)
    assert not data.has_images([[rows[0]] * 2, [rows[0], rows[1]]], most=1, columns=names)
