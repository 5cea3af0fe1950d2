set -e
# published runs and speed: out of the package
mkdir -p benchmarks tests/benchmarks
git mv fivefold/check/published benchmarks/published
git mv fivefold/rendering/published.py benchmarks/published/table.py
git mv fivefold/rendering/published_charts.py benchmarks/published/charts.py
git mv fivefold/cli/published.py benchmarks/published/__main__.py
git mv tests/check/published tests/benchmarks/published
git mv tests/bench benchmarks/speed
[ -f tests/rendering/test_published.py ] && git mv tests/rendering/test_published.py tests/benchmarks/published/test_table.py
[ -f tests/rendering/test_published_charts.py ] && git mv tests/rendering/test_published_charts.py tests/benchmarks/published/test_charts.py
[ -f tests/cli/test_published.py ] && git mv tests/cli/test_published.py tests/benchmarks/published/test_command.py
F=$(git ls-files -s | grep -v '^120000' | cut -f2 | grep -E '\.(py|md|toml|yml|txt|html|sh)$|Makefile|\.ci/run|\.gitignore|\.dockerignore' | grep -v '^CHANGELOG')
echo "$F" | xargs sed -i -E \
 -e 's#\bfivefold\.check\.published\b#benchmarks.published#g' \
 -e 's#from fivefold\.check import published#from benchmarks import published#' \
 -e 's#from fivefold\.rendering\.published_charts import#from benchmarks.published.charts import#' \
 -e 's#from fivefold\.rendering import published_charts\b#from benchmarks.published import charts as published_charts#' \
 -e 's#from fivefold\.rendering\.published import#from benchmarks.published.table import#' \
 -e 's#from fivefold\.rendering import published as page#from benchmarks.published import table as page#' \
 -e 's#fivefold\.cli\.published\b#benchmarks.published.__main__#g' \
 -e 's#\btests/check/published#tests/benchmarks/published#g' \
 -e 's#(fivefold/)?\bcheck/published#benchmarks/published#g' \
 -e 's#\btests\.bench\b#benchmarks.speed#g' -e 's#\btests/bench\b#benchmarks/speed#g' \
 -e 's#fivefold published\b#python -m benchmarks.published#g'
echo '"""Measurements against the outside: published runs, and the speed of training, search and page."""' > benchmarks/__init__.py
git rm -q --cached fivefold/check/__init__.py; rm -rf fivefold/check
git add -A
