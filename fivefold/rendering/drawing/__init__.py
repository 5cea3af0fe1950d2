"""Pictures as SVG in a page, a report, a notebook: drawn in milliseconds, as wide as the window, light and dark.

style · svg · plot         the style sheet; elements; axes around marks, text that keeps its size at any width
file                       a picture as a file of its own
bars · interval            parts of a whole; where comparable runs lie
memory · pipeline · streams   over time: stacked live bytes; who does what when; what a rank does at once
scatter · lines · heat     a front or a sweep; curves of a run; a table of colours
"""
