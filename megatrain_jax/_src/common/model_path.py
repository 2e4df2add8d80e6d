"""Paths of parameters and variables in a user's model, such as `("layers", 3, "kernel")`."""

import re

ModelPath = tuple[str | int, ...]


def path_name(path: ModelPath) -> str:
    """A path as users read it, such as `layers/3/kernel`."""
    return "/".join(map(str, path))


def module_path(path: ModelPath) -> ModelPath:
    """A path with one component for each module.

    A component that is itself a path, as keys of a flat dict or of a safetensors file, is split:
    both `("layers/3/kernel",)` and `("layers.3.kernel",)` become `("layers", "3", "kernel")`.
    """
    rows = (re.split(r"[/.]", part) if isinstance(part, str) else (part,) for part in path)
    return tuple(part for row in rows for part in row)
