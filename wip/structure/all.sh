set -e
. env.sh
bash "$T"/run.sh
ruff check --fix -q . || true
ruff format -q .
git add -A; git commit -qm "Move packages to the target layout by script"
bash "$T"/run2.sh
ruff check --fix -q . || true
ruff format -q .
git add -A; git commit -qm "Move published runs and speed measurements out of the package"
python3 "$T"/move.py "$T"/modules.txt
ruff check --fix -q . || true
ruff format -q .
git add -A; git commit -qm "Modules have the names of what is in them, by script"
