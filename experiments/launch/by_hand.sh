#!/bin/bash
# ./by_hand.sh 0 on the first host, and ./by_hand.sh 1 on the second: one process for all GPUs of each.
# node0 is the first host's name; the other one has to reach the port.
export JAX_COORDINATOR_ADDRESS=${COORDINATOR:-node0:12345} JAX_NUM_PROCESSES=${HOSTS:-2} JAX_PROCESS_ID=$1
# After an error, and after a host is lost, all processes end; each host tries again.
for attempt in 1 2 3; do
  megatrain-jax finetune --config run.yaml
  status=$?
  # 0: finished; 2: a wrong option; 130 and 143: stopped by a signal.
  case $status in 0 | 2 | 130 | 143) break ;; esac
done
exit $status
