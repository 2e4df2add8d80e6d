"""Where compiled programs are kept, and that a second process finds them there."""

import os
import subprocess
import sys

import jax
import pytest

from megatrain_jax._src.engine.startup import compilation_cache

PROGRAM = """
import logging
import jax, optax
import megatrain_jax as mt
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
batch = {"x": jax.numpy.ones((2, 3))}
params = {"w": jax.numpy.ones((3, 1))}
loss = lambda p, b: ((b["x"] @ p["w"]) ** 2).mean()
trainer = mt.Trainer(params, loss, optax.adamw(1e-3), batch)
trainer.read(trainer.step(batch))
counts = [sum(name.endswith(end) for name in hits) for end in ("cache_hits", "cache_misses")]
print(jax.config.jax_compilation_cache_dir, *counts)
"""


def run(tmp_path) -> list[str]:
    env = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    env |= {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.exhaustive
def test_a_second_process_compiles_nothing(tmp_path):
    folder, hits, misses = run(tmp_path)
    assert folder == str(tmp_path / ".cache/megatrain_jax/compiled")
    assert int(misses) > 5 and int(hits) < int(misses)
    again, hits, misses = run(tmp_path)
    assert again == folder and int(hits) > 5 and int(misses) == 0


@pytest.fixture
def chosen(monkeypatch):
    """JAX's own setting, which a process reads from `JAX_COMPILATION_CACHE_DIR` when it starts."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    yield lambda folder: jax.config.update(names[0], folder)
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize(("own", "seconds"), [(None, 0.0), ("7", 5.0)])
def test_short_compilations_are_kept_unless_a_user_chose_their_seconds(
    own, seconds, chosen, tmp_path, monkeypatch
):
    name = "jax_persistent_cache_min_compile_time_secs"
    chosen(None)
    jax.config.update(name, 5.0)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(name.upper(), own or "")
    if own is None:
        monkeypatch.delenv(name.upper())
    compilation_cache.enable()
    assert jax.config.values[name] == seconds


@pytest.mark.parametrize(
    ("own", "variables", "folder"),
    [
        (None, {"HOME": "{}"}, "{}/.cache/megatrain_jax/compiled"),
        (None, {"XDG_CACHE_HOME": "{}/xdg"}, "{}/xdg/megatrain_jax/compiled"),
        ("{}/own", {"HOME": "{}"}, "{}/own"),
        (None, {"HOME": "/dev/null"}, "None"),
    ],
)
def test_the_folder(own, variables, folder, chosen, tmp_path, monkeypatch):
    chosen(own and own.format(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    compilation_cache.enable()
    assert str(jax.config.values["jax_compilation_cache_dir"]) == folder.format(tmp_path)
