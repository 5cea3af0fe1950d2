"""torchtitan: TOML files (0.2) and Python configs (0.3).

keys      its keys, with the defaults of both versions     flavors   its models
read      keys to layout and job                           back      layout and job to keys
toml · python · source   the two kinds of file, read and written
call      a Python config as keys, without running it
"""
