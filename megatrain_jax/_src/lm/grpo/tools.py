"""Completions that call tools: calls are made, their results appended, and writing goes on."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from megatrain_jax import Trainer, distributed
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import as_value_errors, needing
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.lm.common.prompts import shown_answer
from megatrain_jax._src.lm.grpo.rewards import begun
from megatrain_jax._src.lm.models.generation.generate import Completion, generate

# How Qwen, Hermes and others write a call: an object with `name` and `arguments`.
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
# Stand for texts in a rendered conversation, to find them there.
_ANSWER, _RESULT = "Xq7answerXq7", "Xq7resultXq7"
_QUESTION = {"role": "user", "content": "a question"}
_LOGS = "log_probs", "tempered_log_probs", "drawn_log_probs"
# Programs of generation are compiled for a number of texts: powers of two, from this share of all.
_LEAST_SHARE = 8


class _Result(NamedTuple):
    """The result of a call: the tool's name, a text, and whether it is an error."""

    name: str
    text: str
    failed: bool


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
                or the template has no place for tools or results, or writes calls in a form that
                can't be read.
        """
        with needing('`tools` need Transformers: pip install "megatrain-jax[finetune]"'):
            from transformers.utils.chat_template_utils import get_json_schema
        if not isinstance(tools, Sequence) or not all(map(callable, tools)):
            raise TypeError(checks.refused("tools", "a list of functions", tools))
        self._tools: dict[str, Callable[..., Any]] = {}
        self.schemas = []
        for tool in tools:
            name = getattr(tool, "__name__", repr(tool))
            needs = "a function with types and a docstring of its arguments"
            with as_value_errors(f"`tools`: {name} can't be described, as {needs} can"):
                self.schemas.append(get_json_schema(tool))
            if name in self._tools:
                raise ValueError(f"`tools` has two functions with the name {name}")
            self._tools[name] = tool
        self._tokenizer, self._write, self._most_turns = tokenizer, write, most_turns
        self._check_template()
        self.num_calls = self.num_failures = 0
        self._has_warned = False

    def _check_template(self) -> None:
        """Checks that the template tells of tools, and writes results and readable calls."""
        has_place = getattr(self._tokenizer, "chat_template", None) is not None
        if not has_place or self._rendered([_QUESTION]) == self._rendered([_QUESTION], tools=None):
            raise ValueError("`tools` need a `tokenizer` whose chat template has a place for tools")
        name, what = next(iter(self._tools)), "`tools`: the chat template of `tokenizer`"
        with as_value_errors(f"{what} writes results only behind calls, in which a model may err"):
            if _RESULT not in self._behind_answer([_tool_message(_Result(name, _RESULT, False))]):
                raise ValueError("it leaves this one out")
        if self._reads_by_template:
            return
        function = {"name": name, "arguments": {"x": _ANSWER}}
        call = {"type": "function", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        with as_value_errors(f"{what} writes no calls"):
            text = self._rendered([_QUESTION, answer], add_generation_prompt=False)
        if call not in map(_call, _CALL.findall(text)):
            raise ValueError(
                f"{what} writes calls in a form of its own: set `tokenizer.response_template`, by "
                "which Transformers reads them; trl.chat_template_utils.add_response_schema "
                "does it for known models"
            )

    @property
    def _reads_by_template(self) -> bool:
        return getattr(self._tokenizer, "response_template", None) is not None

    def __call__(
        self, trainer: Trainer, prompts: Sequence[Sequence[int]], **options: Any
    ) -> list[Completion]:
        """Writes, calls tools and goes on, until completions have no calls; see `models.generate`.

        Results count in `max_tokens`; as in TRL, a completion ends with its calls if their results
        don't fit. Of several processes, the first one calls the tools.
        """
        room, self.num_calls, self.num_failures = options["max_tokens"], 0, 0
        found = (self._write or generate)(trainer, prompts, **options)
        messages, waiting = [[self._message(one)] for one in found], range(len(found))
        for turn in itertools.count(1):
            calls = {i: messages[i][-1].get("tool_calls") for i in waiting}
            made = {i: rows for i, rows in calls.items() if rows and found[i].finish == "stop"}
            if not made or (self._most_turns is not None and turn > self._most_turns):
                break
            results = distributed.in_first(lambda made=made: self._results(made.values()), trainer)
            waiting = []
            for i, rows in zip(made, results, strict=True):
                own = [_Result(*row) for row in rows]
                self.num_calls += len(own)
                self.num_failures += sum(one.failed for one in own)
                answers = [*map(_tool_message, own)]
                ids = self._ids_of(answers, found[i])
                if len(found[i].ids) + len(ids) < room:
                    messages[i] += answers
                    found[i] = _followed(found[i], ids)
                    waiting.append(i)
            if not waiting:
                break
            options |= {"num_samples": 1, "seed": (options["seed"] + 1) % 2**32}
            options |= {"max_tokens": room - min(len(found[i].ids) for i in waiting)}
            so_far = [[*found[i].prompt_ids, *found[i].ids] for i in waiting]
            more = self._more(trainer, so_far, len(found), options)
            for i, one in zip(waiting, more, strict=True):
                turn_of = self._cut(one, room - len(found[i].ids))
                messages[i].append(self._message(turn_of))
                found[i] = _followed(found[i], turn_of.ids.tolist(), turn_of)
        return [
            replace(one, text=shown_answer(one.ids.tolist(), self._tokenizer), messages=rows)
            for one, rows in zip(found, messages, strict=True)
        ]

    def _more(
        self, trainer: Trainer, so_far: list[list[int]], total: int, options: dict[str, Any]
    ) -> list[Completion]:
        """The next turns of some conversations, of a number for which programs are there."""
        if self._write is not None:
            return self._write(trainer, so_far, **options)
        number = max(1 << (len(so_far) - 1).bit_length(), total // _LEAST_SHARE)
        more = generate(trainer, so_far + so_far[-1:] * (number - len(so_far)), **options)
        return more[: len(so_far)]

    def _cut(self, one: Completion, room: int) -> Completion:
        """A turn without the tokens for which there was room in shorter conversations only."""
        if len(one.ids) <= room:
            return one
        logs = {name: getattr(one, name)[:room] for name in _LOGS}
        text = shown_answer(one.ids[:room].tolist(), self._tokenizer)
        return replace(one, **logs, ids=one.ids[:room], text=text, finish="length")

    def _rendered(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        given = {"tools": self.schemas, "add_generation_prompt": True, "tokenize": False} | options
        return self._tokenizer.apply_chat_template(messages, **given)

    def _message(self, one: Completion) -> dict[str, Any]:
        """A turn as a message, with its calls in `tool_calls`."""
        message: dict[str, Any] = {"role": "assistant", "content": one.text}
        text = self._tokenizer.decode(one.ids)
        if self._reads_by_template:
            before = self._tokenizer.decode(one.prompt_ids)
            try:
                read = self._tokenizer.parse_response(text, prefix=before, tools=self.schemas)
            except (ValueError, TypeError, RecursionError):  # the model has written something else
                return message
            return message | {"content": ""} | read
        # Calls in a model's thoughts are not meant.
        if bodies := _CALL.findall(text.rpartition("</think>")[2]):
            message["content"] = _CALL.sub("", one.text).strip()
            message["tool_calls"] = [*map(_call, bodies)]
        return message

    def _results(self, calls: Iterable[Sequence[Mapping[str, Any]]]) -> list[list[_Result]]:
        """The results of each turn's calls; `async` tools run side by side."""
        open_ones = [[self._begun(call) for call in rows] for rows in calls]
        results = [[self._result(*one) for one in rows] for rows in open_ones]
        every = [*itertools.chain.from_iterable(results)]
        if not self._has_warned and all(one.failed for one in every):
            self._has_warned = True
            warn_user(
                f"all {len(every)} calls of tools have failed, the last one: {every[-1].text}"
            )
        return results

    def _begun(self, call: Mapping[str, Any]) -> tuple[str, Any]:
        """The name of a call's tool, and its result, the future of one, or an error."""
        function = call.get("function") or {}
        name, arguments = str(function.get("name")), function.get("arguments") or {}
        try:
            if not isinstance(arguments, Mapping):
                raise ValueError("a call must be an object with `name` and an object `arguments`")
            if name not in self._tools:
                raise ValueError(f"there is no tool {name!r}, only {', '.join(self._tools)}")
            return name, begun(self._tools[name](**arguments))
        except (Exception, SystemExit) as error:  # the model reads it, whatever it is
            return name, error

    def _result(self, name: str, value: Any) -> _Result:
        try:
            value = value.result() if isinstance(value, Future) else value
        except (Exception, SystemExit) as error:
            value = error
        failed = isinstance(value, BaseException)
        text = str({"error": str(value) or type(value).__name__} if failed else value)
        # Tokenizers take valid Unicode only.
        name, text = (x.encode(errors="replace").decode() for x in (name, text))
        return _Result(name, text, failed)

    def _ids_of(self, results: Sequence[dict[str, Any]], one: Completion) -> list[int]:
        """The tokens between a turn with calls and the next one."""
        ids = self._tokenizer.encode(self._behind_answer(results), add_special_tokens=False)
        # The model has written the token that ends its turn.
        return ids[1:] if ids[:1] == one.ids[-1:].tolist() else ids

    def _behind_answer(self, results: Sequence[dict[str, Any]]) -> str:
        """What the template writes behind the text of an answer with these results."""
        answer = {"role": "assistant", "content": _ANSWER}
        return self._rendered([_QUESTION, answer, *results]).partition(_ANSWER)[2]


def _tool_message(result: _Result) -> dict[str, Any]:
    return {"role": "tool", "name": result.name, "content": result.text}


def _call(body: str) -> dict[str, Any]:
    """A call as TRL has it; its arguments are the text if it can't be read."""
    try:
        read = json.loads(body)
        function = {"name": str(read["name"]), "arguments": read.get("arguments") or {}}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        function = {"name": "", "arguments": body}
    return {"type": "function", "function": function}


def _followed(one: Completion, ids: Sequence[int], more: Completion | None = None) -> Completion:
    """A completion with further tokens: those of results, or of a turn."""
    own = np.ones(len(one.ids), bool) if one.own is None else one.own
    none = np.zeros(len(ids), np.float32)
    logs = {name: none if more is None else getattr(more, name) for name in _LOGS}
    return replace(
        one,
        **{name: np.concatenate([getattr(one, name), new]) for name, new in logs.items()},
        ids=np.concatenate([one.ids, np.array(ids, np.int32)]),
        own=np.concatenate([own, np.full(len(ids), more is not None)]),
        finish="stop" if more is None else more.finish,
    )
