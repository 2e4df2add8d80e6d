"""Measures one configuration in several processes of this host, each with a GPU of its own."""

import socket
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Starts measure.py as often as there are GPUs, and ends with the worst of the statuses."""
    if len(sys.argv) < 2 or not sys.argv[1].isdecimal():
        sys.exit(f"usage: {Path(sys.argv[0]).name} COUNT [options of measure.py]")
    count, *options = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("measure.py"))
    running = [
        subprocess.Popen(
            [sys.executable, script, *options, "--devices", count]
            + ["--join", str(index), count, str(port)]
        )
        for index in range(int(count))
    ]
    sys.exit(max(abs(process.wait()) for process in running))


if __name__ == "__main__":
    main()
