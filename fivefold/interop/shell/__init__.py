"""Launch lines and scripts, read word by word; nothing is executed.

script       a script as statements, which branch of an if is taken, and its commands with Slurm options
expand       variables, arrays and arithmetic in words
launch       what a launcher starts, on how many ranks
"""
