"""Pages and pictures of a sweep.

settings                         which settings of a sweep vary; the best row of each
table                            the page on a terminal
charts · sequence                MFU by ranks and model, predicted against measured; memory and MFU by sequence
panels                           pictures of several panels
"""
