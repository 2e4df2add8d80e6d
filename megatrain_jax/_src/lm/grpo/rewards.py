"""Reward functions: called as TRL calls them, and checked."""

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.user_warnings import warn_user

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
# Arguments of reward functions in addition to the rows' columns.
_ARGUMENTS = ("prompts", "completions", "completion_ids")


class Rewards:
    """Reward functions and their weights.

    Attributes:
        names: The name of each function; functions of equal names are numbered.
        weights: The weight of each.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
    ):
        """Checks the functions.

        Args:
            functions: One or several functions, each called as ``function(prompts=...,
                completions=..., completion_ids=..., **columns)``, without the arguments that its
                signature lacks. It returns one number per completion; None where it does not apply.
                It may be `async`.
            weights: The weight of each function; None for 1 each.

        Raises:
            TypeError: If one is no function.
            ValueError: If there is none, or the number of weights differs.
        """
        found = [functions] if callable(functions) else functions
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise TypeError(checks.refused("rewards", "a function or several", functions))
        given = list(found)
        for function in given:
            if not callable(function):
                raise TypeError(checks.refused("rewards", "a function or several", function))
        if not given:
            raise ValueError(checks.refused("rewards", "one function at least", functions))
        if weights is not None and len(weights) != len(given):
            raise ValueError(
                f"`reward_weights` has {len(weights)} weights for {len(given)} reward functions"
            )
        self._functions = given
        # Names of functions that gave a prompt different rewards, or have been warned about.
        self._checked_functions: set[str] = set()
        self.names = _different([getattr(f, "__name__", type(f).__name__) for f in given])
        self.weights = np.array([1.0] * len(given) if weights is None else weights, np.float64)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Checks that the functions can be called with the columns of the rows.

        Args:
            columns: The names of the columns, without `prompt`.

        Raises:
            TypeError: If a function has an argument, without a default, that is no column, or has
                `*arguments` alone, whose meaning is not known.
        """
        for name, function in zip(self.names, self._functions, strict=True):
            if {p.kind for p in _parameters(function)} == {inspect.Parameter.VAR_POSITIONAL}:
                raise TypeError(
                    f"the reward function {name} takes only arguments without names, but it is "
                    "called with named ones: name its arguments, such as `completions`, or take "
                    "`**columns`"
                )
            for wanted in _required(function):
                if wanted not in (*_ARGUMENTS, *columns):
                    raise TypeError(
                        f"the reward function {name} needs {wanted}, but `rows` have no such "
                        f"column besides `prompt`, only {list(columns)}: add the column, or give "
                        "the argument a default"
                    )

    def __call__(self, **columns: Sequence[Any]) -> np.ndarray:
        """Calls all functions.

        Args:
            columns: `prompts`, `completions` and further columns, with an entry per completion.

        Returns:
            The rewards (completions, functions); NaN where a function does not apply.

        Raises:
            TypeError: If a function does not return numbers.
            ValueError: If it returns a wrong number of them, or one is not finite.
        """
        size = len(columns["completions"])
        found = [
            _checked(name, _awaited(_called(function, columns)), size)
            for name, function in zip(self.names, self._functions, strict=True)
        ]
        return np.array(found, np.float64).T

    def warn_of(self, rewards: np.ndarray, group_size: int) -> None:
        """Warns once about each function that has given no prompt different rewards so far.

        Args:
            rewards: The rewards (completions, functions) of a step.
            group_size: Number of completions of each prompt.
        """
        for name, column in zip(self.names, rewards.T, strict=True):
            if name in self._checked_functions:
                continue
            self._checked_functions.add(name)
            groups = np.where(np.isnan(column), -np.inf, column).reshape(-1, group_size)
            lowest = np.where(np.isnan(column), np.inf, column).reshape(-1, group_size).min(axis=1)
            if np.isnan(column).all():
                found = f"returned None for all {len(column)} completions of this step"
            elif (groups.max(axis=1) <= lowest).all():
                found = "gave all completions of a prompt the same reward, for every prompt"
            else:
                continue
            warn_user(
                f"the reward function {name} {found}: nothing is learned from it in such a step. "
                "See that it reads completions as they are; more `num_generations` or a higher "
                "`temperature` make them differ more",
            )

    def total(self, rewards: np.ndarray) -> np.ndarray:
        """The weighted sums (completions,) of rewards; NaN where no function applies."""
        sums = np.nansum(rewards * self.weights, axis=1)
        return np.where(np.isnan(rewards).all(axis=1), np.nan, sums)


def _different(names: Sequence[str]) -> list[str]:
    return [
        name if names.count(name) == 1 else f"{name}_{names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    """The parameters of a function; `**columns` if it has no signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _required(function: RewardFunction) -> list[str]:
    """The arguments of a function that have no default."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = _parameters(function)
    return [p.name for p in found if p.default is p.empty and p.kind not in several]


def _called(function: RewardFunction, columns: Mapping[str, Any]) -> Any:
    """The result of a function for the arguments that its signature has."""
    parameters = _parameters(function)
    kinds = {p.name: p.kind for p in parameters}
    by_place = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    first = [columns.get(p.name, p.default) for p in by_place]
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
    named = {
        name: value
        for name, value in columns.items()
        if kinds.get(name) is not inspect.Parameter.POSITIONAL_ONLY and (takes_all or name in kinds)
    }
    return function(*first, **named)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own, because a notebook's thread already runs one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async functions", daemon=True).start()
    return loop


def begun(found: Any) -> Any:
    """Returns what a function has returned; of an `async` one, the future of its result."""
    if not inspect.isawaitable(found):
        return found

    async def result() -> Any:
        return await found

    return asyncio.run_coroutine_threadsafe(result(), _loop())


def _awaited(found: Any) -> Any:
    """The rewards, also of an `async` function."""
    found = begun(found)
    return found.result() if isinstance(found, Future) else found


def _checked(name: str, found: Any, size: int) -> list[float]:
    if isinstance(found, str | Mapping) or not hasattr(found, "__len__"):
        raise TypeError(f"the reward function {name} must return a list of numbers, not {found!r}")
    if len(found) != size:
        raise ValueError(
            f"the reward function {name} returned {len(found)} rewards for {size} completions"
        )
    return [_number(name, i, value) for i, value in enumerate(found)]


def _number(name: str, row: int, value: Any) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the reward function {name} returned {value!r} for completion {row} (counted from 0), "
            "which is no number"
        ) from error
    if not math.isfinite(number):
        raise ValueError(
            f"the reward function {name} returned {number} for completion {row} (counted from 0): "
            "rewards must be finite; return None where the function does not apply"
        )
    return number
