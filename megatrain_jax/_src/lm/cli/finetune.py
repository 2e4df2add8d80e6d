"""`megatrain-jax finetune`: from a checkpoint and data files to a new checkpoint or adapters."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import data, models, objectives
from megatrain_jax._src.common.outside import as_value_errors, naming
from megatrain_jax._src.common.trees import finds
from megatrain_jax._src.lm.cli import model_and_batch
from megatrain_jax._src.lm.cli import training_recipe as training
from megatrain_jax._src.lm.cli.errors import option
from megatrain_jax._src.lm.cli.finetune_settings import OBJECTIVE_KINDS, FinetuneSettings
from megatrain_jax._src.lm.cli.recipe import Job, Loss
from megatrain_jax._src.lm.cli.run_data import common_options, errors_name_option, summarised
from megatrain_jax._src.lm.cli.run_settings import listed
from megatrain_jax._src.lm.common.hf_folder import PROCESSOR_FILES, own_file
from megatrain_jax._src.lm.data.tokenizer import load_tokenizer


def run(settings: FinetuneSettings) -> int:
    """Fine-tunes; see `training.run`."""
    return training.run(settings, lambda: prepare(settings))


def prepare(settings: FinetuneSettings) -> Job:
    """Opens the checkpoint, and adds adapters if the settings ask for them.

    Raises:
        ValueError: If the checkpoint, or a setting for it, can't be used.
    """
    settings = replace(settings, model=model_and_batch.checkpoint_folder(settings.model))
    images = trains_with_images(settings)
    ignore = settings.ignore or ()
    pretrained = models.load_pretrained(settings.model, ignore=ignore, images=images)
    if settings.new_tokens is not None:
        tokenizer = tokenizer_of(settings)
        pretrained = models.resize_vocabulary(pretrained, tokenizer, seed=settings.seed)
    trainable = settings.trainable
    if images and trainable is None and not settings.has_adapters:
        trainable = DECODER
    if settings.trains_scores:
        pretrained = _with_scores(settings, pretrained)
        # A fresh head is always trained.
        if trainable is not None or settings.has_adapters:
            trainable = [*listed(trainable), "^score/"]
    elif pretrained.config.scores:
        raise ValueError(
            f"`model` = {settings.model} is a reward model: it has scores in place of the logits "
            f"that `objective`={settings.objective} needs. Pass the model that it was made from"
        )
    model, params = pretrained.model, pretrained.params
    if settings.has_adapters:
        _check_exports(settings, pretrained.config)
    if settings.adapter is not None:
        adapted = models.load_lora(pretrained, settings.adapter, seed=settings.seed)
        model, params, trainable = model_and_batch.trained_with(adapted, trainable)
    elif settings.lora_rank is not None:
        options = model_and_batch.lora_options(settings)
        more = {"seed": settings.seed, "params": params}
        model, params, trainable = model_and_batch.with_adapters(model, trainable, options, **more)
    # Fresh adapters have dropout only if it is asked for; tracing a large model takes seconds.
    may_drop = settings.adapter is not None or bool(settings.lora_dropout)
    if settings.has_adapters and may_drop and not settings.has_dropout:
        model = _without_dropout(settings, model)
    check_new_rows(settings, trainable)
    if (alpha := settings.neftune_noise_alpha) is not None:
        model = models.neftune(model, alpha=alpha, seed=settings.seed)
    reference = (settings.model, *filter(None, [settings.adapter]))
    vision = pretrained.config.vision
    of_images = {} if vision is None else vision.batch_shapes(settings.batch, settings.length)
    return Job(
        model=model,
        params=params,
        trainable=trainable,
        frozen=model_and_batch.frozen_of(
            settings.frozen, settings.has_adapters or images, pretrained.config.saved_dtype
        ),
        loss=_loss(settings),
        shapes=shapes(settings) | of_images,
        reference=reference if settings.stores_reference else (),
        prompting=lambda: _prompting(settings),
        dataset=lambda files, epochs: dataset(settings, files, epochs, images=images),
        export=lambda *given: _export(settings, *given),
    )


def _without_dropout(settings: FinetuneSettings, build: Callable[[], Any]) -> Callable[[], Any]:
    """A function that builds the model with the dropout of its adapters off, and says so.

    Exported adapters keep their dropout, for further training, as those of TRL do.
    """
    modules = [module for _, module in nnx.iter_graph(nnx.eval_shape(build))]
    shares = [module.rate for module in modules if isinstance(module, nnx.Dropout)]
    if not shares:
        return build
    print(
        f"the adapters' dropout of {max(shares)} is off: {option('objective')} "
        f"{settings.objective} trains without dropout, as TRL does",
        flush=True,
    )

    def without() -> Any:
        model = build()
        model.eval()
        return model

    return without


def _with_scores(settings: FinetuneSettings, pretrained: models.Pretrained) -> models.Pretrained:
    """The checkpoint with a score head, and the tokenizer's padding token as TRL chooses it."""
    tokenizer = tokenizer_of(settings)
    pad = tokenizer.pad_token_id
    pad = tokenizer.eos_token_id if pad is None else pad
    return models.reward_model(pretrained, pad_token_id=pad, seed=settings.seed)


def _prompting(settings: FinetuneSettings) -> tuple[Any, Callable[[str], Any]]:
    """The tokenizer, and a function that formats prompts as plain text or as questions."""
    tokenizer = tokenizer_of(settings)
    if settings.format == "text":
        return tokenizer, str
    template, variables = chat_template(settings.chat_template), settings.template_variables or {}
    templated = with_template(tokenizer, template, variables)
    return templated, lambda prompt: [{"role": "user", "content": prompt}]


def _check_exports(settings: FinetuneSettings, config: models.DecoderConfig) -> None:
    is_part = "text_config" in json.loads(config.original or "{}")
    if is_part and "adapter" in settings.exports:
        raise ValueError(
            f"`model` is a {config.family}: PEFT's names for its decoder differ from those in its "
            "files. Set `export_as`=model"
        )


def _export(
    settings: FinetuneSettings, trainer: mt.Trainer, name: str, folder: Path, template: str | None
) -> Path:
    # Without a template from the user, the tokenizer's own is copied unchanged.
    template = template if settings.chat_template else None
    dtype = settings.export_dtype
    with exported_tokenizer(settings) as source:
        options: dict[str, Any] = {"chat_template": template, "source": source}
        options["params"] = settings.params
        if name == "adapter":
            return models.save_lora(trainer, folder, dtype=dtype or "float32", **options)
        return models.save_pretrained(trainer, folder, dtype=dtype, **options)


# Pairs of answers per row assumed in a plan, before the data is read. No large array depends on it.
_PAIRS = 8

Shapes = dict[str, jax.ShapeDtypeStruct]


def dataset(
    settings: FinetuneSettings,
    files: Sequence[str] | str,
    epochs: int | None,
    *,
    images: bool = False,
) -> data.Dataset:
    """The batches of some files, read by the function of `megatrain_jax.data` for the objective.

    Args:
        settings: The settings.
        files: The files.
        epochs: How often all documents are seen; None for ever.
        images: Whether the data has images.

    Raises:
        ValueError: If they can't be used.
    """
    kind = "text" if settings.format == "text" else OBJECTIVE_KINDS[settings.objective].rows
    kind = "images" if images else kind
    read = {
        "text": data.text,
        "images": data.image_chat,
        "chat": data.chat,
        "preferences": data.preferences,
        "margins": data.preferences,
        "unpaired": data.unpaired,
        "distilled": data.distillation,
    }[kind]
    options = common_options(settings, epochs, "split" if kind == "text" else "error")
    if kind == "distilled":
        options |= {"topk": settings.topk, "tail": settings.tail}
    elif kind != "text":
        names = ("template_variables", "merge", "leading")
        options |= {name: getattr(settings, name) for name in names}
        options["chat_template"] = chat_template(settings.chat_template)
    if kind in ("chat", "images"):
        options["train_on"] = settings.train_on
    if kind == "margins":
        options["margins"] = True
    if images:
        del options["cache"]
        options["workers"] = options["workers"] or 2
    # The checkpoint's folder, or a tokenizer with new tokens.
    given = settings.model if settings.new_tokens is None else tokenizer_of(settings)
    return summarised(read(files, given, **options))


def shapes(settings: FinetuneSettings) -> Shapes:
    """The shapes of a batch, for a plan."""
    rows, length = settings.batch, settings.length
    kind = OBJECTIVE_KINDS[settings.objective].rows
    more = dict(_ARRAYS[kind])
    if settings.stores_reference:
        more["reference"] = (2 * _PAIRS, jnp.float32)
    found = model_and_batch.batch_shapes(rows, length) | {
        name: jax.ShapeDtypeStruct((rows, *([width] * (width > 0))), dtype)
        for name, (width, dtype) in more.items()
    }
    for name, dtype in _ENTRIES.items() if kind == "distilled" else ():
        found[name] = jax.ShapeDtypeStruct((rows, length, settings.topk), dtype)
    return found


def chat_template(given: str | None) -> str | None:
    """A chat template: the given text, or the contents of the file with this path."""
    if given is None or "{" in given or not (path := Path(given).expanduser()).is_file():
        return given
    with naming(path):
        return path.read_text(encoding="utf-8")


# Arrays of `topk` entries per token.
_ENTRIES = {"topk_token_ids": jnp.int32, "topk_logprobs": jnp.float32}
# Arrays besides the common ones: size of the second axis (0 for none) and dtype.
_PER_ROW = (0, jnp.float32)
_PAIRED: dict[str, tuple[int, Any]] = {"pairs": (_PAIRS, jnp.bool_), "pairs_per_row": _PER_ROW}
_CHOSEN = {"chosen_learned_per_row": _PER_ROW, "chosen_tokens_per_row": _PER_ROW}
_ARRAYS: dict[str, dict[str, tuple[int, Any]]] = {
    "chat": {},
    "preferences": _PAIRED | _CHOSEN,
    "margins": _PAIRED | _CHOSEN | {"margins": (_PAIRS, jnp.float32)},
    "unpaired": _PAIRED | {"desirable": (_PAIRS, jnp.bool_), "desirable_per_row": _PER_ROW},
    "distilled": {},
}


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


def tokenizer_of(settings: FinetuneSettings) -> Any:
    """Loads the checkpoint's tokenizer, with its new tokens.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If it can't be loaded, or the file of new tokens has none.
    """
    tokenizer = load_tokenizer(settings.model, "model")
    if settings.new_tokens is not None:
        tokenizer.add_tokens(_tokens(settings.new_tokens))
        # The config.json in that folder has the old vocabulary size.
        tokenizer.name_or_path = ""
    return tokenizer


def check_new_rows(settings: FinetuneSettings, trainable: Sequence[str] | str | None) -> None:
    """Refuses new tokens if their rows of the embeddings would not be trained.

    Args:
        settings: The settings.
        trainable: Patterns on the paths of trained parameters; None if all are trained.

    Raises:
        ValueError: If no pattern is found in the embeddings' path.
    """
    if settings.new_tokens is None or trainable is None:
        return
    if not any(finds(pattern, "embed_tokens/weight") for pattern in listed(trainable)):
        raise ValueError(
            "`new_tokens` have rows in the embeddings, but these are not trained: choose them by "
            "`trainable` or `lora_modules_to_save`; or go on from an `adapter` with embeddings"
        )


@contextmanager
def exported_tokenizer(settings: FinetuneSettings) -> Iterator[Path | None]:
    """A temporary folder with the tokenizer to export; None for the checkpoint's own."""
    if settings.new_tokens is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_of(settings).save_pretrained(folder)
        generation = own_file(Path(settings.model).expanduser(), "generation_config.json")
        if generation is not None:
            shutil.copyfile(generation, Path(folder) / "generation_config.json")
        yield Path(folder)


def _tokens(given: list[str] | str) -> list[str]:
    """The new tokens: a list, or a file with one on each line."""
    if isinstance(given, list):
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        return [given]
    tokens = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
    if not tokens:
        raise ValueError(f"`new_tokens`={given} has no line with a token")
    return tokens


def with_template(tokenizer: Any, template: str | None, variables: Mapping[str, Any]) -> Any:
    """Makes a tokenizer render questions with the settings' template and variables.

    Args:
        tokenizer: The tokenizer, which is changed and returned.
        template: The Jinja template; None for the tokenizer's.
        variables: Further variables of the template.
    """
    given = {"chat_template": template, **variables}
    tokenizer.apply_chat_template = partial(_rendered, tokenizer.apply_chat_template, **given)
    return tokenizer


def _rendered(apply: Callable[..., Any], messages: Any, **options: Any) -> Any:
    with as_value_errors("the chat template makes no question of `samples`"):
        return apply(messages, **options)


def _loss(settings: FinetuneSettings) -> Loss:
    """The loss of a run's objective."""
    if settings.objective == "sft":
        return models.next_token_loss
    # The reader has cut or filled the entries of `topk`.
    names = [name for name in OBJECTIVE_KINDS[settings.objective].options if name != "topk"]
    options = {name.removeprefix("distill_"): getattr(settings, name) for name in names}
    if settings.stores_reference:
        options["reference"] = "stored"
    return getattr(objectives, settings.objective)(**options)
