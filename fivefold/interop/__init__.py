"""Configurations of other software: read as model, layout and job, and written from them.

format · registry       what a format is; the list of the formats
keys                    tables of keys, each with its kind, its meaning and its default
read · write            a file or launch line to a ``Reading``; model, layout and job to files
files · render · equivalence   files as tables of values; values as text; models that cost the same
shell/ · launch/        scripts and launch lines; our run file, and what starts it elsewhere
huggingface/ · megatron/ · megatron_bridge/ · nanotron/ · torchtitan/ · torchtitan_toml/
                        one folder for each format, with the same four modules: keys, parse, to_job, emit
"""
