"""The layout: how a training step is distributed over ranks.

spec · text · names the record; the tokens of its text; names of axes, kinds of context parallelism
pattern · where     several layouts as one text; constraints on layouts
validity/ · remarks reasons why a layout is not valid; what is valid but perhaps not intended
batch               the global batch of a question that names none
stored_base         the base of an adapter that names none
quantized_base      how tensor parallelism cuts a base in few bits
mesh                process groups by axis          sharding · local_weight   the part of a weight that each rank holds
stages · schedule/  layers of pipeline stages; pipeline schedules as tables
recomputation       the operations of each group that ``ac=`` recomputes
"""
