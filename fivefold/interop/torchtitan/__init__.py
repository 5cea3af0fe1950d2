"""torchtitan: TOML files (0.2) and Python configs (0.3).

keys · flavors           its keys, with the defaults of both versions; its models
read · emit              keys to layout and job; layout and job to keys
toml · python · source   the two kinds of file, read and written
call                     a Python config as keys, without running it
"""
