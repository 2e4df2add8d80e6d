"""Conversations with videos as batches, beside Transformers' processors."""

import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatrain_jax import data
from megatrain_jax._src.lm.data.image_files import ImageForm
from megatrain_jax._src.lm.data.image_processors import image_processor
from messages import refuses

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl as qwen2  # noqa: E402
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (  # noqa: E402
    Qwen3VLVideoProcessor,
    smart_resize,
)
from transformers.video_utils import VideoMetadata, make_batched_metadata  # noqa: E402

from tiny_images import (  # noqa: E402
    VECTORS,
    VIDEO,
    arrays_of,
    conversation,
    inputs,
    made,
    make_processor,
    own,
    picture,
    save_processor,
)

# Options of Transformers' processors of videos.
KINDS: dict[str, dict[str, Any]] = {
    "gemma4": {},
    "internvl": {},
    "qwen2.5-vl": {"size": {"shortest_edge": 400, "longest_edge": 900}},
    "qwen3-vl": {"size": {"shortest_edge": 1400, "longest_edge": 2000}},
}


class Formulas:
    """The formulas of a processor of videos, which needs torchvision and resizes with it."""

    valid_kwargs: Any = None
    temporal_patch_size, merge_size = 2, 2

    def __init__(self, kind: str, images: Any):
        self.kind, self.images, self.options = kind, images, KINDS[kind]

    def to_dict(self) -> dict[str, Any]:
        return self.options | {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}

    def __call__(self, videos: Any, video_metadata: Any, **_: Any) -> dict[str, Any]:
        (videos,) = videos
        known = make_batched_metadata(videos, video_metadata)
        found = [self.of(frames) for frames in videos]
        joined = {name: torch.cat([x[name] for x in found]) for name in found[0]}
        return joined | {"video_metadata": known}

    def of(self, frames: list[Image.Image]) -> dict[str, Any]:
        if self.kind == "internvl":
            found = self.images(frames, crop_to_patches=False, return_tensors="pt")
            return {"pixel_values_videos": found["pixel_values"][None]}
        if self.kind == "gemma4":
            found = self.images(frames, max_soft_tokens=70, return_tensors="pt")
            names = ("pixel_values", "image_position_ids", "num_soft_tokens_per_image")
            pixels, places, vectors = (torch.as_tensor(found[name]) for name in names)
            return {
                "pixel_values_videos": pixels,
                "video_position_ids": places,
                "num_soft_tokens_per_video": vectors[:1],
            }
        size, (width, height) = self.options["size"], frames[0].size
        bounds = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        if self.kind == "qwen3-vl":
            height, width = smart_resize(len(frames), height, width, factor=8, **bounds)
        else:
            height, width = qwen2.smart_resize(height, width, factor=8, **bounds)
        resized = [frame.resize((width, height), Image.Resampling.BICUBIC) for frame in frames]
        pixels = (np.stack(list(map(np.asarray, resized))) / 255 - 0.5) / 0.25
        pixels = torch.tensor(pixels).permute(0, 3, 1, 2)[None]
        sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        patchify: Any = Qwen3VLVideoProcessor.patchify  # of both
        patches, *grid = patchify(self, pixels, **sizes)
        return {"pixel_values_videos": patches[0], "video_grid_thw": torch.tensor([grid])}


def with_videos(kind: str) -> Any:
    processor = make_processor(kind)
    processor.video_processor = Formulas(kind, processor.image_processor)
    return processor


def frames_of(seed: int, count: int, height: int = 20, width: int = 30) -> list[Image.Image]:
    return [picture(100 * seed + n, height, width) for n in range(count)]


def video(frames: Any, fps: float | None = None) -> dict[str, Any]:
    return {"type": "video", "video": frames} | ({} if fps is None else {"fps": fps})


ROWS = {
    "one": conversation([video(frames_of(0, 4), 2), "which digit is this"], "3"),
    # The last frame stands twice.
    "odd": conversation([video(frames_of(1, 5, 9, 40), 0.7), "which"], "4"),
    "mixed": conversation(
        [
            *(video(frames_of(2, 3, 50, 9)), "this ", *own(picture(1)), " and "),
            *(video(frames_of(3, 3, 9, 40), 30.0), "is", *own(picture(2, 7, 8))),
        ],
        "5",
    ),
}


def of_transformers(processor: Any, messages: list[Any], **options: Any) -> dict[str, np.ndarray]:
    """What Transformers' processor returns for frames as they are."""
    parts = [part for part in messages[0]["content"] if part["type"] == "video"]
    known = [
        {"fps": part.get("fps"), "total_num_frames": n, "frames_indices": list(range(n))}
        for part in parts
        for n in [len(part["video"])]
    ]
    given = {"do_sample_frames": False, "video_metadata": known}
    content = [{n: x for n, x in part.items() if n != "fps"} for part in messages[0]["content"]]
    return arrays_of(
        processor.apply_chat_template(
            [{**messages[0], "content": content}, *messages[1:]],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"videos_kwargs": given},
            **options,
        )
    )


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_pixels_are_those_of_transformers(kind, row):
    processor = with_videos(kind)
    length = 512 if kind == "gemma4" else 128
    (batch,) = made([row], processor, length=length)
    wanted = of_transformers(processor, row["messages"])
    ids = wanted["input_ids"][0]
    assert batch["tokens"][0, : len(ids)].tolist() == ids.tolist()
    assert not batch["segments"][0, len(ids) :].any()
    answer = row["messages"][1]["content"][0]["text"]
    learned = processor.tokenizer.decode(batch["labels"][batch["mask"]])
    assert learned.split() == [answer, "<end_of_turn>"]
    ours = inputs(
        {
            name: array[:, : len(ids)] if array.shape == batch["tokens"].shape else array
            for name, array in batch.items()
        }
    )
    # Each of our frames is a video.
    beside = {"attention_mask", "num_frames_per_video", "mm_token_type_ids", "token_type_ids"}
    assert ours.keys() - beside == wanted.keys() - beside
    for name in ours.keys() - beside:
        array = ours[name].numpy()
        if kind == "gemma4" and "video" in name:  # a frame has fewer patches than an image may have
            array, unused = np.split(array, [wanted[name].shape[1]], axis=1)
            assert (unused == (-1 if "position" in name else 0)).all()
        np.testing.assert_allclose(array, wanted[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("fps", [0.7, 2.0, 24.0, 0.01])
@pytest.mark.parametrize("kind", ["gemma4", "internvl", "qwen3-vl"])
def test_times_of_frames_are_those_of_transformers(kind, fps):
    """As text, whose words the small tokenizer doesn't know."""
    processor = with_videos(kind)
    metadata = VideoMetadata(total_num_frames=5, fps=fps, frames_indices=list(range(5)))
    given = {
        "video_grid_thw": torch.tensor([[3, 4, 8]]),
        "num_soft_tokens_per_video": [8],
        "pixel_values_videos": torch.zeros(1, 5, 1),
        "video_metadata": [metadata],
    }
    vectors = {"gemma4": 5 * 8, "internvl": 5 * VECTORS, "qwen3-vl": 3 * 8}[kind]
    form = ImageForm(vectors, frames=5, fps=fps)
    found = image_processor(processor).expanded(form)
    assert found == processor.replace_video_token(given, video_idx=0)


@pytest.mark.parametrize("kind", ["gemma4", "qwen2.5-vl", "qwen3-vl"])
def test_questions_are_those_of_transformers(kind):
    processor, messages = with_videos(kind), ROWS["mixed"]["messages"][:1]
    (prompt,) = data.image_prompts([messages], processor)
    wanted = of_transformers(processor, messages, add_generation_prompt=True)
    assert prompt["tokens"].tolist() == wanted["input_ids"][0].tolist()
    ours = inputs({name: array[None] for name, array in prompt.items()})
    assert ours["pixel_values_videos"].shape[0] == wanted["pixel_values_videos"].shape[0]


def test_frames_in_files_and_folders_are_those_in_memory(tmp_path):
    """A folder's frames are in the order of the numbers in their names."""
    frames = frames_of(0, 11)
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / ".hidden").write_text("no image")
    for number, frame in enumerate(frames):
        frame.save(tmp_path / "clip" / f"frame{number}.png")
    paths = [f"clip/frame{number}.png" for number in range(11)]
    processor = with_videos("qwen3-vl")
    (expected,) = made([conversation([video(frames, 2), "which"])], processor, length=96)
    save_processor(processor, tmp_path / "saved")
    options = json.dumps(processor.video_processor.to_dict())
    (tmp_path / "saved" / "video_preprocessor_config.json").write_text(options)
    for given, used in ((paths, processor), ("clip", processor), ("clip", tmp_path / "saved")):
        line = json.dumps(conversation([video(given, 2), "which"]))
        (tmp_path / "rows.jsonl").write_text(line)
        assert data.has_images(tmp_path / "rows.jsonl")
        (batch,) = made(tmp_path / "rows.jsonl", used, length=96)
        for name, array in expected.items():  # from a folder, torchvision resizes if it is there
            np.testing.assert_allclose(batch[name], array, atol=0.02)


def test_videos_differ_by_their_frames_and_their_rate():
    processor = with_videos("qwen2.5-vl")
    rows = [video(frames_of(0, 4), 2), video(frames_of(0, 4), 4), video(frames_of(1, 4), 2)]
    made_of = [made([conversation([one, "a"])], processor).fingerprint for one in rows]
    assert len({*made_of}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_videos_follow_their_documents(kind):
    """Packed rows have the videos and images of their documents, in order."""
    processor = with_videos(kind)
    rows = []
    for n in range(12):
        parts = [video(frames_of(n, 2 + n % 3), 2), "and"] * (n % 3 > 0) + own(picture(n)) * (n % 2)
        rows.append(conversation([*parts, "which digit"], str(n)))
    alone = [next(iter(made([row], processor, length=512))) for row in rows]
    packed = 0
    for batch in made(rows, processor, length=512, shuffle=True, epochs=2):
        segments = batch["segments"][0]
        numbers = [
            int(
                processor.tokenizer.decode(
                    batch["labels"][0][batch["mask"][0] & (segments == n)][:1]
                )
            )
            for n in range(1, segments.max() + 1)
        ]
        packed += len(numbers) > 1
        ours = inputs(batch)
        each = [inputs(alone[n]) for n in numbers]
        for name in ours.keys() - {"input_ids", "mm_token_type_ids"}:
            expected = np.concatenate([one[name].numpy() for one in each if name in one])
            np.testing.assert_array_equal(ours[name].numpy(), expected)
    assert packed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (video("a.mp4"), "folder .*a.mp4 doesn't exist"),
        (video("https://x.y/a.mp4"), "https://x.y/a.mp4.*ffmpeg"),
        (video([]), "without frames"),
        (video(None), "without frames.* part"),
        (video([picture(0), picture(1, 9, 9)]), "several sizes"),
        (video([picture(0)] * 2, 0), "`fps`"),
        (video([picture(0)] * 2, float("inf")), "`fps`"),
        (video([picture(0), "none.png"]), "read.*none.png"),
        (video([picture(0)]), "2 frames at least"),
        (video([picture(0, 1, 300)] * 2), "1 × 300|300 × 1"),
    ],
)
def test_videos_that_can_not_be_used_are_named(given, message):
    processor = with_videos("qwen3-vl")
    rows = [conversation([given, "a"]), conversation([*own(picture(0)), "a"])]
    with pytest.raises(data.DataError, match=message):
        made(rows, processor)
    assert made(rows, processor, invalid="drop").num_documents == 1


@pytest.mark.parametrize(("file", "named"), [("", "ffmpeg"), ("readme.txt", "readme"), (None, "")])
def test_folders_without_frames_are_named(file, named, tmp_path):
    path = tmp_path / "clip"
    if file == "":
        path.write_text("no folder")
    else:
        path.mkdir()
    if file:
        picture(0).save(path / "0.png")
        (path / file).write_text("no image")
    with refuses(data.DataError, path, named):
        made([conversation([video(str(path)), "a"])], with_videos("qwen3-vl"))


def test_a_damaged_frame_is_named(tmp_path):
    for n in range(2):
        picture(n).save(tmp_path / f"{n}.png")
    (tmp_path / "1.png").write_bytes((tmp_path / "1.png").read_bytes()[:-60])
    prompt = conversation([video(str(tmp_path)), "a"])["messages"][:1]
    with refuses(ValueError, tmp_path / "1.png"):
        data.image_prompts([prompt], with_videos("qwen3-vl"))


def test_frames_may_have_more_patches_than_images():
    processor = with_videos("gemma4")
    processor.image_processor.max_soft_tokens = 70
    processor.video_processor.options = {"max_soft_tokens": 140}
    row = conversation([*own(picture(0)), video(frames_of(1, 2)), "which"])
    (batch,) = made([row], processor, length=512)
    counts = (batch["image_position_ids"][0] >= 0).all(axis=-1).sum(axis=-1)
    assert counts[0] <= 4 * 70 < counts[1] == counts[2] <= 4 * 140
    assert (batch["tokens"] == VIDEO).sum() == counts[1:].sum() // 4


def test_frames_that_lie_on_their_side_are_upright(tmp_path):
    """All of them, or the video is refused when it is opened."""
    processor, frames, exif = with_videos("qwen2.5-vl"), frames_of(0, 2), Image.Exif()
    exif[274] = 6
    for n, frame in enumerate(frames):
        frame.save(tmp_path / f"{n}.png")
        frame.transpose(Image.Transpose.ROTATE_90).save(tmp_path / f"turned{n}.png", exif=exif)
    names = (["0.png", "1.png"], ["turned0.png", "turned1.png"], ["0.png", "turned1.png"])
    given = [[str(tmp_path / name) for name in some] for some in names]
    (expected,) = made([conversation([video(frames), "a"])], processor)
    for some in given:
        (batch,) = made([conversation([video(some), "a"])], processor)
        np.testing.assert_array_equal(batch["pixel_values"], expected["pixel_values"])
    given[2][1] = str(tmp_path / "side.png")
    frames[1].transpose(Image.Transpose.ROTATE_90).save(given[2][1])
    rows = [conversation([video(given[2]), "a"]), conversation([video(frames), "a"])]
    with pytest.raises(ValueError, match=r"row 1.*30, 20.*20, 30"):
        list(made(rows, processor))
    assert made(rows, processor, invalid="drop").num_documents == 1


def test_processors_without_videos_refuse_them():
    rows = [conversation([video(frames_of(0, 2)), "a"])]
    with refuses(data.DataError, "video", "Gemma 3"):
        made(rows, make_processor())
    with refuses(data.DataError, "`data.image_chat`", "videos"):
        tokenizer = make_processor().tokenizer
        data.chat(rows, tokenizer, length=64, batch_size=1, progress=False)
    capped = with_videos("qwen3-vl")
    capped.video_processor.options = KINDS["qwen3-vl"] | {"cap_pixels_per_frame": True}
    with refuses(ValueError, "cap_pixels_per_frame"):
        image_processor(capped)


def test_frames_and_images_have_bounds_of_their_own(tmp_path):
    """In the files where Transformers looks for them, in this order."""
    processor, row = make_processor("qwen2.5-vl"), conversation([video(frames_of(0, 2)), "a"])
    save_processor(processor, tmp_path)
    config = tmp_path / "processor_config.json"
    kept, found = json.loads(config.read_text()), []
    bounds = {"min_pixels": 64, "max_pixels": 64}
    for file in ("preprocessor_config.json", "video_preprocessor_config.json", config.name):
        values = json.loads((tmp_path / file).read_text()) if (tmp_path / file).is_file() else {}
        values.pop("size", None)
        more = {"video_processor": bounds, **kept} if file == config.name else values | bounds
        (tmp_path / file).write_text(json.dumps(more))
        (batch,) = made([row], tmp_path)
        found.append(batch["image_grid_thw"][0, 0].tolist())
        bounds = {name: 4 * value for name, value in bounds.items()}
    assert found == [[1, 2, 2], [1, 2, 4], [1, 8, 10]]


def test_templates_that_show_images_in_place_of_videos_are_refused():
    processor = with_videos("qwen3-vl")
    template = processor.chat_template.replace("<|video_pad|>", "<|image_pad|>")
    with refuses(data.DataError, "`chat_template`", "images"):
        made([conversation([video(frames_of(0, 2)), "a"])], processor, chat_template=template)
