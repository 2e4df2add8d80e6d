"""Functions of the user's own, which settings name: optimizers and rewards."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain_jax._src.common.outside import as_value_errors


def imported(option: str, given: str) -> Callable[..., Any]:
    """Imports a function.

    Args:
        option: The setting that names it.
        given: A name such as "rewards.py:short" (a file, with imports from its folder) or
            "package.module:short" (a module that Python finds, also in the current folder).

    Raises:
        ValueError: If the name has another form, its module can't be imported, or lacks the
            function.
    """
    place, _, name = given.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(
            f"`{option}`={given} must be a file and a function, such as {option}.py:mine, or a "
            "module and a function, such as package.module:mine"
        )
    with as_value_errors(f"`{option}`={given}: {place} can't be imported"):
        module = _of_file(place) if place.endswith(".py") else _of_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"`{option}`={given}: {place} has no function {name!r}")
    return function


def _of_module(place: str) -> Any:
    _look_in(Path.cwd())
    return importlib.import_module(place)


def _look_in(folder: Path) -> None:
    """Appends a folder to `sys.path`, after installed modules.

    It is not removed again, because a function may import a module when it is called.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _of_file(place: str) -> Any:
    path = Path(place).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    _look_in(path.resolve().parent)
    name = f"megatrain_jax_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, because dataclasses look up their module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
