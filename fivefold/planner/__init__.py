"""Predicts a step and searches layouts. No torch.

predict          the planner on one page          counts/   operations, FLOPs, memory, messages: integers
search/          the best of all valid layouts    time/     roofline, network, units, schedule simulation: seconds
questions · compare      what people ask; side by side      context_length   sequences
time_breakdown           the time of a step, part by part
batch · playbook · run_file   how large a batch; step by step to a run file
ratios/          largest useful degree of axes      run_estimate  days, money, energy, with failures
"""
