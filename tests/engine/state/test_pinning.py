"""The sentences on pinned memory, by the settings and limits of made-up machines."""

import re
import resource

import pytest

from megatrain_jax._src.engine.state import pool
from messages import tells

GIB = 2**30
WORDS = ("always", "within_size", "advise", "never", "deny", "force")


def written(path, chosen):
    path.write_text(" ".join(f"[{w}]" if w == chosen else w for w in WORDS) + "\n")
    return path


def test_small_pages_are_those_of_a_setting_that_gives_no_others(tmp_path):
    for chosen in WORDS:
        setting = written(tmp_path / "shmem_enabled", chosen)
        small = chosen in ("advise", "never", "deny")
        assert pool.pins_small_pages(setting) == small
        assert (pool.advice_on_pages(200 * GIB, setting) is not None) == small
    assert not pool.pins_small_pages(tmp_path / "no such file")


def test_advice_on_pages_says_what_is_waited_for_and_what_would_shorten_it(tmp_path):
    setting = written(tmp_path / "shmem_enabled", "never")
    said = pool.advice_on_pages(240 * GIB, setting)
    assert said is not None
    assert tells(said, "240.00 GiB", "160 s")
    assert f"echo always | sudo tee {setting}" in said
    assert pool.advice_on_pages(4 * GIB, setting) is None, "not worth a line"


def test_a_system_that_pins_little_is_warned_of_with_the_number(tmp_path):
    kernel = tmp_path / "osrelease"
    kernel.write_text("6.6.87-generic\n")
    assert pool.warning_of_little(240 * GIB, kernel) is None
    assert pool.warning_of_little(240 * GIB, tmp_path / "no such file") is None
    kernel.write_text("5.15.167.4-microsoft-standard-WSL2\n")
    assert pool.warning_of_little(GIB, kernel) is None
    said = pool.warning_of_little(9 * GIB, kernel)
    assert said is not None and tells(said, "9.00 GiB", "1.00 GiB")
    assert "Windows" in pool.refusal(GIB, 2 * GIB, 9 * GIB, kernel)


@pytest.mark.parametrize(
    ("lockable", "reason"),
    [(8 * 2**20, r"lock 8\.00 MiB"), (resource.RLIM_INFINITY, "container")],
)
def test_a_refusal_names_the_numbers_the_reason_and_what_helps(lockable, reason, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (lockable, lockable))
    said = pool.refusal(GIB, 2 * GIB, 9 * GIB)
    assert tells(said, "1.00 GiB", "2.00 GiB", "9.00 GiB")
    assert re.search(reason, said) and "`host_budget`" in said
