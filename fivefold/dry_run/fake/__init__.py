"""A world that is not there: process groups that send nothing, tensors that hold nothing.

world         one rank of a world of any size in this process
collectives   collectives that return at once, with handles that tell when they are waited for
"""
