"""Fault tolerance: detects failures of a run and handles them.

watchdog   finds ranks that hang or lag       spikes     detects NaN losses and loss spikes
signals    ends processes cleanly             transient  tells which errors may pass in another attempt
"""
