"""Pages and pictures of a sweep.

settings                         which settings of a sweep vary; the best row of each
table                            the page on a terminal
charts · sequence · predicted_vs_measured  MFU by ranks and model; memory and MFU by sequence; against measured
panels                           pictures of several panels
"""
