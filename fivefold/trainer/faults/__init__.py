"""What goes wrong in a run, and what is done about it.

watchdog   a rank that hangs or lags          spikes    losses that are NaN or leap
signals    a process that must end            transient errors that may pass in another attempt
"""
