"""Completions that call tools: calls are made, their results appended, and writing goes on."""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatrain_jax import Trainer, distributed
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import as_value_errors, needing
from megatrain_jax._src.lm.common.prompts import shown_answer
from megatrain_jax._src.lm.grpo.rewards import awaited
from megatrain_jax._src.lm.models.generation.generate import Completion, generate

# How Qwen, Hermes and others write a call: an object with `name` and `arguments`.
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
# Stand for texts in a rendered conversation, to find them there.
_ANSWER, _RESULT = "Xq7answerXq7", "Xq7resultXq7"
_QUESTION = {"role": "user", "content": "a question"}


class ToolUse:
    """Writes completions as `models.generate` does, with the results of the tools they call.

    Attributes:
        schemas: The tools' schemas, for the chat template.
        num_calls: Number of calls in the last completions.
        num_failures: Number of those that couldn't be read, named no tool, or raised an error.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        tokenizer: Any,
        write: Callable[..., list[Completion]] | None,
        most_turns: int | None,
    ):
        """Makes the schemas from signatures and docstrings.

        Args:
            tools: The functions.
            tokenizer: A tokenizer of Transformers, whose chat template has a place for tools.
            write: Function that writes completions; None for `models.generate`.
            most_turns: Maximum number of a completion's turns whose calls are made; None for all.

        Raises:
            ImportError: If Transformers is not installed.
            TypeError: If `tools` is no list, or one is no function.
            ValueError: If a function's types or docstring make no schema, two have the same name,
                or the template has no place for tools or their results.
        """
        with needing('`tools` need Transformers: pip install "megatrain-jax[finetune]"'):
            from transformers.utils.chat_template_utils import get_json_schema
        if not isinstance(tools, Sequence) or not all(map(callable, tools)):
            raise TypeError(checks.refused("tools", "a list of functions", tools))
        self._tools: dict[str, Callable[..., Any]] = {}
        self.schemas = []
        for tool in tools:
            name = getattr(tool, "__name__", repr(tool))
            with as_value_errors(f"`tools`: {name} can't be described"):
                self.schemas.append(get_json_schema(tool))
            if self._tools.setdefault(name, tool) is not tool:
                raise ValueError(f"`tools` has two functions with the name {name}")
        self._tokenizer, self._write, self._most_turns = tokenizer, write or generate, most_turns
        has_place = getattr(tokenizer, "chat_template", None) is not None
        if not has_place or self._rendered([_QUESTION]) == self._rendered([_QUESTION], tools=None):
            raise ValueError("`tools` need a `tokenizer` whose chat template has a place for tools")
        # Some templates write results only behind calls, in which a model may have erred.
        result = {"role": "tool", "name": next(iter(self._tools)), "content": _RESULT}
        with as_value_errors("`tools`: the `tokenizer`'s chat template writes no result"):
            if _RESULT not in self._behind_answer([result]):
                raise ValueError("it leaves out results behind an answer without calls")
        self.num_calls = self.num_failures = 0

    def __call__(
        self, trainer: Trainer, prompts: Sequence[Sequence[int]], **options: Any
    ) -> list[Completion]:
        """Writes, calls tools and goes on, until completions have no calls; see `models.generate`.

        Results count in `max_tokens`. Of several processes, the first one calls the tools.
        """
        room, self.num_calls, self.num_failures = options["max_tokens"], 0, 0
        found = self._write(trainer, prompts, **options)
        messages, waiting = [[self._message(one)] for one in found], range(len(found))
        for turn in itertools.count(1):
            calls = {i: messages[i][-1].get("tool_calls") for i in waiting}
            made = {i: rows for i, rows in calls.items() if rows and found[i].finish == "stop"}
            if not made or (self._most_turns is not None and turn > self._most_turns):
                break
            results = distributed.in_first(
                lambda made=made: [[self._result(call) for call in rows] for rows in made.values()],
                trainer,
            )
            for i, answers in zip(made, results, strict=True):
                own = [{"role": "tool", "name": name, "content": text} for name, text, _ in answers]
                messages[i] += own
                self.num_calls += len(answers)
                self.num_failures += sum(failed for _, _, failed in answers)
                found[i] = _followed(found[i], self._ids_of(own, found[i]), None, room)
            waiting = [i for i in made if found[i].finish == "stop"]
            if not waiting:
                break
            more = self._write(
                trainer,
                [[*found[i].prompt_ids, *found[i].ids] for i in waiting],
                **options
                | {
                    "num_samples": 1,
                    "seed": (options["seed"] + turn) % 2**32,
                    "max_tokens": room - min(len(found[i].ids) for i in waiting),
                },
            )
            for i, one in zip(waiting, more, strict=True):
                messages[i].append(self._message(one))
                found[i] = _followed(found[i], one.ids, one, room)
        return [
            replace(one, text=shown_answer(one.ids.tolist(), self._tokenizer), messages=rows)
            if len(rows) > 1
            else one
            for one, rows in zip(found, messages, strict=True)
        ]

    def _rendered(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        given = {"tools": self.schemas, "add_generation_prompt": True, "tokenize": False} | options
        return self._tokenizer.apply_chat_template(messages, **given)

    def _message(self, one: Completion) -> dict[str, Any]:
        """A turn as a message, with its calls in `tool_calls`."""
        text = self._tokenizer.decode(one.ids)
        if getattr(self._tokenizer, "response_template", None) is not None:
            before = self._tokenizer.decode(one.prompt_ids)
            try:
                return self._tokenizer.parse_response(text, prefix=before, tools=self.schemas)
            except (ValueError, TypeError):  # the model has written something else
                return {"role": "assistant", "content": one.text}
        message = {"role": "assistant", "content": _CALL.sub("", one.text).strip()}
        bodies = _CALL.findall(text)
        return message | ({"tool_calls": [*map(_call, bodies)]} if bodies else {})

    def _result(self, call: dict[str, Any]) -> tuple[str, str, bool]:
        """The name of a call's tool, the text of its result, and whether it failed."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            if name not in self._tools:
                raise ValueError(f"there is no tool {name!r}, only {', '.join(self._tools)}")
            return name, str(awaited(self._tools[name](**arguments))), False
        except Exception as error:  # the model reads it, whatever it is
            return name, str({"error": str(error)}), True

    def _ids_of(self, results: Sequence[dict[str, Any]], one: Completion) -> list[int]:
        """The tokens between a turn with calls and the next one."""
        ids = self._tokenizer.encode(self._behind_answer(results), add_special_tokens=False)
        # The model has written the token that ends its turn.
        return ids[1:] if ids[:1] == one.ids[-1:].tolist() else ids

    def _behind_answer(self, results: Sequence[dict[str, Any]]) -> str:
        """What the template writes behind the text of an answer with these results."""
        answer = {"role": "assistant", "content": _ANSWER}
        return self._rendered([_QUESTION, answer, *results]).partition(_ANSWER)[2]


def _call(body: str) -> dict[str, Any]:
    """A call as TRL has it; the name is the text if it can't be read."""
    try:
        read = json.loads(body)
        name, arguments = str(read["name"]), dict(read.get("arguments") or {})
    except (ValueError, TypeError, KeyError, AttributeError):
        name, arguments = body, {}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _followed(
    one: Completion, ids: Sequence[int] | np.ndarray, more: Completion | None, room: int
) -> Completion:
    """A completion with further tokens, as far as there is room: a turn's, or those of results."""
    count = min(len(ids), room - len(one.ids))
    own = np.ones(len(one.ids), bool) if one.own is None else one.own
    logs = {}
    for name in ("log_probs", "tempered_log_probs", "drawn_log_probs"):
        new = np.zeros(count, np.float32) if more is None else getattr(more, name)[:count]
        logs[name] = np.concatenate([getattr(one, name), new])
    is_full = count < len(ids) or (more is None and len(one.ids) + count == room)
    return replace(
        one,
        **logs,
        ids=np.concatenate([one.ids, np.array(ids[:count], np.int32)]),
        own=np.concatenate([own, np.full(count, more is not None)]),
        finish="length" if is_full else "stop" if more is None else more.finish,
    )
