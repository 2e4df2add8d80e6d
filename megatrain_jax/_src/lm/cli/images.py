"""Fine-tuning with images: finds data with images, and checks and adapts its options."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax import data, models
from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.lm.cli.run_data import errors_name_option
from megatrain_jax._src.lm.common.hf_folder import PROCESSOR_FILES

# Without a pattern from the user, only the decoder is trained.
DECODER = "^(?!vision/)"


def trains_with_images(settings: FinetuneSettings) -> bool:
    """Whether the run trains with images: the checkpoint has an image processor, the data images.

    Without a processor, messages can't contain images, and image columns are ignored.

    Raises:
        ValueError: If the run trains with images, and a setting can't be used with them.
    """
    folder = Path(settings.model).expanduser()
    has_processor = any((folder / name).is_file() for name in PROCESSOR_FILES)
    if not has_processor or settings.format != "chat" or settings.objective == "distill":
        return False
    with errors_name_option("data"):
        found = any(data.has_images(one, columns=settings.columns) for one in settings.sources)
    if not found:
        return False
    if settings.objective != "sft":
        raise ValueError(
            f"`data` has images, which `objective`={settings.objective} doesn't learn from; sft "
            "does"
        )
    if settings.new_tokens is not None:
        raise ValueError("`data` has images, which `new_tokens` can't be combined with")
    return True


def image_shapes(
    settings: FinetuneSettings, config: models.DecoderConfig
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape of a batch's images for a plan, before the data is read: rows full of images."""
    if (vision := config.vision) is None:
        return {}
    images = max(1, settings.length // (vision.tokens_per_image + 4))
    shape = (settings.batch, images, *vision.pixels)
    return {"pixel_values": jax.ShapeDtypeStruct(shape, jnp.float32)}


def image_options(common: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `data.image_chat` shares with all functions of data."""
    workers = common["workers"] or 2
    return {name: given for name, given in common.items() if name != "cache"} | {"workers": workers}
