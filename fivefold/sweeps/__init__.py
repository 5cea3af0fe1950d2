"""Many layouts of many models, machines and jobs: predicted, and run for real if asked; a row for each.

spec        the sweep file; every setting of it      predict    the rows of a setting
measure     trials, here or as jobs of Slurm         journal    what is done, through any kill
sweep       all of it                                trial      trains a layout for a few steps
finalists   the best of a search, trained            rows_file  rows as Parquet, CSV or JSON lines
"""
