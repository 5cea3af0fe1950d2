"""The configs of other software: read into our nouns, and written from them.

read · write     a file or launch line to a ``Reading``; model, layout and job to files
keys · format    tables of keys, each with its meaning and default; what a format is
files · render   files as tables of values; values as text
torchtitan/      TOML and Python configs
"""
