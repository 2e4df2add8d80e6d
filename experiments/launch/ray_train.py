"""A run of two hosts under Ray Train: `ray job submit -- python ray_train.py`.

Ray starts a worker for all GPUs of each host, connects them, and starts all anew if one fails.
"""

from pathlib import Path


def train(config: dict) -> None:
    """Trains in one of Ray's workers."""
    import jax
    import optax
    import ray.train  # pyright: ignore[reportMissingImports]

    import megatrain_jax as mt
    from megatrain_jax import data, models

    # Ray's `JaxTrainer` has connected the workers, in versions that do so with GPUs.
    mt.distributed.initialize()
    if jax.process_count() != ray.train.get_context().get_world_size():
        raise RuntimeError("each worker would train alone: this Ray connects JAX only on TPUs")
    pretrained = models.load_pretrained(config["model"])
    sizes = {"length": config["length"], "batch_size": config["batch"]}
    batches = data.chat(config["data"], config["model"], **sizes)
    result = mt.fit(
        pretrained.model,
        models.next_token_loss,
        batches,
        optax.adamw(1e-5),
        params=pretrained.params,
        steps=config["steps"],
        checkpoint_dir=Path(config["out"]) / "checkpoints",
        checkpoint_every=100,
    )
    models.save_pretrained(result.trainer, Path(config["out"]) / "model")


if __name__ == "__main__":
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore
    from ray.train.v2.jax import JaxTrainer  # pyright: ignore

    JaxTrainer(
        train,
        train_loop_config={
            "model": "/runs/Qwen3-8B",
            "data": "/runs/chats.jsonl",
            "out": "/runs/tuned",
            "length": 4096,
            "batch": 64,
            "steps": 1000,
        },
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 8}),
        run_config=RunConfig(storage_path="/runs", failure_config=FailureConfig(max_failures=20)),
    ).fit()
