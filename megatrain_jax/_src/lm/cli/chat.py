"""`megatrain-jax chat`: a conversation with an exported model."""

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatrain_jax as mt
from megatrain_jax._src.common.outside import integer, naming
from megatrain_jax._src.lm.cli.chat_settings import ChatSettings
from megatrain_jax._src.lm.cli.errors import as_command_errors
from megatrain_jax._src.lm.cli.jax_chat_model import JaxChatModel, open_jax_chat_model
from megatrain_jax._src.lm.common.adapter_layers import EMBEDDINGS, different_layers
from megatrain_jax._src.lm.common.hf_folder import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    end_tokens_of,
    read_all_json,
    read_json,
    regular_file,
    required_file,
)
from megatrain_jax._src.lm.common.hub import CHECKPOINT_FILES, folder_or_download

_ADAPTER, _CONFIG = "adapter_config.json", "config.json"
_HOLDS = f"a model ({_CONFIG}) or adapters ({_ADAPTER})"
_NEEDS_TORCH = "chat needs PyTorch: pip install torch"
Messages = list[dict[str, str]]


def run(settings: ChatSettings) -> int:
    """Answers one question, or the questions that are typed; returns the exit status.

    Raises:
        CommandError: If the model can't be loaded, or has no chat template for `system`.
    """
    with as_command_errors():
        chat_model = open_chat_model(settings)
    system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    if settings.prompt is not None:
        with as_command_errors():
            chat_model.answer([*system, {"role": "user", "content": settings.prompt}])
        return 0
    _converse(chat_model, system)
    return 0


def _converse(chat_model: "TransformersChatModel | JaxChatModel", messages: Messages) -> None:
    """Answers questions until the input ends; an interrupted answer leaves no trace."""
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not question.strip():
            continue
        asked = [*messages, {"role": "user", "content": question}]
        try:
            answer = chat_model.answer(asked)
        except KeyboardInterrupt:
            print("\n(interrupted)", flush=True)
            continue
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            continue
        if chat_model.has_turns:
            messages = [*asked, {"role": "assistant", "content": answer}]


@dataclass(frozen=True)
class TransformersChatModel:
    """A model of Transformers that answers on the terminal, word by word.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        options: Options of the model's `generate`.
    """

    model: Any
    tokenizer: Any
    options: Mapping[str, Any]

    @property
    def has_turns(self) -> bool:
        """Whether messages are formatted by a chat template; if not, prompts are continued."""
        return self.tokenizer.chat_template is not None

    def answer(self, messages: Messages) -> str:
        """Prints an answer to messages while it is written, and returns it.

        Raises:
            ValueError: If the chat template fails on them, or they are too long for the model.
        """
        import transformers

        inputs = self._inputs(messages).to(self.model.device)
        length = inputs["input_ids"].shape[-1]
        most = getattr(self.model.config, "max_position_embeddings", None)
        where = f"{self.model.name_or_path}/{_CONFIG}"
        if most is not None and length >= integer(where, "max_position_embeddings", most, least=1):
            raise ValueError(
                f"the conversation has {length:,} tokens, but the model's maximum is {most:,}: "
                "begin a new chat"
            )
        streamer = transformers.TextStreamer(
            self.tokenizer, skip_prompt=True, skip_special_tokens=True
        )
        try:
            with _without_warnings():
                found = self.model.generate(**inputs, streamer=streamer, **self.options)
        except Exception as error:  # Transformers' errors for wrong settings have no common type
            why = " ".join(str(error).split())[:500]
            raise ValueError(
                f"Transformers can't answer with {self.model.name_or_path}: "
                f"{type(error).__name__}: {why}"
            ) from error
        return self.tokenizer.decode(found[0, length:], skip_special_tokens=True)

    def _inputs(self, messages: Messages) -> Any:
        if not self.has_turns:
            return self.tokenizer(messages[-1]["content"], return_tensors="pt")
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # a template may raise any error
            why = " ".join(str(error).split())[:500]
            name = self.tokenizer.name_or_path
            raise ValueError(
                f"the chat template of {name} fails on these messages: {why}"
            ) from error


def open_chat_model(settings: ChatSettings) -> TransformersChatModel | JaxChatModel:
    """Loads the model, with its adapters if the folder has some.

    Raises:
        FileNotFoundError: If a folder is missing.
        ImportError: If PyTorch, or PEFT for adapters, is not installed.
        ValueError: If the model or its tokenizer can't be loaded.
    """
    tries_jax = settings.library == "jax" or _is_for_jax(settings)
    if not tries_jax:
        _imported("torch", _NEEDS_TORCH)  # first, because the rest may take long
    transformers = _imported("transformers", 'chat needs pip install "megatrain-jax[finetune]"')
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = _folder(settings.model)
    has_adapters = (folder / _ADAPTER).is_file()
    base, about = folder, {}
    if has_adapters:
        about = read_json(required_file(folder, _ADAPTER))
        named = settings.base or about.get("base_model_name_or_path")
        if not isinstance(named, str) or not named:
            raise ValueError(f"{folder / _ADAPTER} names no base model: set `base`")
        base = folder_or_download("base", named, "the base model", CHECKPOINT_FILES)
    elif settings.base is not None:
        raise ValueError(f"`base` is for adapters, but {folder} is a whole model")
    with_tokenizer = folder if (folder / "tokenizer_config.json").is_file() else base
    tokenizer = _loaded(transformers.AutoTokenizer, with_tokenizer)
    if has_adapters and (own := regular_file(folder, CHAT_TEMPLATE)):
        with naming(own):  # the one that the adapters were trained with
            tokenizer.chat_template = own.read_text(encoding="utf-8")
    if settings.system is not None and tokenizer.chat_template is None:
        raise ValueError(
            f"`system` needs a chat template, but the tokenizer in {with_tokenizer} has none"
        )
    if tries_jax:
        try:
            if has_adapters:
                raise ValueError(
                    f"`library`=jax answers with whole models, but {folder} has adapters: "
                    "`megatrain-jax merge` makes one of them"
                )
            return open_jax_chat_model(settings, base, tokenizer)
        except (TypeError, ValueError):
            if settings.library == "jax":
                raise
    torch = _imported("torch", _NEEDS_TORCH)
    with _without_warnings():
        model = _language_model(transformers, base)
        if has_adapters:
            needs_peft = "adapters need PEFT: pip install peft, or `megatrain-jax merge`"
            model = _adapted(_imported("peft", needs_peft), model, folder, about)
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(settings.seed)
    ends = {*_listed(model.generation_config.eos_token_id), *_listed(tokenizer.eos_token_id)}
    if has_adapters and (path := regular_file(folder, GENERATION_CONFIG)):
        ends.update(end_tokens_of(read_json(path)))  # PEFT doesn't read it
    return TransformersChatModel(
        model.to(device).eval(), tokenizer, _options(settings, sorted(ends), tokenizer)
    )


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Leaves out warnings of PyTorch, Transformers and PEFT, which are for programmers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _is_for_jax(settings: ChatSettings) -> bool:
    """Whether JAX is tried first: with a GPU, no second library is needed."""
    return settings.library is None and settings.device is None and mt.this_machine() is not None


def _folder(given: str) -> Path:
    """The folder of the model or the adapters, which may be in the folder of a run."""
    folder = folder_or_download("model", given, _HOLDS, (*CHECKPOINT_FILES, "adapter_model.*"))
    for found in (folder, folder / "model", folder / "adapter"):
        if any((found / name).is_file() for name in (_CONFIG, _ADAPTER)):
            return found
    raise FileNotFoundError(f"`model` = {given} must be a folder that holds {_HOLDS}")


def _options(settings: ChatSettings, ends: list[int], tokenizer: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": settings.max_tokens}
    if ends:
        pad = tokenizer.pad_token_id
        options["eos_token_id"] = ends
        options["pad_token_id"] = min(ends) if pad is None else pad
    if settings.temperature == 0:
        options |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    elif settings.temperature is not None:
        options |= {"do_sample": True, "temperature": settings.temperature}
    return options


def _listed(ids: int | Sequence[int] | None) -> Sequence[int]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else ids


def _imported(name: str, otherwise: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(otherwise) from error


def _language_model(transformers: Any, folder: Path) -> Any:
    """The model in a folder; Transformers would draw missing weights at random.

    Raises:
        ValueError: If it can't be loaded, or weights are missing.
    """
    kind = transformers.AutoModelForCausalLM
    model, about = _loaded(kind, folder, dtype="auto", output_loading_info=True)
    if "score.weight" in about["unexpected_keys"]:
        raise ValueError(f"{folder} is a reward model, which gives scores and no answers")
    if missing := sorted(about["missing_keys"]):
        raise ValueError(
            f"{folder} is no whole language model: its files lack {', '.join(missing[:3])}"
        )
    return model


def _adapted(peft: Any, model: Any, folder: Path, about: Mapping[str, Any]) -> Any:
    """The model with its adapters; its embeddings get rows for the tokens that these add.

    Args:
        peft: The module.
        model: The base model.
        folder: The adapters' folder.
        about: The contents of its adapter_config.json.

    Raises:
        ValueError: If PEFT can't load them, or would leave out layers.
    """
    shapes = _shapes(folder)
    factors = (name.removeprefix("base_model.model.") for name in shapes if ".lora_" in name)
    adapted = {name.partition(".lora_")[0] for name in factors}
    modules = [name for name, _ in model.named_modules()]
    with naming(folder / _ADAPTER):  # a pattern of modules may be no regular expression
        different = different_layers(adapted, modules, about)
    if different:
        raise ValueError(
            f"the adapters in {folder} are of a base with another number of layers: either they or "
            f"this base has no {', '.join(different[:3])}"
        )
    try:
        whole = (name for name in shapes if EMBEDDINGS.search(name) and name.endswith(".weight"))
        embeddings = (shapes[name] for name in whole if ".lora_" not in name)
        if (shape := next(embeddings, None)) is not None:
            model.resize_token_embeddings(shape[0], mean_resizing=False)
        return peft.PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # PEFT's errors for files that don't fit have no common type
        why = " ".join(str(error).split())[:500]
        raise ValueError(f"PEFT can't load the adapters in {folder}: {why}") from error


def _shapes(folder: Path) -> dict[str, list[int]]:
    """The shapes of the tensors in a folder of adapters, by name; none for PyTorch's own format."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        return {}
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _loaded(kind: Any, folder: Path, **options: Any) -> Any:
    for name, values in read_all_json(folder).items():
        ids = values.get("eos_token_id")
        for end in ids if isinstance(ids, list) else [ids]:
            if end is not None:
                integer(folder / name, "eos_token_id", end, least=-1)  # for none
    try:
        return kind.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # Transformers' errors for damaged files have no common type
        why = " ".join(str(error).split())[:500]
        raise ValueError(f"Transformers can't load {folder}: {why}") from error
