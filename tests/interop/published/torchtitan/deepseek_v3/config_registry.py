# torchtitan 0.3.0 (package index): torchtitan/models/deepseek_v3/config_registry.py
from . import model_registry


def deepseek_v3_671b() -> Trainer.Config:
    model_spec = model_registry("671B", attn_backend="flex")
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        ),
        model_spec=model_spec,
        optimizer=default_adamw(lr=2.2e-4),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=2000, decay_ratio=0.8, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(local_batch_size=4, seq_len=4096, steps=10000, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(pipeline_parallel_schedule="Interleaved1F1B", expert_parallel_degree=2),
        activation_checkpoint=SelectiveAC.Config(),
        compile=CompileConfig(enable=True, components=["loss"]),
    )
