"""A process that writes to an unfinished folder, and is killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain_jax._src.common import unfinished

# The file alone, because the whole package takes seconds to import.
_PROGRAM = """
import runpy, sys
from pathlib import Path
folder = runpy.run_path(sys.argv[1])["UnfinishedFolder"](Path(sys.argv[2]))
(folder.path / "part").write_bytes(bytes(1000))
print(folder.path, flush=True)
sys.stdin.read()
"""


@contextmanager
def left_by(final: Path) -> Iterator[Path]:
    """Yields the unfinished folder of a process that lives until the body ends, and is killed."""
    command = [sys.executable, "-c", _PROGRAM, unfinished.__file__, str(final)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield Path(process.stdout.readline().decode().strip())
        finally:
            process.kill()
