"""What a step really did: bytes, FLOPs and messages of one, the seconds of a few others.

meter · measured_step     storages, FLOPs and messages below autograd; what a rank held and did
loop_meter                the same in anybody's loop
noise_scale               the gradient noise scale of steps, from norms
tracer · regions          which steps are traced; the calls that report to
recorder · clock          marks, read into spans and messages; of the host or a stream, and how far off rank 0's
"""
