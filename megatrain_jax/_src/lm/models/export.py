"""Writes a trained decoder as a Hugging Face checkpoint, one tensor at a time.

An export is written beside its folder and renamed when it is complete, so an interrupted one leaves
the earlier export intact:

    mine.unfinished-x7/    is written
    mine/                  exchanges names with it, in one system call
    mine.unfinished-x7/    is now the earlier export, and is deleted

What a killed process leaves is removed by a later export beside it (`common/unfinished.py`).
Each export lists its own files and their checksums in `megatrain_export.json`. A folder is only
replaced if it contains exactly these files, unchanged.
"""

import ctypes
import errno
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import xxhash

from megatrain_jax import Trainer, distributed
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.activity import getting_on
from megatrain_jax._src.common.computed_array import ComputedArray
from megatrain_jax._src.common.unfinished import UnfinishedFolder, naming_file, sync_tree
from megatrain_jax._src.lm.common import hf_folder
from megatrain_jax._src.lm.common.prompts import check_template
from megatrain_jax._src.lm.models.config import DecoderConfig, config_end_tokens
from megatrain_jax._src.lm.models.decoder import Decoder, policy_of
from megatrain_jax._src.lm.models.lora import adapted_modules, merged_matrix, name_of
from megatrain_jax._src.lm.models.pretrained import (
    ParameterPath,
    ParameterTensors,
    Pretrained,
    family_of,
    filled,
    leaves,
    others,
    parameter_tensors,
)
from megatrain_jax._src.lm.models.quantised import check_decoded, open_weights
from megatrain_jax._src.lm.models.tensors import (
    CODES,
    NamedTensor,
    check_known,
    listed,
    stack_experts,
    write_tensors,
)

MARKER = "megatrain_export.json"
# Flags of Linux's renameat2: relative to the current folder; exchange names.
_CURRENT_FOLDER, _EXCHANGE = -100, 2


def new_folder(folder: str | PathLike[str], *, overwrite: bool) -> Path:
    """Returns the path of a folder to be written.

    Args:
        folder: The user's argument `folder`.
        overwrite: Whether an earlier export may be there.

    Raises:
        TypeError: If it is not a path, or `overwrite` is not a Boolean.
        FileExistsError: If it is not empty; with `overwrite`, if it is not an unchanged export.
    """
    path = Path(checks.path("folder", folder))
    overwrite = checks.boolean("overwrite", overwrite)
    is_empty = path.is_dir() and not any(path.iterdir())
    if not os.path.lexists(path) or (is_empty and not path.is_symlink()):
        return path
    if not overwrite:
        # The checksums are not compared here: that would read all weights.
        is_export = (path / MARKER).is_file()
        hint = ", or pass `overwrite=True` to replace an unchanged export" if is_export else ""
        raise FileExistsError(f"there is something at {path} already: choose a new `folder`{hint}")
    if (stranger := _why_not_export(path)) is not None:
        raise FileExistsError(
            "`overwrite=True` replaces only the output of save_pretrained or save_lora, "
            f"and {path} {stranger}: move it, or choose another `folder`"
        )
    return path


def _why_not_export(path: Path) -> str | None:
    """The reason why a folder is not an unchanged export, as a sentence's end; None if it is."""
    if path.is_symlink() or not path.is_dir():
        return "is no folder of its own"
    try:
        known = hf_folder.read_json(path / MARKER).get("files")
    except (OSError, ValueError):
        known = None
    if not isinstance(known, dict):
        return f"has no {MARKER} that lists its files"
    for name in _names(path):
        if name not in known:
            return f"also holds {name}"
        if known[name] != _checksum(path / name):
            return f"holds another {name} than was exported"
    return None


def _names(path: Path) -> list[str]:
    """The files, links and empty folders in a folder, except the list of them."""
    found = [
        Path(folder, name).relative_to(path)
        for folder, folders, files in os.walk(path)
        for name in [*files, *folders]
        # Folders with something in them are not listed themselves.
        if not (at := Path(folder, name)).is_dir() or at.is_symlink() or not any(at.iterdir())
    ]
    return sorted(str(name) for name in found if str(name) != MARKER)


def _checksum(path: Path) -> str | None:
    """The checksum of a file's bytes; None if it is not a regular file.

    Size or time are not enough: weights that were trained further have the same size, and a copied
    folder has new times.
    """
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


@contextmanager
def atomic_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a folder to write to; it gets its final name if the body succeeds, or is deleted.

    Args:
        folder: The final folder, as returned by `new_folder`.
        overwrite: Whether an export there is replaced.

    Raises:
        FileExistsError: If the final folder has been filled meanwhile.
    """
    unfinished = UnfinishedFolder(folder)
    at = unfinished.path
    try:
        with naming_file(at):
            yield at
            known = {name: _checksum(at / name) for name in _names(at)}
            (at / MARKER).write_text(json.dumps({"files": known}, indent=1) + "\n")
        # Hours may have passed since the first check.
        if new_folder(folder, overwrite=overwrite).is_dir() and any(folder.iterdir()):
            sync_tree(at)
            _exchange(at, folder)
        else:
            at.replace(folder)  # replaces an empty folder
    finally:
        # The unfinished folder, or the export that was replaced.
        unfinished.discard()


def _exchange(a: Path, b: Path) -> None:
    """Exchanges the names of two folders, atomically if the file system can."""
    paths = (os.fsencode(path.absolute()) for path in (a, b))
    arguments = [part for path in paths for part in (_CURRENT_FOLDER, path)]
    system = ctypes.CDLL(None, use_errno=True)
    if hasattr(system, "renameat2"):
        if system.renameat2(*arguments, _EXCHANGE) == 0:
            return
        if (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(b))
    # Some network file systems can't. If the process dies between these lines, both folders are
    # complete, the earlier one as `mine.replaced-...`.
    aside = Path(tempfile.mkdtemp(prefix=f"{b.name}.replaced-", dir=b.parent))
    b.replace(aside)
    try:
        a.replace(b)
    except BaseException:
        aside.replace(b)
        raise
    aside.replace(a)


# What Transformers reads of a config.json that has no generation_config.json beside it.
_GENERATION_FIELDS = (
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "do_sample", "temperature"),
    *("top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("max_length", "min_length", "max_new_tokens", "num_beams", "suppress_tokens", "use_cache"),
)


def save_pretrained(
    trainer: Trainer | Decoder | Pretrained,
    folder: str | PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    source: str | PathLike[str] | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
    params: Literal["trained", "ema"] = "trained",
) -> Path:
    """Writes a folder that Transformers' Auto classes load, and so does the family's own class.

    If matrices have adapters (`models.lora`), their products are added one matrix at a time in fp32
    and rounded once; `save_lora` writes only the adapters.

    The ends of turns that the trainer has learned (`Trainer.end_tokens`) join those in the copied
    generation_config.json, so that Transformers stops at them.

    Args:
        trainer: A trainer of a `Decoder`, the decoder itself, or a checkpoint of `load_pretrained`,
            such as a GGUF file.
        folder: Folder to write; it must not exist, or be empty.
        dtype: "float32", "float16" or "bfloat16"; None for each tensor's dtype in the checkpoint
            that training started from, or else the parameters' dtype.
        max_shard_bytes: Maximum bytes of a file, unless one tensor is larger.
        source: Folder of the tokenizer and the generation settings to copy; None for the checkpoint
            that training started from. Towers of a multimodal checkpoint always come from that
            checkpoint, or from `source` if it is gone.
        chat_template: A Jinja template to write in place of the tokenizer's own, such as the
            `chat_template` of the dataset that the model was trained on; None copies the
            tokenizer's own.
        overwrite: Whether to replace an earlier export in `folder`. It stays until the new one is
            complete. A folder that contains anything else is refused.
        params: "ema" for the averages that a run with `ema_decay` keeps of its parameters.

    Returns:
        The folder.

    Raises:
        TypeError: If an argument has a wrong type, or the trainer trains a different model.
        ValueError: If the decoder's configuration didn't come from Hugging Face, it has parameters
            that its family lacks or lacks some of them, a file to copy is damaged, not regular or a
            link out of `source`, or the dtype is unknown.
        FileExistsError: If `folder` is not empty; with `overwrite`, if it contains anything that
            this function or `save_lora` has not written.
        FileNotFoundError: If there is no folder `source`.
    """
    if dtype is not None:
        checks.word("dtype", dtype, CODES, ", or None")
    max_shard_bytes = checks.integer("max_shard_bytes", max_shard_bytes)
    check_chat_template(chat_template)
    folder = new_folder(folder, overwrite=overwrite)
    if source is not None:
        source = hf_folder.existing_folder("source", source, "a tokenizer")
    model = decoder_of(trainer, params)
    config = model.config
    if config.original is None:
        raise ValueError(
            "the decoder's configuration has no Hugging Face form; make it with "
            "DecoderConfig.from_hf or load_pretrained"
        )
    arrays = _arrays(model)
    apart = config.saved_apart if dtype is None else {}
    dtype = dtype or config.saved_dtype or np.dtype(next(iter(arrays.values())).dtype).name
    if dtype not in CODES:
        raise ValueError(f"pass `dtype`, one of {', '.join(CODES)}: parameters have {dtype}")
    codes = {n: CODES[of] for n, of in apart.items()}
    buffers = [n for e in parameter_tensors(config) if not e.trained for n in e.names]
    codes |= {n: CODES[arrays[n].dtype.name] for n in buffers}
    if config.saved_stacked if config.source else family_of(config).joined_experts:
        arrays = stack_experts(arrays)
    tensors = [
        NamedTensor(name=n, array=a, code=codes.get(n, CODES[dtype])) for n, a in arrays.items()
    ]
    tensors += _kept(config, source)
    copied = companions(source or source_folder(config))
    learned = trainer.end_tokens if isinstance(trainer, Trainer) else ()
    if source is None:
        learned = (*config.end_tokens, *learned)  # adapters may have brought some
    original = json.loads(config.original)

    def write(tensors: Sequence[NamedTensor]) -> None:
        with getting_on("writing an export"), atomic_folder(folder, overwrite=overwrite) as at:
            write_tensors(at, tensors, max_shard_bytes)
            write_config(at, original, dtype)
            copy_companions(at, copied)
            write_end_tokens(at, copied.get(hf_folder.GENERATION_CONFIG), config, learned)
            write_chat_template(at, chat_template)

    _written_from_all(trainer, write, tensors)
    return folder


def written_once(trainer: Trainer | Decoder | Pretrained, write: Callable[[], None]) -> None:
    """Calls a function that writes: of processes that share the trainer, in the first one only.

    Raises:
        Exception: If the function raises one; see `distributed.in_first`.
    """
    if isinstance(trainer, Trainer):
        distributed.in_first(write, trainer)
    else:
        write()


def _written_from_all(
    trainer: Trainer | Decoder | Pretrained,
    write: Callable[[Sequence[NamedTensor]], None],
    tensors: Sequence[NamedTensor],
) -> None:
    """Calls a function in the first process, as `written_once`, that writes tensors in their order.

    Processes that share the trainer's state read its arrays together.
    """
    if (
        not isinstance(trainer, Trainer)
        or trainer.processes.count == 1
        or trainer.plan.num_copies > 1
    ):
        written_once(trainer, lambda: write(tensors))
        return
    unread = iter([x.array for x in tensors if isinstance(x.array, ComputedArray)])

    def noted(tensor: NamedTensor) -> NamedTensor:
        array = tensor.array
        if not isinstance(array, ComputedArray):
            return tensor
        read = ComputedArray(
            tensor.name, array.shape, array.dtype, lambda dtype: np.asarray(next(unread), dtype)
        )
        return replace(tensor, array=read)

    def read_rest() -> None:
        with getting_on("reading for an export"):
            for array in unread:
                np.asarray(array)

    def write_all() -> None:
        try:
            write(list(map(noted, tensors)))
        finally:
            read_rest()  # the others wait for each array, whatever has become of the writing

    if not trainer.processes.is_first:
        read_rest()
    written_once(trainer, write_all)


def check_chat_template(given: Any) -> None:
    """Checks the argument `chat_template`.

    Raises:
        TypeError: If it is neither a text nor None.
        ValueError: If it is no Jinja template.
    """
    checks.instance("chat_template", given, str | None, "a Jinja template, as a str")
    if given is not None:
        check_template("`chat_template`", given)


def write_chat_template(folder: Path, template: str | None) -> None:
    """Writes a template, if there is one; it has precedence over one in tokenizer_config.json."""
    if template is not None:
        (folder / hf_folder.CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def decoder_of(
    trainer: Trainer | Decoder | Pretrained, params: Literal["trained", "ema"]
) -> Decoder:
    """Returns a trainer's decoder, with its parameters or their averages, or the given decoder.

    Parameters of a trainer or a checkpoint are read when they are converted to NumPy arrays.

    Raises:
        TypeError: If it is none of these, or the trainer trains a different model.
    """
    if isinstance(trainer, Pretrained):
        trainer = filled("trainer", trainer.model, trainer.params)
    if isinstance(trainer, Decoder):
        if params != "trained":
            raise ValueError(f"`params`={params!r} needs a trainer, not a decoder")
        return trainer
    if not isinstance(trainer, Trainer):
        hint = "pass the result's `.trainer`" if hasattr(trainer, "trainer") else ""
        raise TypeError(
            checks.refused(
                "trainer", "a Trainer, a models.Decoder or a models.Pretrained", trainer, hint
            )
        )
    checks.word("params", params, ("trained", "ema"))
    model = policy_of(trainer.unread_model(params))
    if not isinstance(model, Decoder):
        raise TypeError(f"`trainer` trains a {type(model).__qualname__}, not a models.Decoder")
    return model


def _arrays(model: Decoder) -> dict[str, np.ndarray | ComputedArray]:
    """Returns the tensors of the decoder by name, which are views of the parameters or not read.

    Raises:
        ValueError: If the model's parameters aren't those of its family.
    """
    adapted: dict[ParameterPath, Any] = {
        (*path, "weight"): module for path, module in adapted_modules(model)
    }
    names = ("lora_A", "lora_B", "lora_magnitude")
    added = {(*path[:-1], name) for path in adapted for name in names}
    arrays: dict[ParameterPath, Any] = {
        path: value for path, value in leaves(model) if path not in added
    }
    wanted = parameter_tensors(model.config)
    _check_family(model, arrays, wanted)
    tensors = {}

    # Their tensors are written one after the other, or a gate's and its product's in turn.
    @functools.lru_cache(maxsize=2)
    def read(path: ParameterPath) -> np.ndarray:
        return np.asarray(arrays[path])

    for parameter in wanted:
        if (module := adapted.get(parameter.path)) is None:
            own = arrays[parameter.path]
            parts = _in_parts(parameter, own, read) if parameter.stacked else [own]
        else:
            each = range(parameter.shape[0]) if parameter.stacked else [None]
            parts = [merged_matrix(module, i) for i in each]
        tensors |= dict(zip(parameter.names, parts, strict=True))
    return tensors


def _in_parts(
    parameter: ParameterTensors, stack: Any, read: Callable[[ParameterPath], np.ndarray]
) -> list[ComputedArray]:
    """The tensors of a stacked parameter."""

    def part(i: int) -> ComputedArray:
        return ComputedArray(
            f"part {i} of a stack", stack.shape[1:], stack.dtype, lambda _: read(parameter.path)[i]
        )

    return [part(i) for i in range(stack.shape[0])]


def _kept(config: DecoderConfig, source: Path | None) -> list[NamedTensor]:
    """Returns the tensors that the family keeps beside the decoder, still in their files.

    Raises:
        FileNotFoundError: If the checkpoint that contains them is gone.
        ValueError: If the family needs some and the decoder wasn't read from a checkpoint.
    """
    family = family_of(config)
    if not family.kept and not config.unread:
        return []
    if config.source is None:
        has_sound = json.loads(config.original or "{}").get("audio_config") is not None
        if family.multimodal and (config.vision is None or has_sound):
            raise ValueError(
                f"a {family.model_type} has parts beside the decoder, which only a checkpoint can "
                "give: read one with load_pretrained, or make a decoder alone with "
                "DecoderConfig.from_hf of the object in `text_config`"
            )
        return []
    folder = Path(config.source) if Path(config.source).is_dir() else source
    if folder is None:
        raise FileNotFoundError(
            f"there is no folder {config.source} to take the parts beside the decoder from; name "
            "the checkpoint as `source`"
        )
    tensors = open_weights(folder, config.original)

    own = {name for entry in parameter_tensors(config) for name in entry.names}

    def keeps(name: str) -> bool:
        return name not in own and family.keeps(name, config.num_layers, config.unread)

    kept = [tensor for name, tensor in tensors.items() if keeps(name)]
    check_known(folder, {tensor.name: tensor.dtype for tensor in kept})
    check_decoded(folder, kept, config.original)
    return [NamedTensor(name=tensor.name, array=tensor, code=tensor.dtype) for tensor in kept]


def _check_family(
    model: Decoder, arrays: Mapping[ParameterPath, Any], wanted: Sequence[ParameterTensors]
) -> None:
    """Checks that a model has exactly its family's parameters: files have no place for more."""
    shapes = {parameter.path: parameter.shape for parameter in wanted}
    state = others(model)
    wrong = {
        "not part of the family": [path for path in (*arrays, *state) if path not in shapes],
        "missing": [path for path in shapes if path not in arrays],
        "of another shape": [
            path for path, a in arrays.items() if path in shapes and a.shape != shapes[path]
        ],
        "no floating numbers": [
            path for path, a in arrays.items() if not jnp.issubdtype(a.dtype, jnp.floating)
        ],
    }
    named = {what: [name_of(path) for path in paths] for what, paths in wrong.items()}
    if found := listed(named):
        raise ValueError(
            f"the decoder can't be saved as a {model.config.family}: its parameters differ: "
            f"{found}. Merge additions to a weight into it first, unless models.lora "
            "made them; `trainer.save` saves any model"
        )


def write_config(folder: Path, values: dict[str, Any], dtype: str) -> None:
    """Writes the config.json of decoded weights; `values` are the original file's."""
    names = [name for name in ("torch_dtype", "dtype") if name in values]
    values |= dict.fromkeys(names or ["dtype"], dtype)
    values.pop("auto_map", None)  # names code, which isn't copied
    for part in (values, values.get("text_config") or {}):
        part.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def source_folder(config: DecoderConfig) -> Path | None:
    """The folder of the checkpoint, or of the GGUF file, that a configuration was read from."""
    if config.source is None:
        return None
    path = Path(config.source)
    return path.parent if hf_folder.is_gguf(path) else path


def companions(source: str | PathLike[str] | None) -> dict[str, Path]:
    """The names of the files beside a checkpoint's weights that are copied, and their real paths.

    Raises:
        FileNotFoundError: If there is no such folder, or a file is a dangling link.
        ValueError: If a file is not a regular one, is a link out of the folder, or is damaged.
    """
    if source is None:
        return {}
    folder = Path(source)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {source} to copy the tokenizer from; name another as `source`"
        )
    found = {name: hf_folder.own_file(folder, name) for name in hf_folder.companion_names(folder)}
    return {name: path for name, path in found.items() if path is not None}


def copy_companions(folder: Path, found: Mapping[str, Path]) -> None:
    """Copies files to a folder, under their names from `companions`."""
    for name, path in found.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)


def write_end_tokens(
    folder: Path, path: Path | None, config: DecoderConfig, learned: Sequence[int]
) -> None:
    """Writes a generation_config.json whose list of end tokens has further ones, if any are new.

    Args:
        folder: The folder to write to.
        path: The file to go on from. Without one, the new file has what Transformers would have
            read in config.json instead.
        config: The model's configuration.
        learned: The tokens.
    """
    if config.scores:  # nothing is written with scores
        return
    if path is not None:
        values = hf_folder.read_json(path)
        known = hf_folder.end_tokens_of(values)
    else:
        original = json.loads(config.original or "{}")
        both = (original.get("text_config") or {}) | original
        values = {name: both[name] for name in _GENERATION_FIELDS if both.get(name) is not None}
        known = config_end_tokens(original)
    if not set(learned) <= set(known):
        values["eos_token_id"] = list(dict.fromkeys((*known, *learned)))
        text = json.dumps(values, indent=2) + "\n"
        (folder / hf_folder.GENERATION_CONFIG).write_text(text, encoding="utf-8")
