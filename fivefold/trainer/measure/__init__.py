"""Measurements of training: bytes, FLOPs and messages of one step, the seconds of a few others.

meter · measured_step     counts storages, FLOPs and messages below autograd; the result on a rank
loop_meter                the same in any third-party training loop
noise_scale               the gradient noise scale of steps, from norms
tracer · regions          chooses the steps to trace; makes the training code report to the recorder
host_heap                 returns freed memory on CPU to the operating system
recorder · clock          marks, read into spans and messages; clocks of host and stream, and their offset to rank 0
"""
