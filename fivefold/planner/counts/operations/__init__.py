"""The operations of a decoder as one rank runs them: the one list that FLOPs, bytes, messages and time are read from.

layer        embedding, block, head             attention · feedforward   their operations, dense, latent, experts
linear       column and row parallel            fused_linears   several linear layers on one input as one operation
op           the record of an operation         recompute · narrow   what runs again; what is kept in fp8
part         a rank's share of a micro-batch    kernels         what an operation holds where Triton computes it
prediction   the head, with multi-token prediction   autocast   what PyTorch's autocast makes of a list
built        all of them by part, once each
"""
