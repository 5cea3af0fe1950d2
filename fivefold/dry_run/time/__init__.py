"""Simulates the time of a dry run: prices tapes and runs them on simulated streams.

prices      seconds of kernels and messages         streams    compute and communication streams of several ranks
simulation  breaks down the seconds of each rank    pictures   spans and levels for charts        trace   Perfetto
"""
