"""``python -m fivefold``: the command ``fivefold`` as a module, which torchrun can start."""

from fivefold.cli import entry

if __name__ == "__main__":
    entry()
