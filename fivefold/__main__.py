"""``python -m fivefold``: the same as the command ``fivefold``; this is what torchrun starts."""

from fivefold.cli import entry

if __name__ == "__main__":
    entry()
