"""`megatrain-jax chat` and `merge`: exported models, in conversation or merged with adapters."""

import contextlib
import importlib
import mimetypes
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import as_value_errors, integer, naming, needing
from megatrain_jax._src.lm.cli.errors import as_command_errors
from megatrain_jax._src.lm.cli.plan_settings import ChatSettings, MergeSettings
from megatrain_jax._src.lm.cli.run_settings import listed
from megatrain_jax._src.lm.common import hf_folder
from megatrain_jax._src.lm.common.adapter_layers import EMBEDDINGS, different_layers
from megatrain_jax._src.lm.common.hub import CHECKPOINT_FILES, folder_or_download
from megatrain_jax._src.lm.common.prompts import prompt_ids
from megatrain_jax._src.lm.models.generation.beams import search_params

_ADAPTER, _CONFIG = "adapter_config.json", "config.json"
_HOLDS = f"a model ({_CONFIG}) or adapters ({_ADAPTER})"
_NEEDS_TORCH = "chat needs PyTorch: pip install torch"
Messages = list[dict[str, Any]]
# Transformers' default of `top_k`, for a generation_config.json without it.
_TOP_K = 50
_BEAMS = ("num_beams", "length_penalty", "early_stopping")
# Fields of generation_config.json without effect here; `generate` reads the stop ids itself.
_WITHOUT_EFFECT = {"max_length", "max_new_tokens", "transformers_version", "use_cache"}
_WITHOUT_EFFECT |= {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}


def sampling_of(folder: Path, settings: ChatSettings) -> dict[str, Any]:
    """The options of `generate` for a checkpoint.

    Raises:
        ValueError: If its generation_config.json has an option that `generate` lacks.
    """
    path = hf_folder.regular_file(folder, "generation_config.json")
    given = hf_folder.read_json(path) if path else {}
    found = {name: x for name, x in given.items() if x is not None and x is not False}
    top_k = integer(str(path), "top_k", found.pop("top_k", _TOP_K))
    with naming(str(path)):
        top_p = checks.number("top_p", found.pop("top_p", 1.0), least=0)
        temperature = checks.number("temperature", found.pop("temperature", 1.0), least=0)
        min_p = checks.number("min_p", found.pop("min_p", 0.0), least=0)
        penalty = found.pop("repetition_penalty", 1.0)
        penalty = checks.number("repetition_penalty", penalty, above=0)
    temperature = temperature if found.pop("do_sample", False) else 0.0
    if settings.temperature is not None:
        temperature = settings.temperature
    beams = {name: found[name] for name in _BEAMS if name in found}
    if beams.get("num_beams", 1) == 1 or temperature == 0:
        found = {name: x for name, x in found.items() if name not in beams}
    if beams.get("num_beams", 1) == 1:
        beams = {}  # as in Transformers, the rest has no effect
    with naming(str(path)):
        search_params(**({"num_beams": 1} | beams))
    found = {n: x for n, x in found.items() if n not in _WITHOUT_EFFECT and not n.startswith("_")}
    if found:
        raise ValueError(f"{path} has {', '.join(sorted(found))}, which generation in JAX lacks")
    return {
        "max_tokens": settings.max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": penalty,
        **beams,
        "seed": settings.seed,
    }


def run(settings: ChatSettings) -> int:
    """Answers one question, or the questions that are typed; returns the exit status.

    Raises:
        CommandError: If the model can't be loaded, or has no chat template for `system`.
    """
    with as_command_errors():
        chat_model = open_chat_model(settings)
    system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    images = [_part(path) for path in listed(settings.images)]
    if settings.prompt is not None:
        with as_command_errors():
            chat_model.answer([*system, _question(settings.prompt, images)])
        return 0
    if isinstance(chat_model, JaxChatModel) and images:
        with as_command_errors():  # before a question is typed
            chat_model.rendered([*system, _question("?", images)])
    _converse(chat_model, system, images)
    return 0


def _part(path: str) -> dict[str, Any]:
    """The part of a message for an image or a video; the error of a video's file says more."""
    is_folder, named = Path(path).expanduser().is_dir(), str(mimetypes.guess_type(path)[0])
    kind = "video" if is_folder or named.startswith("video/") else "image"
    return {"type": kind, kind: path}


def _question(text: str, images: Messages) -> dict[str, Any]:
    content = [*images, {"type": "text", "text": text}] if images else text
    return {"role": "user", "content": content}


def _converse(chat_model: "ChatModel", messages: Messages, images: Messages) -> None:
    """Answers questions until the input ends; an interrupted answer leaves no trace."""
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not question.strip():
            continue
        asked = [*messages, _question(question, images)]
        try:
            answer = chat_model.answer(asked)
        except KeyboardInterrupt:
            print("\n(interrupted)", flush=True)
            continue
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            continue
        if chat_model.has_turns:
            images = []
            messages = [*asked, {"role": "assistant", "content": answer}]


def merge(settings: MergeSettings) -> int:
    """Merges; returns the exit status.

    Raises:
        CommandError: If the adapters don't fit the base model, or `out` is not new.
    """
    out = Path(settings.out).expanduser()
    with as_command_errors():
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise FileExistsError(f"there is something at `out` = {out} already: choose another")
        print(f"merged: {models.merge_adapter(settings.adapter, out, base=settings.base)}")
    return 0


@dataclass(frozen=True)
class ChatModel:
    """A model that answers on the terminal, some words at a time.

    Attributes:
        model: The model: a `models.Generator`, or one of Transformers.
        tokenizer: Its tokenizer, of Transformers.
        longest: Maximum number of tokens of a conversation; None if there is none.
        options: Options of the model's `generate`.
    """

    model: Any
    tokenizer: Any
    longest: int | None
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
        raise NotImplementedError

    def encoded(self, messages: Messages, encode: Callable[[Any], Any]) -> Any:
        """The result of a function for the messages, or the last one's text if there are no turns.

        Raises:
            ValueError: If it fails.
        """
        name = self.tokenizer.name_or_path
        with as_value_errors(f"the chat template of {name} fails on these messages"):
            return encode(messages if self.has_turns else messages[-1]["content"])

    def check_length(self, length: int) -> None:
        """Checks the number of tokens of a conversation.

        Raises:
            ValueError: If they are too many.
        """
        if self.longest is not None and length >= self.longest:
            raise ValueError(
                f"the conversation has {length:,} tokens, but the model's maximum is "
                f"{self.longest:,}: begin a new chat"
            )


@dataclass(frozen=True)
class JaxChatModel(ChatModel):
    """A model in JAX, for those that this library knows.

    Attributes:
        processor: Folder of the processor of images, if there are some.
    """

    processor: Path | None

    def rendered(self, messages: Messages) -> dict[str, Any]:
        """Returns messages as a prompt with ids, and images if there are some.

        Raises:
            ValueError: If they can't be rendered, or an image can't be read.
        """
        if self.processor is None:
            ids = self.encoded(messages, lambda prompt: prompt_ids(prompt, self.tokenizer))
            return {"tokens": ids}
        from megatrain_jax import data  # needs packages that chat alone does not
        from megatrain_jax._src.lm.data.report import InvalidRow

        with naming("`images`"):
            options = {"chat_template": self.tokenizer.chat_template}
            try:
                return data.image_prompts([messages], self.processor, **options)[0]
            except ValueError as error:
                if isinstance(error.__cause__, InvalidRow):
                    raise error.__cause__ from None  # without an argument that the user lacks
                raise

    def answer(self, messages: Messages) -> str:
        """See `ChatModel.answer`."""
        given = self.rendered(messages)
        self.check_length(len(given["tokens"]))
        shown = ""

        def show(prompt: int, sample: int, text: str) -> None:
            nonlocal shown
            # A character may consist of several tokens; the last ones may still be missing.
            if not text.endswith("\ufffd"):
                print(text[len(shown) :], end="", flush=True)
                shown = text

        (found,) = self.model.generate([given], on_text=show, **self.options)
        print(found.text[len(shown) :], flush=True)
        return found.text


class TransformersChatModel(ChatModel):
    """A model of Transformers."""

    def answer(self, messages: Messages) -> str:
        """See `ChatModel.answer`."""
        import transformers

        inputs = self.encoded(messages, self._inputs).to(self.model.device)
        length = inputs["input_ids"].shape[-1]
        self.check_length(length)
        streamer = transformers.TextStreamer(
            self.tokenizer, skip_prompt=True, skip_special_tokens=True
        )
        # Transformers' errors for wrong settings have no common type.
        with as_value_errors(f"Transformers can't answer with {self.model.name_or_path}"):
            with _without_warnings():
                found = self.model.generate(**inputs, streamer=streamer, **self.options)
        return self.tokenizer.decode(found[0, length:], skip_special_tokens=True)

    def _inputs(self, prompt: Any) -> Any:
        if isinstance(prompt, str):
            return self.tokenizer(prompt, return_tensors="pt")
        return self.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )


def open_chat_model(settings: ChatSettings) -> ChatModel:
    """Loads the model, with its adapters if the folder has some.

    Raises:
        FileNotFoundError: If a folder is missing.
        ImportError: If PyTorch, or PEFT for adapters, is not installed.
        ValueError: If the model or its tokenizer can't be loaded.
    """
    # With a GPU, no second library is needed.
    may_be = settings.library is None and settings.device is None
    needs_jax = settings.library == "jax" or bool(settings.images)
    tries_jax = needs_jax or (may_be and mt.this_machine() is not None)
    if not tries_jax:
        _imported("torch", _NEEDS_TORCH)  # first, because the rest may take long
    transformers = _imported("transformers", 'chat needs pip install "megatrain-jax[finetune]"')
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = _folder(settings.model)
    has_adapters = (folder / _ADAPTER).is_file()
    base, about = folder, {}
    if has_adapters:
        about = hf_folder.read_json(hf_folder.required_file(folder, _ADAPTER))
        named = settings.base or about.get("base_model_name_or_path")
        if not isinstance(named, str) or not named:
            raise ValueError(f"{folder / _ADAPTER} names no base model: set `base`")
        base = folder_or_download("base", named, "the base model", CHECKPOINT_FILES)
    elif settings.base is not None:
        raise ValueError(f"`base` is for adapters, but {folder} is a whole model")
    with_tokenizer = folder if (folder / "tokenizer_config.json").is_file() else base
    tokenizer = _loaded(transformers.AutoTokenizer, with_tokenizer)
    if has_adapters and (own := hf_folder.regular_file(folder, hf_folder.CHAT_TEMPLATE)):
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
                    f"this library answers with whole models, but {folder} has adapters: "
                    "`megatrain-jax merge` makes one of them"
                )
            sampling = sampling_of(base, settings)
            opened = models.load_pretrained(base, images=bool(settings.images))
            generator = models.Generator(opened, tokenizer=tokenizer)
            processor = base if settings.images else None
            return JaxChatModel(generator, tokenizer, _longest(base), sampling, processor)
        except (TypeError, ValueError):
            if needs_jax:
                raise
    torch = _imported("torch", _NEEDS_TORCH)
    with _without_warnings():
        model = _language_model(transformers, base)
        if has_adapters:
            needs_peft = "adapters need PEFT: pip install peft, or `megatrain-jax merge`"
            model = _adapted(_imported("peft", needs_peft), model, folder, about)
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(settings.seed)
    ends = {*listed(model.generation_config.eos_token_id), *listed(tokenizer.eos_token_id)}
    if has_adapters and (path := hf_folder.regular_file(folder, hf_folder.GENERATION_CONFIG)):
        ends.update(hf_folder.end_tokens_of(hf_folder.read_json(path)))  # PEFT doesn't read it
    options = _options(settings, sorted(ends), tokenizer)
    return TransformersChatModel(model.to(device).eval(), tokenizer, _longest(base), options)


def _longest(folder: Path) -> int | None:
    """The maximum number of tokens of a conversation, as a model's configuration says."""
    path, name = folder / _CONFIG, "max_position_embeddings"
    given = hf_folder.read_json(path).get(name)
    return None if given is None else integer(path, name, given, least=1)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Leaves out warnings of PyTorch, Transformers and PEFT, which are for programmers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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


def _imported(name: str, otherwise: str) -> Any:
    with needing(otherwise):
        return importlib.import_module(name)


def _language_model(transformers: Any, folder: Path) -> Any:
    """The model in a folder; Transformers would draw missing weights at random.

    Raises:
        ValueError: If it can't be loaded, or weights are missing.
    """
    kind = transformers.AutoModelForCausalLM
    try:
        model, about = _loaded(kind, folder, dtype="auto", output_loading_info=True)
    except ValueError as error:
        from megatrain_jax._src.lm.models.config import FAMILIES  # needs time

        family = FAMILIES.get(str(hf_folder.read_json(folder / _CONFIG).get("model_type")))
        if family is None or not family.multimodal:
            raise
        raise ValueError(f"`--library jax` may answer with this model: {error}") from error
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
        ValueError: If PEFT can't load them, or would leave out some.
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
    # PEFT's errors for files that don't fit have no common type.
    with as_value_errors(f"PEFT can't load the adapters in {folder}"):
        whole = (name for name in shapes if EMBEDDINGS.search(name) and name.endswith(".weight"))
        embeddings = (shapes[name] for name in whole if ".lora_" not in name)
        if (shape := next(embeddings, None)) is not None:
            model.resize_token_embeddings(shape[0], mean_resizing=False)
        loaded = peft.PeftModel.from_pretrained(model, str(folder))
    # It says nothing about adapters that it takes for those of experts, and drops.
    there = {name for name, _ in loaded.base_model.model.named_modules()}
    own = adapted.intersection(modules)
    if dropped := sorted(name for name in own if f"{name}.lora_A" not in there):
        raise ValueError(
            f"PEFT drops adapters in {folder}, such as of {', '.join(dropped[:3])}: "
            "`megatrain-jax merge` makes a whole model with all of them"
        )
    return loaded


def _shapes(folder: Path) -> dict[str, list[int]]:
    """The shapes of the tensors in a folder of adapters, by name; none for PyTorch's own format."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        return {}
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _loaded(kind: Any, folder: Path, **options: Any) -> Any:
    for name, values in hf_folder.read_all_json(folder).items():
        ids = values.get("eos_token_id")
        for end in ids if isinstance(ids, list) else [ids]:
            if end is not None:
                integer(folder / name, "eos_token_id", end, least=-1)  # for none
    # Transformers' errors for damaged files have no common type.
    with as_value_errors(f"Transformers can't load {folder}"):
        return kind.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **options
        )
