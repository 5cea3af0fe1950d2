"""A sweep to look at.

row · settings               one layout, predicted and perhaps measured, as a flat record; what varies, the best of it
table                        the page on a terminal
charts · sequence · measured MFU by ranks and model, throughput, scaling; memory and MFU by sequence; against measured
panels                       pictures of several panels
"""
