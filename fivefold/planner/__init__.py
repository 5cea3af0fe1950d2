"""Predicts a step and searches layouts. No torch.

predict          the planner on one page          counts/   operations, FLOPs, memory, messages: integers
search/          the best of all valid layouts    time/     roofline, network, units, schedule simulation: seconds
questions/       what people ask                   compare   predictions side by side
time_breakdown   the time of a step, by parts      batch · playbook · run_file   step by step to a run file
ratios/          largest useful degree of axes     run_estimate  days, money, energy, with failures
"""
