"""nanotron's YAML.

keys   its keys, of 0.4 and of its main branch      file   the format: read and written
"""
