"""Paths of parameters and variables in a user's model, such as `("layers", 3, "kernel")`."""

ModelPath = tuple[str | int, ...]


def path_name(path: ModelPath) -> str:
    """A path as users read it, such as `layers/3/kernel`."""
    return "/".join(map(str, path))
