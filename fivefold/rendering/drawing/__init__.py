"""Pictures as SVG for a page, a report, a notebook: drawn in milliseconds, as wide as the window, light and dark.

style · svg · plot            the style sheet; elements; axes around marks, text that keeps its size at any width
file                          a picture as a separate file
bars · interval               parts of a total; where comparable runs lie
memory · pipeline · streams   over time: stacked live bytes; the actions of each rank; the streams of one rank
scatter · lines · heat        a front or a sweep; curves of a run; a table of colours
parallel                      parallel coordinates of layouts
"""
