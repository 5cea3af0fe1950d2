"""Pictures that explain rather than report: what a machine, a format or a collective is, and where operations stand.

roofline                      a step's operations under the roofs of a chip
machine                       the topology of a machine; what its links give a collective of any size
formats · collectives · masks bits, range and spacing of numbers; who holds what; which rank computes which scores
"""
