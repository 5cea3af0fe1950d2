"""Launch lines and scripts, word by word: nothing is run.

statements   a script as statements; which of them are logic, that is not followed
expand       variables, arrays and arithmetic in words
launch       what a launcher starts, on how many ranks      script   a script's commands, with its Slurm options
"""
