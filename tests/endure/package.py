"""The package as a stranger gets it: builds wheel and sdist, installs each into empty environments, asks, measures.

    python -m tests.endure.package --markdown docs/explanation/measurements/013-package.md

Every Python from 3.11 on that is at hand (``--pythons``) gets the wheel; the first gets the sdist too. Exits 1 if one
does not answer, loads torch, or is larger or slower than promised.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_MIB, MAX_SECONDS = 40.0, 0.15  # without numpy; of processor, to import fivefold
ASKED = (
    ["--version"],
    ["predict", "llama3-8b", "h100:8", "dp8 zero3 mbs1"],
    ["search", "nano", "h100:2"],
    ["report", "nano", "h100:2", "dp2", "-o", "report.html"],
)
MEASURE = """
import time, sys
begin = time.process_time()
import fivefold
seconds = time.process_time() - begin
import json, pathlib
site = pathlib.Path(fivefold.__file__).parents[1]
size = {}
for path in site.iterdir():
    files = [path] if path.is_file() else path.rglob("*")
    size[path.name] = sum(each.stat().st_size for each in files if each.is_file() and "__pycache__" not in each.parts)
print(json.dumps({"seconds": seconds, "torch": "torch" in sys.modules, "sizes": size}))
"""


def run(*words: object, cwd: Path | None = None) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(
        [*map(str, words)], cwd=cwd, env=clean, capture_output=True, text=True, check=False, timeout=1200
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def pythons() -> list[str]:
    """One executable of each version from 3.11 on, on the path or under pyenv."""
    result: dict[str, str] = {}
    places = [shutil.which(f"python3.{minor}") for minor in range(11, 15)]
    places += [str(path) for path in Path.home().glob(".pyenv/versions/3.*/bin/python")]
    for path in filter(None, [sys.executable, *places]):
        version = subprocess.run([path, "-V"], capture_output=True, text=True, check=False).stdout.split()[-1:]
        minor = tuple(map(int, version[0].split(".")[:2])) if version else (0, 0)
        if minor >= (3, 11):
            result.setdefault(f"{minor[0]}.{minor[1]}", path)
    return [result[name] for name in sorted(result)]


def build(within: Path) -> list[Path]:
    """Wheel and sdist, made of what git has."""
    tree = within / "tree"
    run("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", tree)
    run(sys.executable, "-m", "venv", within / "builder")
    pip = within / "builder/bin/pip"
    run(pip, "install", "--quiet", "build")
    run(within / "builder/bin/python", "-m", "build", "--outdir", within / "dist", tree)
    return sorted((within / "dist").iterdir(), key=lambda path: path.suffix != ".whl")


def install(package: Path, python: str, within: Path) -> dict[str, object]:
    """An empty environment with the package; what it answers and weighs."""
    run(python, "-m", "venv", within)
    run(within / "bin/pip", "install", "--quiet", package)
    for words in ASKED:
        said = run(within / "bin/fivefold", *words, cwd=within)
        if not said and words[0] != "report":
            raise SystemExit(f"{python}: fivefold {' '.join(words)} says nothing")
    runs = [json.loads(run(within / "bin/python", "-c", MEASURE, cwd=within)) for _ in range(5)]
    sizes = runs[0]["sizes"]
    rest = sum(size for name, size in sizes.items() if not name.startswith(("numpy", "pip", "setuptools")))
    return {
        "python": run(within / "bin/python", "-V").split()[1],
        "package": package.name,
        "seconds": min(item["seconds"] for item in runs),
        "MiB": rest / 2**20,
        "own": sum(size for name, size in sizes.items() if name.startswith("fivefold")) / 2**20,
        "torch": any(item["torch"] for item in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="*", default=None)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        wheel, sdist = build(Path(folder))
        result = options.pythons or pythons()
        for place, (package, python) in enumerate([*((wheel, item) for item in result), (sdist, result[0])]):
            rows.append(install(package, python, Path(folder) / f"venv{place}"))
            print(rows[-1], flush=True)
    if options.markdown:
        options.markdown.write_text(page(rows))
    wrong = [row for row in rows if row["torch"] or row["MiB"] > MAX_MIB or row["seconds"] > MAX_SECONDS]  # type: ignore[operator]
    if wrong:
        raise SystemExit(f"beyond what is promised: {wrong}")


def page(rows: list[dict[str, object]]) -> str:
    """The measurement as it is kept."""
    lines = [
        "# 013 · The package in empty environments",
        "",
        "`python -m tests.endure.package --markdown docs/explanation/measurements/013-package.md` builds wheel and "
        "sdist of a clean clone and installs them with pip into empty environments. Each then runs `--version`, "
        "`predict`, `search` and `report`. The time is processor seconds of the import, best of five. "
        "Sizes are of files, without numpy, pip and setuptools.",
        "",
        "| Python | package | `import fivefold` | installed size | of it fivefold |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = (row["python"], row["package"], f"{row['seconds']:.3f} s", f"{row['MiB']:.1f} MiB")
        lines.append(f"| {' | '.join(map(str, cells))} | {row['own']:.1f} MiB |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
