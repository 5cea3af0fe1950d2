"""The costs of each optimizer, as ``COST`` of the module that has its name.

adamw · adamw8bit · adamw4bit   elementwise, with moments of any precision      muon · adafactor · sgd
"""
