"""Makes the pictures of ``docs/how-to/pictures.md`` again, by the commands of the page.

python -m tests.docs.pictures
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "pictures.md"


def commands() -> list[list[str]]:
    """The words of each command that writes a picture of the page."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if "-o docs/pictures/" in line]


def main() -> None:
    for words in commands():
        subprocess.run([sys.executable, "-m", "fivefold", *words[1:]], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
