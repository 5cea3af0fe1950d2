"""Fake process groups and fake tensors for a world of any size.

world         one rank of a world of any size in this process
collectives   collectives that return at once, with handles that report when they are waited for
"""
