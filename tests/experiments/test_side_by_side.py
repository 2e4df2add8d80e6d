"""Commands side by side: their share of a GPU, and one that fails."""

import sys

import pytest
import side_by_side

from megatrain_jax._src.engine.startup import allocator


def test_processes_divide_the_share_that_this_process_has(monkeypatch, tmp_path):
    code = (
        "import os, sys; from pathlib import Path; "
        f"Path(sys.argv[1]).write_text(os.environ.get('{allocator.FRACTION}', 'none'))"
    )
    commands = [[sys.executable, "-S", "-c", code, str(tmp_path / str(i))] for i in range(2)]

    def shares(workers: int) -> list[str]:
        side_by_side.run_commands(commands, workers)
        return [(tmp_path / str(i)).read_text() for i in range(2)]

    # As the library sets it where there is a GPU, and as users do by the old name.
    monkeypatch.setenv(allocator.FRACTION, "0.85")
    assert shares(2) == ["0.4250"] * 2 and shares(1) == ["0.85"] * 2
    monkeypatch.delenv(allocator.FRACTION)
    monkeypatch.setenv(allocator.OLD_FRACTION, "0.5")
    assert shares(2) == ["0.2500"] * 2


def test_a_command_that_fails_is_named_after_all_have_ended(tmp_path):
    commands = [
        [sys.executable, "-S", "-c", "raise SystemExit(3)"],
        [sys.executable, "-S", "-c", f"open({str(tmp_path / 'done')!r}, 'w')"],
    ]
    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        side_by_side.run_commands(commands)
    assert (tmp_path / "done").exists()
