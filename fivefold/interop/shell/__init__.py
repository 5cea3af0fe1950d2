"""Launch lines and scripts, read word by word; nothing is executed.

statements   a script as statements; which of them are control flow expand       variables, arrays and arithmetic in
words      branches   which branch of an if is taken launch       what a launcher starts, on how many ranks      script
a script's commands, with its Slurm options
"""
