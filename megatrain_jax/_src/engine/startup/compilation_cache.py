"""JAX's persistent compilation cache, on by default: a second run starts without compiling."""

import os
import sys
from pathlib import Path

_DIRECTORY = "jax_compilation_cache_dir"
_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"


def enable() -> None:
    """Points JAX's cache at the user's cache folder, unless one was chosen or it can't be written.

    Programs that compile in less than one second, JAX's default minimum, are kept too, because a
    step has many small ones. JAX reads the environment variables when it is imported; if it is
    imported already, its configuration is changed instead.
    """
    folder, jax = _default_folder(), sys.modules.get("jax")
    chosen = os.environ.get(_DIRECTORY.upper()) if jax is None else jax.config.values[_DIRECTORY]
    if chosen is not None or not _can_write(folder):
        return
    settings = {_DIRECTORY: str(folder)}
    if _MIN_SECONDS.upper() not in os.environ:
        settings[_MIN_SECONDS] = "0.0"
    for name, value in settings.items():
        if jax is None:
            os.environ[name.upper()] = value
        else:
            jax.config.update(name, float(value) if name == _MIN_SECONDS else value)


def _default_folder() -> Path:
    """The folder of compiled programs unless `JAX_COMPILATION_CACHE_DIR` names another."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "megatrain_jax" / "compiled"


def _can_write(folder: Path) -> bool:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)
