"""Errors for unknown names, with the name or the way that was meant."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from megatrain_jax._src.common import other_libraries
from megatrain_jax._src.common.user_tracebacks import to_users_code

_T = TypeVar("_T")

# The option that a value of a type is meant for, if it is passed without a name.
_BY_TYPE = {
    "Hardware": "hardware",
    "Precision": "precision",
    "Mesh": "mesh",
    "AbstractMesh": "mesh",
    "GrpoOptions": "options",
}
_NOTES = {
    "mesh": 'write mesh=jax.make_mesh((n,), ("data",)) for n GPUs',
    "microbatches": "it divides each batch, so make batches as many times larger; "
    "optax.MultiSteps updates once every so many batches",
}
_PARAMETERS = "pass `params=` to a new Trainer, or restore a checkpoint"
_RATE = (
    "the optimizer has it: give that a schedule, as in "
    "optax.adamw(optax.cosine_decay_schedule(1e-3, 1000)), or write "
    "optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3) and call `set_hyperparams`"
)
_NEW = (
    "it is fixed when a trainer is made: pass it to a new Trainer, and restore a checkpoint there"
)
_HOW_TO_SET = {
    **dict.fromkeys(("loss_fn", "optimizer", *other_libraries.RUN_OPTIONS), _NEW),
    **{name: f"pass `{name}=` to `train`" for name in other_libraries.LOOP_OPTIONS},
    **dict.fromkeys(("params", "model"), _PARAMETERS),
    "opt_state": "restore a checkpoint, or call `set_hyperparams`",
    **dict.fromkeys(("learning_rate", "lr"), _RATE),
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the known name nearest to a misspelt one.

    Case and underscores don't count, so `trainer` is near `Trainer`. A near name has the same
    first letter: `push` is not meant by `gpus`.

    Args:
        name: The misspelt name.
        known: The names to choose from.

    Returns:
        The end of a message, such as "; did you mean `steps`?"; empty if no name is near.
    """
    names = [one for one in known if _plain(one)[:1] == _plain(name)[:1]]
    near = get_close_matches(_plain(name), {*map(_plain, names)}, n=1, cutoff=0.7)
    if not near:
        return ""
    # `plan` and `Plan` differ in case alone.
    alike = [one for one in names if _plain(one) == near[0]]
    nearest = max(alike, key=lambda one: SequenceMatcher(None, name, one).ratio())
    return f"; did you mean `{nearest}`?"


def meant_option(name: str, known: Iterable[str]) -> str | None:
    """The known name that a name of another library means; None if there is none."""
    known = {*known}
    return next((ours for ours in other_libraries.MEANT.get(name, ()) if ours in known), None)


def explain(
    space: MutableMapping[str, Any],
    later: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
) -> None:
    """Adds hints to a public module: to its functions, its classes and its missing names.

    Args:
        space: The module's variables, `globals()`, with `__all__` and `__name__`.
        later: Names that are imported on first use, by the module of `megatrain_jax._src` that has
            them, with spaces between them.
        modules: The package's public modules, which are imported on first use, too.
    """
    module, known = space["__name__"], space["__all__"]
    places = {name: place for place, names in (later or {}).items() for name in names.split()}

    def missing(name: str) -> Any:
        if name in modules:
            return import_module(f"{module}.{name}")
        if name not in places:
            hint = public_name_hint(name, module.rpartition(".")[2], (*known, *modules))
            raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
        value = getattr(import_module(f"megatrain_jax._src.{places[name]}"), name)
        space[name] = hinting(value, module)
        return space[name]

    for name in known:
        if name not in places:
            space[name] = hinting(space[name], module)
    space["__getattr__"] = missing
    if places:
        space["__dir__"] = lambda: sorted({*space, *known, *modules})


def hinting(value: _T, module: str) -> _T:
    """A public function, or class, whose unknown keywords get a hint; other values as they are.

    Args:
        value: The public value. A class is changed in place: its `__init__` and public methods.
        module: Name of the public module that has it.

    Returns:
        The function with a check of its keywords. The error is Python's own `TypeError`, followed
        by the name that was meant.
    """
    made: Any = value
    if inspect.isfunction(value):
        made = _checked(value)
        made.__module__ = module
    elif isinstance(value, type) and not issubclass(value, BaseException):
        for name, method in [*vars(value).items()]:
            kept = type(method) if isinstance(method, classmethod | staticmethod) else None
            function = method.__func__ if kept else method
            if not inspect.isfunction(function) or name.startswith("_") and name != "__init__":
                continue
            checked = _checked(function)
            setattr(value, name, kept(checked) if kept else checked)
    return made


class _Handed(list[Any]):
    """An argument that the callee takes out: frames on the way to it hold an empty list then."""


def lets_go(*names: str) -> Callable[[_T], _T]:
    """Marks a function that passes these arguments to `take` before it makes anything large.

    An argument that the caller made for the call alone, such as a model, can then be freed during
    the call: nothing holds it but the function itself.
    """

    def marked(function: _T) -> _T:
        function._lets_go = names  # type: ignore[attr-defined]
        return function

    return marked


def take(argument: Any) -> Any:
    """Takes out an argument that `lets_go` names; any other is itself."""
    return argument.pop() if isinstance(argument, _Handed) else argument


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that explains the errors of its keywords and of options without their names."""
    parameters = inspect.signature(function).parameters.values()
    kinds = [p.kind for p in parameters]
    named = tuple(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    # A function with arguments by position alone, or any number of them, is left to Python.
    most = len(positional) if inspect.Parameter.KEYWORD_ONLY in kinds else None
    most = None if inspect.Parameter.VAR_POSITIONAL in kinds else most
    if not named or hasattr(function, "_explained"):
        return function
    handed = getattr(function, "_lets_go", ())

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        for name in given:
            if name not in named and (not takes_all or _is_meant(name, named)):
                said = f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{said}{keyword_hint(name, named)}")
        if most is not None and len(args) > most > 0:
            option = _BY_TYPE.get(type(args[most]).__name__)
            hint = f", as in {option}=..." if option in named else ""
            raise TypeError(
                f"{function.__qualname__}() takes {most} positional arguments but {len(args)} were "
                f"given; options after `{positional[-1]}` need their names{hint}"
            )
        if handed:
            args = tuple(
                _Handed([x]) if n in handed else x for n, x in zip(positional, args, strict=False)
            )
            given = {n: _Handed([x]) if n in handed else x for n, x in given.items()}
        try:
            return function(*args, **given)
        except Exception as error:
            error.__traceback__ = to_users_code(error.__traceback__)
            raise

    called._explained = True  # type: ignore[attr-defined]
    return called


_IN_OPTIONS = (
    *other_libraries.TAKERS["`models.GrpoOptions` takes"],
    *("beta", "temperature", "top_p", "top_k", "stop", "loss_type", "shuffle"),
)


def _is_meant(name: str, known: tuple[str, ...]) -> bool:
    """Whether a function that passes keywords on has this one under another name."""
    if name in other_libraries.RUN_OPTIONS:
        return False
    return meant_option(name, known) is not None or "options" in known and name in _IN_OPTIONS


def keyword_hint(name: str, known: Iterable[str]) -> str:
    """The end of the message about an unknown keyword: what was meant, or how to reach the same.

    Args:
        name: The keyword.
        known: The keywords that there are.
    """
    known = [*known]
    if ours := meant_option(name, known):
        return f"; did you mean `{ours}`{f' ({_NOTES[ours]})' if ours in _NOTES else ''}?"
    if "options" in known and name in _IN_OPTIONS:
        return f"; pass it in `options=models.GrpoOptions({name}=...)`"
    if name in ("batch_size", "per_device_train_batch_size"):
        batches = "`sample_batch` has it" if "sample_batch" in known else "batches come from `data`"
        return f"; {batches}: its arrays' first axis is the number of examples"
    if name in other_libraries.SENTENCES:
        return f"; {other_libraries.SENTENCES[name]}"
    for option in (name, *other_libraries.MEANT.get(name, ())):
        for takers, options in other_libraries.TAKERS.items():
            if option in options:
                return f"; {takers} `{option}`"
    return did_you_mean(name, known)


def public_name_hint(name: str, module: str, known: Iterable[str]) -> str:
    """The end of the message about a name that a public module doesn't have.

    Args:
        name: The name.
        module: The module's last name.
        known: The public names that it has.
    """
    if name.startswith("_"):
        return ""
    known = [*known]
    if ours := meant_option(name, known):
        return f"; did you mean `{ours}`?"
    if name in other_libraries.PUBLIC:
        return f": {other_libraries.PUBLIC[name]}"
    for one in (name, *other_libraries.MEANT.get(name, ())):
        for other, names in other_libraries.MODULES.items():
            if other != module and one in names.split():
                return f"; did you mean `megatrain_jax.{other}.{one}`?"
        if one in ("fit", "train", "plan", "Trainer", "Precision"):
            return f"; did you mean `megatrain_jax.{one}`?"
    return did_you_mean(name, known)


class ExplainedAttributes:
    """A base of classes for users: an attribute that is missing or read-only gets an explanation.

    For names of other libraries, it says how this library does the same.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a private attribute.

        Raises:
            AttributeError: If its name is public, because setting it would have no effect.
        """
        if not name.startswith("_"):
            raise AttributeError(_not_settable(type(self), name))
        super().__setattr__(name, value)

    # Type checkers would take every name for an attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self)
            if hasattr(kind, name):  # raised within a property: shown as it is
                object.__getattribute__(self, name)
            said = f"{kind.__name__!r} object has no attribute {name!r}"
            way = "" if name.startswith("_") else _way_to(name, dir(self))
            raise AttributeError(f"{said}{way}")


def _way_to(name: str, known: Iterable[str]) -> str:
    """The end of a message about a missing attribute."""
    if name in other_libraries.ATTRIBUTES:
        return f": {other_libraries.ATTRIBUTES[name]}"
    return did_you_mean(name, [one for one in known if not one.startswith("_")])


def _not_settable(kind: type, name: str) -> str:
    """The message for a public attribute that was set, with a way to reach the same."""
    way = f": {_HOW_TO_SET[name]}" if name in _HOW_TO_SET else ""
    if hasattr(kind, name):
        return f"`{name}` of a {kind.__name__} is read-only{way}"
    if not way:
        public = [known for known in dir(kind) if not known.startswith("_")]
        way = did_you_mean(name, [*public, *_HOW_TO_SET])
    return f"a {kind.__name__} has no attribute `{name}` that could be set{way}"


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
