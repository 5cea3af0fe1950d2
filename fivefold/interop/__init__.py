"""The configs of other software: read into our nouns, and written from them.

read · write     a file or launch line to a ``Reading``; model, layout and job to files
keys · format · equivalence   tables of keys, each with its meaning and default; a format; models that cost the same
files · render   files as tables of values; values as text
shell/ · launch/ scripts and launch lines; our run file, and what starts it elsewhere
huggingface/ · megatron/ · nanotron/ · torchtitan/   one folder for each software
"""
