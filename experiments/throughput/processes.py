"""Measures one configuration in several processes of this host, which share its GPUs equally.

    python processes.py COUNT [--as-hosts] [options of measure.py]

`--devices` is the number of all GPUs, by default one for each process. With `--as-hosts` (root on
Linux) each process has a boot id of its own, by which this library and NCCL tell hosts apart: the
processes are hosts that reach each other by sockets only.
"""

import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

_BIND = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'


def main() -> None:
    """Starts measure.py as often as asked for, and ends with the worst of the statuses."""
    if len(sys.argv) < 2 or not sys.argv[1].isdecimal():
        sys.exit(__doc__)
    count, *options = sys.argv[1:]
    as_hosts = "--as-hosts" in options
    options = [option for option in options if option != "--as-hosts"]
    if "--devices" not in options:
        options += ["--devices", count]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("measure.py"))
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for index in range(int(count)):
            alone = []
            if as_hosts:
                boot = Path(folder, str(index))
                boot.write_text(f"{uuid.uuid4()}\n")
                alone = ["unshare", "--mount", "sh", "-c", _BIND, str(boot)]
            joined = ["--join", str(index), count, str(port)]
            running.append(subprocess.Popen([*alone, sys.executable, script, *options, *joined]))
        sys.exit(max(abs(process.wait()) for process in running))


if __name__ == "__main__":
    main()
