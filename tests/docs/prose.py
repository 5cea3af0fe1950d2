"""Lists lines of the documents with words of a private dialect, and lines that are too long.

    python -m tests.docs.prose [PAGE …]      prints PATH:LINE and the word; exit code 1 if there is any

``WORDS`` has each word with the field's term. Code, tables of data and addresses may be longer than ``COLUMNS``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = 120
WORDS = {
    r"anybody(?:'s)?|somebody(?:'s)?": "any, third-party",
    r"nobody(?:'s)?": "no one, or name what is missing",
    r"whence": "from where",
    r"tak(?:e|es|en) apart": "break down",
    r"lets? go of|let go": "free",
    r"(?:comes?|goes|way) home": "combine",
    r"speaks? with": "communicate with",
    r"so many": "n",
    r"twins?": "replica, equal",
    r"mend(?:s|ed|ing)?": "fix",
    r"lacks": "is missing, does not have",
    r"beside": "next to, concurrent with, compared with",
    r"whole(?! numbers?)": "full, complete, global",
    r"alike": "equal, similar",
    r"the house|the law|a room of": "codebase, checks, package",
    r"rehears\w+": "dry run",
    r"too quick|quicker": "too fast, faster",
    r"put off": "deferred",
    r"(?:is|are) born|dies": "is allocated, is freed",
    r"that hold nothing": "fake tensors",
    r"stands? beside": "is next to",
    r"in our words": "in Fivefold's terms",
    r"(?:is|are) told": "is reported",
}
ALLOWED = {  # page: words that are quoted or have another meaning there
    "CHANGELOG.md": ("rehearsed", "rehearse"),
}
PATTERN = re.compile(rf"\b(?:{'|'.join(WORDS)})\b(?![-/\w])", flags=re.IGNORECASE)
CODE = re.compile(r"`[^`\n]*`|\]\([^)\s]*\)|https?://\S+|<!--.*?-->")


def list_pages() -> list[Path]:
    """Return the documents of the project, without those that other software generates."""
    names = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = [ROOT / name for name in names.splitlines() if not name.startswith("tests/")]
    return [page for page in pages if page.is_file() and not page.is_symlink()]


def find_faults(text: str, *, allowed: tuple[str, ...] = ()) -> Iterator[tuple[int, str]]:
    """Yield line number and fault of each private word outside of code, and of each line of prose that is too long."""
    is_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if is_code:
            continue
        for match in PATTERN.finditer(CODE.sub(lambda part: " " * len(part[0]), line)):
            if match[0].lower() not in allowed:
                yield number, match[0]
        if len(line) > COLUMNS and not line.startswith(("|", "$$", "    ")) and "](" not in line:
            yield number, f"{len(line)} columns"


def list_faults(pages: list[Path]) -> list[str]:
    """Return the faults of these pages, each as ``PATH:LINE: fault``."""
    return [
        f"{name}:{number}: {fault}"
        for page in pages
        for name in [page.relative_to(ROOT).as_posix()]
        for number, fault in find_faults(page.read_text(encoding="utf-8"), allowed=ALLOWED.get(name, ()))
    ]


if __name__ == "__main__":
    faults = list_faults([Path(word).resolve() for word in sys.argv[1:]] or list_pages())
    print("\n".join(faults) or "no private words, no long lines")
    sys.exit(bool(faults))
