"""Where compiled programs are kept, seen from processes of their own."""

import os
import subprocess
import sys

import pytest

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


def run(tmp_path, program: str = PROGRAM, **variables: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    env |= {"HOME": str(tmp_path), **variables}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_second_process_compiles_nothing(tmp_path):
    folder, hits, misses = run(tmp_path)
    assert folder == str(tmp_path / ".cache/megatrain_jax/compiled")
    assert int(misses) > 5 and int(hits) < int(misses)
    again, hits, misses = run(tmp_path)
    assert again == folder and int(hits) > 5 and int(misses) == 0


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CACHE_HOME": "{}/xdg"}, "{}/xdg/megatrain_jax/compiled"),
        ({"JAX_COMPILATION_CACHE_DIR": "{}/own"}, "{}/own"),
        ({"HOME": "/dev/null"}, "None"),
    ],
)
def test_the_folder(variables, folder, tmp_path):
    variables = {name: value.format(tmp_path) for name, value in variables.items()}
    program = "import jax, megatrain_jax; print(jax.config.jax_compilation_cache_dir)"
    assert run(tmp_path, program, **variables) == [folder.format(tmp_path)]
