"""Records a running step on a tape: storages, kernels, messages, each with its place in the code.

tape        the events of one rank in one step          recorder    watches operations below autograd, writes the tape
recording   the events of one block, to be replayed     replay      equal blocks replay the recording of one
repetition  micro-batches that repeat are copied        kernels     the GPU kernels of an operation
call_sites  module, file and line of an operation
"""
