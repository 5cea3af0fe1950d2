# torchtitan 0.3.0 (package index): torchtitan/models/gpt_oss/config_registry.py
from . import model_registry


def gpt_oss_120b() -> Trainer.Config:
    model_spec = model_registry("120b")
    return Trainer.Config(
        model_spec=model_spec,
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=10000),
        parallelism=ParallelismConfig(expert_parallel_degree=1),
        activation_checkpoint=FullAC.Config(),
    )
