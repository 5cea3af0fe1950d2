"""From tapes to seconds: tapes priced and played on streams.

prices     seconds of kernels and messages          streams    compute and communication streams of several ranks
play       where the seconds of each rank go        pictures   spans and levels for charts        trace   Perfetto
"""
