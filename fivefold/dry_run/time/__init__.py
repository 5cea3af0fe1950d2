"""Simulates the time of a dry run: prices tapes and plays them on streams.

prices     seconds of kernels and messages          streams    compute and communication streams of several ranks
play       breaks down the seconds of each rank     pictures   spans and levels for charts        trace   Perfetto
"""
