"""A sweep predicts many layouts of many models, machines and jobs, and can also run them; each gives one row.

spec        the sweep file and its settings          predict    the predicted rows of a setting
measure     trials on this computer or by Slurm      journal    what is finished; survives a kill at any moment
sweep       a full sweep                             trial      trains a layout for a few steps
finalists   trains the best layouts of a search      rows_file  rows as Parquet, CSV or JSON lines
"""
