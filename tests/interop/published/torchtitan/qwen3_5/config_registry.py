# torchtitan 0.3.0 (package index): torchtitan/models/qwen3_5/config_registry.py
from . import model_registry


def qwen35_9b() -> Trainer.Config:
    model_spec = model_registry("9B")
    return Trainer.Config(
        tokenizer=MultiModalTokenizer.Config(**QWEN3_5_SPECIAL_TOKENS),
        model_spec=model_spec,
        dataloader=_dataloader("cc12m"),
        optimizer=default_adamw(lr=5e-4),
        training=TrainingConfig(local_batch_size=4, seq_len=4096, steps=1000),
        parallelism=ParallelismConfig(data_parallel_shard_degree=-1, tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )
