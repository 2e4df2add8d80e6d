"""The loop around steps: batches, records, evaluation, checkpoints."""
