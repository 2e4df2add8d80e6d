#!/bin/bash
# ./torchrun.sh on each host, with the first host's name in HEAD: a process for each GPU, restarted up
# to three times. One or two hosts take part, as many as are there.
torchrun --nnodes="${HOSTS:-1:2}" --nproc-per-node="${GPUS:-8}" --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-endpoint="${HEAD:-node0}:29400" --rdzv-id=tuned \
  -m megatrain_jax finetune --config run.yaml
