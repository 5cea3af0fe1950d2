"""What must be done: exact integers, never sees a machine.

operations/   every operation of a layer: FLOPs, bytes moved, bytes kept
memory/       bytes that live on a rank: states, activations, the peak
traffic · message   what a rank sends in a step; of several units at once: buckets · fetches · lists
update        what the optimizer sends, multiplies and holds
work · counts FLOPs of a step; all counts of one model and job, in a cache
"""
