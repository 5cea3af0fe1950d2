"""Predict it and search it. No torch.

predict          the planner on one page          count/    what must be done: integers
search/          the best of all legal layouts    price/    how long it takes: seconds
questions · compare · lengths  what people ask; side by side; sequences      parts   its time, part by part
batch · playbook · run_file   how large a batch; step by step to a run file
ratios/          when each axis stops paying       whole_run  days, money, energy, with failures
"""
