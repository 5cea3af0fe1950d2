"""Configurations of other software: read as model, layout and job, and written from them.

format · registry       the parts of a format; the list of the formats keys                    tables of keys, each with
its kind, its meaning and its default read · write            a file or launch line to a ``Reading``; model, layout and
job to files files · render · equivalence   files as tables of values; values as text; models of equal cost shell/ ·
launch/        scripts and launch lines; Fivefold's run file, and jobs of other launchers for it huggingface/ ·
megatron/ · megatron_bridge/ · nanotron/ · torchtitan/ · torchtitan_toml/ · torchtune/
                        one folder for each format, with the same four modules: keys, parse, to_job, emit
"""
