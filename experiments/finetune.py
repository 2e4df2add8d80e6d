"""Fine-tunes an open-weights model, as `megatrain-jax finetune` does, without an installation.

python experiments/finetune.py --model checkpoints/Qwen2.5-7B --data chats.jsonl --out mine
"""

import sys

from megatrain_jax._src.lm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["finetune", *sys.argv[1:]]))
