# torchtitan 0.3.0 (package index): torchtitan/models/qwen3/config_registry.py
from . import model_registry


def qwen3_30b_a3b() -> Trainer.Config:
    model_spec = model_registry("30B-A3B")
    return Trainer.Config(
        model_spec=model_spec,
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=4096, steps=3000),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=-1, tensor_parallel_degree=1, context_parallel_degree=1,
            pipeline_parallel_degree=1,
        ),
        checkpoint=CheckpointManager.Config(interval=500, last_save_model_only=False, export_dtype="float16"),
        activation_checkpoint=FullAC.Config(),
    )
