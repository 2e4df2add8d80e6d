#!/bin/bash
# sbatch slurm.sh: one process for all GPUs of each host, on two hosts, or on one if no more are left.
#SBATCH --job-name=tuned
#SBATCH --nodes=1-2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300

# One lost host ends all processes, and Slurm then requeues the job because of --requeue.
srun --kill-on-bad-exit=1 megatrain-jax finetune --config run.yaml
status=$?
# SIGTERM, 300 s before the time is over: the run has saved its last step, and goes on in the next job.
case $status in
  130 | 143) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $status
