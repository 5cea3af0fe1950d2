"""The stack: how a training software goes about a step, and what layouts it can run.

spec       the record: kernels, losses, overlap, reductions, memory; the layouts it runs
kernel_facts   what Fivefold's own kernels do, and what those under autograd do
entry      a fact with its source, and a named software as such facts
megatron   Megatron-LM, Megatron-DeepSpeed, Megatron-Core, Megatron-Bridge, NeMo
pytorch    FSDP2, torchtitan, and other trainers on FSDP
others     DeepSpeed, nanotron, InternEvo
catalog    all of them by name
"""
