"""Pictures that explain: machines, number formats, collectives, masks, and operations under the roofline.

roofline                      a step's operations under the roofs of a chip machine                       the topology
of a machine; the bandwidth of a collective over it, by size formats · collectives · masks bits, range and spacing of
numbers; buffers of ranks; which rank computes which scores
"""
