"""Pictures as SVG that the server draws: colours and type are the style sheet's, sizes follow the window.

svg · plot                 elements; axes around marks, text that keeps its size at any width
bars · interval            parts of a whole; where comparable runs lie
memory · pipeline · streams   over time: stacked live bytes; who does what when; what a rank does at once
scatter · lines · heat     a front or a sweep; curves of a run; a table of colours
"""
