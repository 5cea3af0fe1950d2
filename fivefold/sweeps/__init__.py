"""Many layouts of many models, machines and jobs: predicted, and run for real if asked; a row for each.

spec        the sweep file; every setting of it      predict    the rows of a setting
measure     trials, here or as jobs of Slurm         journal    what is done, through any kill
sweep       all of it                                rows_file  rows as Parquet, CSV or JSON lines
"""
