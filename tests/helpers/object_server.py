"""A simulated S3 on this machine, by Moto's server, if that is installed."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from ports import free_port

BUCKET = "bucket"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Starts the server with an empty bucket, and yields the environment of its users."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=null, stderr=null) as process:
        try:
            while True:
                try:
                    made = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
                    urllib.request.urlopen(made).close()
                    break
                except OSError:
                    assert process.poll() is None, "Moto's server has ended"
                    time.sleep(0.1)
            keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "none")
            config = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
            yield {"AWS_ENDPOINT_URL": address, **keys, **config}
        finally:
            process.kill()
