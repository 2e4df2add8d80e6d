"""Names in Keras, Lightning, PyTorch, Transformers, TRL, PEFT and vLLM, and ours for the same.

All hints come from these tables: of functions, records, attributes, modules and the command. A
name of several of this library's options means the first one that the called function has.
"""

# This library's arguments, options of the command and public names: their names elsewhere.
_SAME = {
    # A run.
    "steps": "max_steps num_steps total_steps train_steps num_train_steps max_iters iterations "
    "steps_per_epoch num_training_steps",
    "epochs": "num_epochs max_epochs n_epochs num_train_epochs nb_epoch nb_epochs",
    "microbatches": "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps "
    "gradient_accumulation accumulation_steps num_microbatches steps_per_generation",
    "data": "train_data train_dataset dataset dataset_name datasets train_dataloader "
    "train_dataloaders dataloader train_file x",
    "eval_data": "val_data validation_data eval_dataset val_dataset eval_dataloader "
    "val_dataloader val_dataloaders valid_data test_data validation_file",
    "eval_every": "eval_steps eval_interval val_check_interval validation_freq "
    "check_val_every_n_epoch eval_strategy evaluation_strategy",
    "checkpoint_dir": "output_dir save_dir ckpt_dir default_root_dir checkpoint_path logging_dir",
    "checkpoint_every": "save_steps save_every save_interval checkpoint_interval save_strategy "
    "every_n_train_steps save_freq",
    "keep": "save_total_limit max_to_keep save_top_k",
    "resume": "resume_from_checkpoint ckpt_path restore",
    "progress": "verbose progress_bar enable_progress_bar show_progress disable_tqdm",
    "precision": "dtype mixed_precision compute_dtype bf16 fp16 torch_dtype half_precision",
    "seed": "random_seed rng rngs key data_seed random_state",
    "hardware": "gpu card",
    "device_budget": "device_memory gpu_memory gpu_budget vram gpu_memory_utilization",
    "host_budget": "host_memory cpu_memory host_gib ram",
    "num_gpus": "gpus n_gpus n_gpu num_devices devices",
    "gpus": "n_gpus n_gpu num_gpus num_devices devices",
    "mesh": "gpus n_gpus n_gpu num_gpus num_devices devices strategy sharding",
    "optimizer": "optim optimizers optimizer_cls opt tx",
    "loss_fn": "loss loss_function criterion compute_loss compute_loss_func",
    "params": "weights initial_weights state_dict initial_params",
    "on_nonfinite": "terminate_on_nan detect_anomaly skip_nan",
    "trainable": "trainable_params trainable_parameters requires_grad",
    # Precision.
    "compute": "dtype bf16 fp16 torch_dtype mixed_precision precision compute_dtype",
    "master": "param_dtype params weights param_type",
    "state": "optimizer opt_state moments",
    "sums": "gradients grad_dtype reduce_dtype",
    "frozen": "load_in_4bit load_in_8bit quantization quantization_config",
    "products": "matmul fp8 float8 float8_e4m3fn float8_e5m2 use_fp8",
    # Data.
    "source": "path paths file files data_files dataset dataset_name_or_path data train_dataset "
    "data_path rows trainer",
    "length": "max_length max_seq_length max_seq_len seq_len sequence_len sequence_length "
    "cutoff_len model_max_length block_size context_length max_tokens",
    "batch_size": "batch per_device_train_batch_size train_batch_size micro_batch_size",
    "batch": "batch_size per_device_train_batch_size train_batch_size micro_batch_size "
    "per_device_batch_size",
    "tokenizer": "processing_class processor tokenizer_name tokenizer_path",
    "processor": "processing_class tokenizer image_processor",
    "columns": "column_mapping dataset_text_field text_column prompt_column response_column "
    "remove_columns",
    "shuffle": "shuffle_dataset shuffle_data",
    "too_long": "truncation truncate truncation_mode overflow",
    "train_on": "assistant_only_loss completion_only_loss train_on_responses train_on_inputs "
    "mask_prompt",
    "workers": "num_workers dataloader_num_workers num_proc dataset_num_proc "
    "preprocessing_num_workers",
    "cache": "cache_dir data_cache",
    "data_cache": "cache cache_dir",
    "chat_template": "template prompt_template chat_template_path",
    "template_variables": "chat_template_kwargs template_kwargs",
    "rows": "train_dataset dataset data prompts",
    "invalid": "on_error skip_errors",
    "held_out": "val_size test_size validation_split eval_fraction val_ratio",
    "fraction": "test_size train_size held_out",
    "weights": "probabilities probs",
    # Models.
    "folder": "path model_path model_name pretrained_model_name_or_path model_name_or_path "
    "model_id name repo_id save_directory output_dir filepath dirpath log_dir logdir save_dir "
    "adapter_path model output",
    "model": "model_name_or_path base_model model_name pretrained_model_name_or_path policy module",
    "dtype": "torch_dtype export_dtype save_dtype",
    "pretrained": "model base_model",
    "ignore": "ignore_fields ignore_mismatched_sizes strict",
    "images": "vision multimodal use_images",
    "max_shard_bytes": "max_shard_size",
    "overwrite": "exist_ok force overwrite_output_dir",
    "vocabulary": "new_num_tokens vocab_size num_tokens tokenizer",
    "rank": "r lora_r lora_rank",
    "alpha": "lora_alpha neftune_noise_alpha noise_alpha",
    "dropout": "lora_dropout",
    "targets": "target_modules lora_target_modules lora_target lora_targets",
    "dora": "use_dora lora_dora",
    "rslora": "use_rslora lora_rslora",
    "modules_to_save": "lora_modules_to_save",
    # Generation.
    "max_tokens": "max_new_tokens max_length max_completion_length",
    "num_samples": "num_return_sequences num_generations n",
    "stop": "stop_strings stop_token_ids eos_token_id",
    "max_batch": "batch_size max_num_seqs",
    "temperature": "do_sample greedy",
    "on_text": "streamer stream callback",
    # GRPO.
    "rewards": "reward_funcs reward_functions reward_func reward_fn reward_model",
    "options": "args config grpo_config training_args",
    "max_completion_length": "max_new_tokens max_tokens",
    "num_generations": "num_return_sequences num_samples group_size n",
    "prompts_per_step": "generation_batch_size batch_size per_device_train_batch_size",
    "beta": "kl_coef kl_beta dpo_beta",
    "epsilon": "clip_range cliprange epsilon_low",
    "epsilon_high": "clip_range_high",
    "log_completions": "num_completions_to_print",
    "num_iterations": "num_ppo_epochs ppo_epochs mu",
    # Losses.
    "hidden": "hidden_states inputs input x",
    "head": "weight lm_head kernel lm_head_weight",
    "labels": "target targets y_true y",
    "mask": "attention_mask loss_mask sample_weight weights",
    "count": "num_items_in_batch normalizer num_tokens",
    "chunk": "chunk_size chunks num_chunks",
    "softcap": "logit_softcapping final_logit_softcapping logit_cap soft_cap logits_soft_cap",
    "z_loss": "z_loss_weight lse_square_scale z_loss_coef",
    "chosen": "chosen_logps policy_chosen_logps",
    "rejected": "rejected_logps policy_rejected_logps",
    "reference_chosen": "reference_chosen_logps ref_chosen_logps",
    "reference_rejected": "reference_rejected_logps ref_rejected_logps",
    "reference": "ref_logps ref_per_token_logps reference_logps",
    "logs": "per_token_logps logps log_probs report_to logger loggers",
    "old_logs": "old_per_token_logps old_logps",
    "topk_token_ids": "teacher_token_ids",
    "topk_logprobs": "teacher_logprobs teacher_logits",
    "distill_alpha": "alpha lmbda",
    # Callbacks.
    "metric": "monitor metric_for_best_model quantity",
    "metrics": "metric monitor",
    "min_delta": "early_stopping_threshold threshold",
    "patience": "early_stopping_patience stop_after",
    "stop_after": "early_stopping_patience patience",
    "mode": "metric_mode greater_is_better",
    "metric_mode": "mode greater_is_better",
    "keep_best": "load_best_model_at_end save_best_only save_best",
    "path": "filename file filepath log_file output_file folder save_path fname",
    "every": "interval freq frequency every_n_steps log_every_n_steps update_freq",
    "log_every": "logging_steps log_every_n_steps log_interval",
    "log": "log_scale logy logx",
    "smooth": "smoothing window",
    "experiment": "experiment_name project",
    "run_name": "name",
    # The command.
    "clip": "max_grad_norm gradient_clipping gradient_clip_val max_norm",
    "decay": "lr_scheduler_type lr_scheduler lr_schedule scheduler",
    "learning_rate": "lr",
    "warmup": "warmup_ratio warmup_steps",
    "b1": "adam_beta1 beta1",
    "b2": "adam_beta2 beta2",
    "weight_decay": "wd",
    "lora_rank": "lora_r rank",
    "lora_alpha": "alpha",
    "lora_targets": "lora_target_modules lora_target target_modules targets",
    "lora_rslora": "use_rslora rslora",
    "lora_dora": "use_dora dora",
    "lora_modules_to_save": "modules_to_save additional_target",
    "neftune_noise_alpha": "neftune neft_alpha",
    "objective": "loss_type stage pref_loss training_type rlhf_type",
    "new_tokens": "additional_special_tokens add_tokens new_special_tokens",
    "export_dtype": "save_dtype",
    "out": "output_dir save_dir output export_dir checkpoint_dir",
    "push": "push_to_hub hub_model_id",
    "push_private": "hub_private_repo private",
    "prompt": "message question",
    "system": "system_prompt system_message",
    "library": "backend infer_backend",
    "base": "base_model base_model_name_or_path model",
    "adapter": "adapter_name_or_path adapter_path peft_model",
    "tokens": "max_tokens tokens_per_step",
    # Public names.
    "fit": "fine_tune SFTTrainer SFTConfig TrainingArguments",
    "Trainer": "Seq2SeqTrainer LightningModule Model",
    "CSVLog": "CSVLogger CSV",
    "JSONLog": "JSONLogger",
    "TensorBoard": "TensorBoardLogger TensorBoardCallback",
    "WandB": "WandbLogger WandbCallback WandbMetricsLogger wandb",
    "MLflow": "MLFlowLogger MLflowCallback",
    "EarlyStopping": "EarlyStoppingCallback",
    "KeepBest": "ModelCheckpoint SaveBest BestCheckpoint",
    "Callback": "LambdaCallback TrainerCallback",
    "Profile": "Profiler ProfilerCallback JaxProfiler PyTorchProfiler",
    "chat": "load_dataset sft conversations messages apply_chat_template instruct",
    "preferences": "pairs dpo pairwise",
    "text": "pretraining plain_text load_text raw_text",
    "unpaired": "kto",
    "mix": "interleave_datasets concatenate_datasets mixture",
    "load_pretrained": "from_pretrained AutoModelForCausalLM AutoModel load_model load "
    "FlaxAutoModel FlaxAutoModelForCausalLM",
    "lora": "LoraConfig get_peft_model PeftConfig add_lora",
    "load_lora": "PeftModel load_adapter",
    "save_lora": "save_adapter",
    "merge_lora": "merge_and_unload",
    "GrpoOptions": "GRPOConfig GrpoConfig",
    "grpo": "grpo_loss GRPOLoss",
    "train_grpo": "GRPOTrainer grpo ppo",
    "Generator": "LLM LLMEngine",
    "generate": "pipeline TextGenerationPipeline",
    "resize_vocabulary": "resize_token_embeddings",
    "next_token": "cross_entropy CrossEntropyLoss SparseCategoricalCrossentropy ForCausalLMLoss "
    "softmax_cross_entropy_with_integer_labels fused_linear_cross_entropy causal_lm_loss",
    "next_token_loss": "causal_lm_loss lm_loss sft_loss cross_entropy_loss",
    "distillation": "kl_div KLDivLoss gkd teacher",
    "log_probabilities": "selective_log_softmax log_softmax get_batch_logps token_logps",
}
MEANT: dict[str, list[str]] = {}
for _ours, _theirs in _SAME.items():
    for _name in _theirs.split():
        MEANT.setdefault(_name, []).append(_ours)

# Which functions of this library take an option that the called one doesn't have.
RUN_OPTIONS = (
    "params microbatches waves precision device_budget host_budget trainable on_nonfinite "
    "max_skipped seed hardware mesh"
).split()
LOOP_OPTIONS = (
    "steps epochs eval_data eval_every checkpoint_dir checkpoint_every keep callbacks progress"
).split()
TAKERS = {
    "`Trainer` and `fit` take": RUN_OPTIONS,
    "`fit` and `train` take": LOOP_OPTIONS,
    "`plan` takes": ["host_gib", "num_gpus", "measure"],
    "`mt.Precision` takes": ["compute", "master", "state", "sums", "frozen", "products"],
    "`data.chat` takes": ["length", "too_long", "train_on", "workers", "chat_template", "shuffle"],
    "`models.lora` takes": ["rank", "alpha", "targets", "dora", "rslora"],
    "`models.generate` takes": ["max_tokens", "num_samples", "stop", "top_k", "top_p"],
    "`models.GrpoOptions` takes": [
        "num_generations",
        "prompts_per_step",
        "max_completion_length",
        "epsilon",
        "epsilon_high",
        "log_completions",
        "num_iterations",
        "scale_rewards",
        "reward_weights",
        "mask_truncated_completions",
        "use_bias_correction_kl",
    ],
    "`callbacks.EarlyStopping` takes": ["patience", "min_delta"],
}
# Public names of the modules, which people look for in the package and in the other modules.
MODULES = {
    "callbacks": "CSVLog EarlyStopping JSONLog KeepBest LiveCurve MLflow Profile Samples "
    "TensorBoard WandB Callback",
    "data": "chat preferences text unpaired image_chat mix prompts",
    "losses": "next_token log_probabilities group_advantages",
    "models": "Decoder GrpoOptions generate Generator load_lora load_pretrained lora merge_lora "
    "neftune next_token_loss resize_vocabulary reward_model save_lora save_pretrained train_grpo",
    "objectives": "dpo ipo orpo simpo kto reward distill",
}


def _by_name(ways: dict[str, str]) -> dict[str, str]:
    """Each name's way, from the names of each way."""
    return {name: way for way, names in ways.items() for name in names.split()}


_SCHEDULE = (
    "the optimizer has it, as in "
    "optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 100, 1000))"
)
_PLACES = "parameters are in host memory, and the trainer brings them to the GPU"
_REMAT = "the plan decides what is computed again, so that a run fits"
_PACKED = "rows are always packed"
_BEST = "use callbacks.KeepBest(folder), and then trainer.restore(keep.path)"
_COMPILED = "everything is compiled when a trainer is made"
_EXPORT = (
    "call megatrain_jax.models.save_pretrained(trainer, folder) for a Hugging Face checkpoint, or "
    "`save` of a trainer"
)
# What has no option: how a call reaches the same, and the names of it.
SENTENCES = _by_name(
    {
        "did you mean `device_budget`, for the GPU's memory, or `host_budget`, for the host's "
        "memory?": "budget memory max_memory memory_budget mem",
        "the optimizer has it, as in optax.adamw(1e-3, weight_decay=0.1)": "lr learning_rate "
        "weight_decay momentum b1 b2 adam_beta1 adam_beta2 adam_epsilon",
        _SCHEDULE: "warmup warmup_steps warmup_ratio lr_scheduler lr_scheduler_type scheduler",
        "the optimizer clips: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))": (
            "max_grad_norm gradient_clip_val clip gradient_clipping clipnorm"
        ),
        'loss_fn returns them, as in (loss, {"accuracy": accuracy})': "metrics compute_metrics",
        "pass logs in `callbacks`, such as callbacks.CSVLog, TensorBoard or WandB": "report_to "
        "logger loggers logging_steps log_every_n_steps run_name",
        _REMAT: "gradient_checkpointing remat use_remat activation_checkpointing",
        _PLACES: "device_map device cuda low_cpu_mem_usage offload_folder accelerator",
        "set rows aside yourself, and pass them as `eval_data`": "validation_split",
        "a run goes on from the last checkpoint in its `checkpoint_dir`": "initial_epoch",
        "`megatrain_jax.data` makes batches of texts, as in data.chat(rows, tokenizer, ...)": (
            "data_collator collate_fn processing_class dataset_text_field formatting_func"
        ),
        "attention needs no option here": "attn_implementation use_flash_attention_2 use_cache",
        _PACKED: "packing padding pad_to_multiple_of padding_side padding_free",
        'the run has it: precision=mt.Precision(frozen="nf4")': "load_in_4bit load_in_8bit "
        "quantization_config quantization",
        "add adapters first: models.lora(pretrained.model, params=pretrained.params, rank=16)": (
            "peft_config lora_config"
        ),
        "download the folder yourself, and pass its path": "trust_remote_code revision token "
        "use_auth_token",
        "the reference is the model without its adapters, or a stored copy": "ref_model "
        "reference_model",
        "the trained model itself writes the completions": "use_vllm vllm_mode",
        "`trainable` chooses the parameters that are trained, and all others are frozen": (
            "freeze frozen_params freeze_layers"
        ),
        _BEST: ("restore_best_weights load_best_model_at_end save_best_only save_weights_only"),
        "losses are means; `mask` and `count` say over what": "reduction",
        "negative labels don't count": "ignore_index",
        "it takes hidden states and the head, and never stores the logits": "logits from_logits",
        _COMPILED: "jit jit_compile torch_compile run_eagerly",
    }
)
# Attributes that trainers, results and models have elsewhere.
ATTRIBUTES = _by_name(
    {
        "call megatrain_jax.train(trainer, data)": "train fit",
        "call `predict` of a trainer, or the trained model, `model`": "forward apply predict_step",
        "call megatrain_jax.models.generate(trainer, prompts)": "generate chat",
        'read the records of `history`, as in history["loss"]': "loss losses metrics log_history "
        "logged_metrics callback_metrics log_metrics",
        "a trainer has `restore`": "load load_checkpoint resume load_weights load_state_dict",
        "its parameters are `params`": "state_dict parameters weights get_weights "
        "named_parameters trainable_variables",
        _EXPORT: "save_model save_pretrained export push_to_hub",
        "a trainer has `save`": "save_checkpoint save_weights save_state",
        "call megatrain_jax.models.save_lora(trainer, folder), or models.merge_lora(model)": (
            "save_adapter merge_and_unload"
        ),
        "a trainer has `evaluate`": "test validate evaluation_loop",
        "a trainer has `num_steps`": "global_step current_step step_count iteration",
        "a trainer has `step`": "train_step training_step train_on_batch",
        "print its `plan`": "num_parameters count_params summary print_trainable_parameters",
        "pass `callbacks=` to `train`": "add_callback callbacks callback_handler",
        "pass the checkpoint's folder where a tokenizer is needed": "tokenizer processing_class",
        _PLACES: "to cuda cpu half bfloat16 float device",
        _COMPILED: "compile",
        "the optimizer is an argument of `Trainer` and `fit`, and its state is `opt_state`": (
            "optimizer lr_scheduler optimizers lr learning_rate"
        ),
        "`trainer` of a result has it": "predict evaluate eval step restore save opt_state",
        _BEST: "best_model best_model_checkpoint best_checkpoint best_params",
        _REMAT: "gradient_checkpointing_enable enable_input_require_grads",
    }
)
# Constants of version 0.1.
_CARDS = (
    "A10G A100_40GB A100_80GB B200 GH200 H100 H200 HGX_H100 HGX_H200 L4 L40S P100 RTX_2060 "
    "RTX_2070 RTX_2080 RTX_2080_TI RTX_3060 RTX_3080 RTX_3090 RTX_4090 RTX_5090 RTX_A6000 T4 V100 "
    "V100_16GB"
)
# Public names, there or in other libraries, that have none here.
PUBLIC = {
    name: f'cards go by name: hardware="{shown}", or megatrain_jax.card("{shown}")'
    for name in _CARDS.split()
    for shown in [name.replace("_", " ")]
} | _by_name(
    {
        _SCHEDULE: "LearningRateScheduler ReduceLROnPlateau LRScheduler",
        "loss_fn may return it as a metric": "LearningRateMonitor",
        '`fit` has on_nonfinite="raise"': "TerminateOnNaN NanGuard",
        "`fit` has `progress`": "ProgressBar TQDMProgressBar RichProgressBar ProgbarLogger "
        "ProgressCallback",
        "`fit` writes checkpoints: pass `checkpoint_dir` and `checkpoint_every`": (
            "BackupAndRestore Checkpoint Checkpointer save_checkpoint"
        ),
        "any function (model, batch) that returns a scalar is a loss, such as one of Optax's": (
            "MSELoss mse mean_squared_error MeanSquaredError BCELoss bce"
        ),
        "use data.preferences and objectives.dpo, or megatrain-jax finetune --objective dpo": (
            "DPOTrainer DPOConfig dpo_loss DPOLoss"
        ),
        "use objectives.kto, reward, orpo or simpo, or --objective of megatrain-jax finetune": (
            "KTOTrainer RewardTrainer ORPOTrainer CPOTrainer"
        ),
        "data.chat and its siblings make batches": "DataLoader DataCollatorForLanguageModeling "
        "DataCollatorForSeq2Seq DataCollatorForCompletionOnlyLM tokenize",
        "use Transformers' own": "AutoTokenizer Tokenizer load_tokenizer",
        'write precision=mt.Precision(frozen="nf4")': "BitsAndBytesConfig GPTQConfig",
        "models.generate takes `temperature`, `top_p` and `max_tokens`": "GenerationConfig "
        "SamplingParams",
        'pass `mesh`, as in mesh=jax.make_mesh((n,), ("data",)) for n GPUs': "Accelerator "
        "FSDPStrategy DeepSpeedStrategy DistributedDataParallel",
        _COMPILED: "compile jit",
        _EXPORT: "save save_model push_to_hub",
    }
)
# Options that the command doesn't have.
COMMAND = _by_name(
    {
        "all GPUs that JAX sees are used; the environment variable CUDA_VISIBLE_DEVICES chooses "
        "them": "gpus num_gpus n_gpu n_gpus devices num_devices gpu nproc_per_node num_processes "
        "deepspeed fsdp mesh tensor_parallel_size",
        "the same command with the same `--out` continues a run": "resume resume_from_checkpoint "
        "overwrite_output_dir",
        _REMAT: "gradient_checkpointing remat",
        _PACKED: "packing padding padding_free",
        "write `--frozen nf4 --lora-rank 16`": "qlora load_in_4bit load_in_8bit quantization bits",
        "write `--lora-rank 16`": "lora use_lora peft use_peft peft_type finetuning_type",
        "write `--logs wandb --wandb '{project: NAME}'`": "project wandb_project run_name",
        "attention needs no option here": "flash_attn attn_implementation use_flash_attention_2",
    }
)
