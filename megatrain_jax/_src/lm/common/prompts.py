"""Users' prompts as texts, messages or token ids; their encoding, and the decoding of answers."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import check_text, naming

_PROMPTS = "a sequence of prompts: texts, messages or token ids"
# The arrays of a prompt that hold its images: their dtypes, and the kinds of dtypes that users may
# give; bfloat16 is of the kind "V". Others, such as uint8, are pixels that aren't normalised.
_IMAGES = {
    "pixel_values": (np.float32, "fV"),
    "image_grid_thw": (np.int32, "iu"),
    "image_position_ids": (np.int32, "iu"),
    "second_per_grid_ts": (np.float32, "fV"),
}
_TOKENIZER = "anything with `encode` and `decode`, such as a tokenizer of Transformers"


def check_prompts(prompts: Any, tokenizer: Any) -> None:
    """Checks that prompts are a sequence, and that a tokenizer can encode and decode.

    Raises:
        TypeError: If one of them has a wrong type.
    """
    if tokenizer is not None and not all(hasattr(tokenizer, x) for x in ("encode", "decode")):
        raise TypeError(checks.refused("tokenizer", _TOKENIZER, tokenizer))
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        raise TypeError(checks.refused("prompts", _PROMPTS, prompts))


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return is_list and all(isinstance(message, Mapping) for message in prompt)


def prompt_ids(prompt: Any, tokenizer: Any, tools: Sequence[Any] | None = None) -> list[int]:
    """Returns the token ids of a prompt.

    Args:
        prompt: A text, a list of messages, rendered as a question in the tokenizer's chat template,
            or ids.
        tokenizer: The tokenizer; None if prompts are ids.
        tools: Schemas of tools, which the template tells.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it is empty, an id is negative, or the tokenizer can't encode it.
    """
    if isinstance(prompt, str) or is_messages(prompt):
        if tokenizer is None:
            hint = "to continue texts, pass `tokenizer`"
            raise ValueError(checks.refused("prompts", "token ids", prompt, hint))
        with naming("`prompts`"):
            for text in _texts(prompt):
                check_text(text)
        is_text = isinstance(prompt, str)
        ids = tokenizer.encode(prompt) if is_text else _chat_ids(prompt, tokenizer, tools)
    else:
        ids = prompt
    if isinstance(prompt, Mapping):
        hint = "messages are one prompt: pass a list of such lists"
        if "role" not in prompt:
            hint = "data.image_prompts makes prompts with images, with their ids in `tokens`"
        raise TypeError(checks.refused("prompts", _PROMPTS, dict(prompt), hint))
    if np.ndim(ids) != 1:
        raise TypeError(checks.refused("prompts", _PROMPTS, prompt))
    rows = [checks.integer("prompts", i, least=0) for i in ids]
    if not rows:
        raise ValueError(checks.refused("prompts", "of one token at least each", prompt))
    return rows


def ids_and_images(prompt: Any, tokenizer: Any) -> tuple[list[int], dict[str, np.ndarray]]:
    """Returns the token ids of a prompt, and the arrays of its images, in float32 and int32.

    Args:
        prompt: See `prompt_ids`; or a mapping with ids in `tokens`, and the arrays of images.
        tokenizer: See `prompt_ids`.

    Raises:
        TypeError: See `prompt_ids`.
        ValueError: See `prompt_ids`.
    """
    if not isinstance(prompt, Mapping) or "tokens" not in prompt:
        return prompt_ids(prompt, tokenizer), {}
    images = {}
    for name, (dtype, kinds) in _IMAGES.items():
        if prompt.get(name) is None:
            continue
        array = np.asarray(prompt[name])
        if array.dtype.kind not in kinds:
            allowed = f"numbers of a kind like {dtype.__name__} in `{name}`"
            raise TypeError(checks.refused("prompts", allowed, str(array.dtype)))
        images[name] = array.astype(dtype)
    return prompt_ids(np.asarray(prompt["tokens"]), None), images


def _chat_ids(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Sequence[Any] | None
) -> list[int]:
    """The token ids of a chat, up to the beginning of the answer."""
    if not hasattr(tokenizer, "apply_chat_template"):
        hint = "only tokenizers of Transformers have a chat template: pass a text"
        raise ValueError(checks.refused("prompts", "texts or token ids", messages, hint))
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    kinds = {str(part.get("type")) for part in parts if isinstance(part, Mapping)}
    # A template would write a placeholder for them, and the model would read it as a word.
    if others := sorted(kinds & {"image", "image_url", "video", "audio"}):
        hint = "" if others[0] == "audio" else "; data.image_prompts reads images and videos"
        kind = f"a part of the type {others[0]}"
        raise ValueError(f"`prompts` have {kind}: only text is supported{hint}")
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True}
    options |= {"tools": list(tools)} if tools else {}
    try:
        return tokenizer.apply_chat_template(list(messages), **options)["input_ids"]
    except TypeError as error:
        # Its tokenizer says no more of text that is not valid Unicode.
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise ValueError(f"the chat template of {name} fails on `prompts`: {error}") from error


def _texts(prompt: Any) -> list[str]:
    """The texts of a prompt that the tokenizer gets."""
    contents = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    return [content for content in contents if isinstance(content, str)]


def check_template(what: str, template: str) -> None:
    """Checks a chat template; a text without Jinja would be the same for every conversation.

    Args:
        what: The template, for the message.
        template: Its text.

    Raises:
        ValueError: If it has no Jinja, or is not valid Unicode.
    """
    if "{{" not in template and "{%" not in template:
        raise ValueError(
            f"{what} must be a Jinja template, with {{{{ or {{%, but is {template[:200]!r}. "
            "If that is a path: the command needs an existing file, and functions need its text"
        )
    with naming(what):
        check_text(template)


def shown_prompt(prompt: Any, tokenizer: Any) -> str:
    """Returns a prompt as a reader should see it: its text, or its last message.

    One with images is shown without special tokens, as their placeholders are.
    """
    if isinstance(prompt, str):
        return prompt
    if is_messages(prompt):
        return str(prompt[-1].get("content", ""))
    if isinstance(prompt, Mapping) and "tokens" in prompt:
        return shown_answer(ids_and_images(prompt, None)[0], tokenizer)
    ids = prompt_ids(prompt, tokenizer)
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)


def shown_answer(ids: Sequence[int], tokenizer: Any) -> str:
    """Returns the text of written ids as a reader should see it: without special tokens.

    Args:
        ids: The ids.
        tokenizer: The tokenizer; None shows ids as numbers. If its `decode` has no option
            `skip_special_tokens`, as those of Transformers have, it decides itself.
    """
    if tokenizer is None:
        return " ".join(map(str, ids))
    try:
        skips = "skip_special_tokens" in inspect.signature(tokenizer.decode).parameters
    except (TypeError, ValueError):  # compiled functions may have no signature
        skips = False
    return tokenizer.decode(ids, **({"skip_special_tokens": True} if skips else {}))
