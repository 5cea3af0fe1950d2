"""Pictures that explain: machines, number formats, collectives, masks, and operations under the roofline.

roofline      a step's operations under the roofs of a chip
machine       the topology of a machine; the bandwidth of a collective over it, by size
formats       number formats: bits, range and spacing of numbers
collectives   buffers of ranks before and after a collective
masks         which rank computes which attention scores
"""
