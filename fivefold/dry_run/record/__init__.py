"""From a step that runs to a tape: storages, kernels, messages, each with its place in the code.

tape        the events of one rank in one step          recorder    watches operations below autograd, writes it
recording   what one block did, to be played again      replay      like blocks play the recording of one
kernels     what a GPU would do for an operation        call_sites  module, file and line of an operation
"""
