"""The stack: how a training framework runs a step, and which layouts it supports.

spec       the record: kernels, losses, overlap, reductions, memory; the layouts it runs
kernel_facts   properties of Fivefold's own kernels, and of kernels under autograd
entry      a fact with its source; a framework as a set of such facts
megatron   Megatron-LM, Megatron-DeepSpeed, Megatron-Core, Megatron-Bridge, NeMo
pytorch    FSDP2, torchtitan, and other trainers on FSDP
other_software  DeepSpeed, nanotron, InternEvo
catalog    all of them by name
"""
