"""A wheel in a fresh environment does what the documentation says; see `new_user.py`."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason='needed for checkpoints: pip install -e ".[torch]"')

import new_user


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_new_user_fine_tunes_a_checkpoint(tmp_path: Path):
    new_user.main(tmp_path)
