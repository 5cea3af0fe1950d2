set -e
# T: this folder
git mv tests/interop tests/third_party
git ls-files -s | grep -v '^120000' | cut -f2 | grep -E '\.(py|md|toml|yml|txt)$|Makefile|\.ci/run|\.gitignore|\.dockerignore' | xargs grep -lE 'tests[./]interop' | xargs -r sed -i -E 's#tests([./])interop#tests\1third_party#g'
sed -i 's/f"train\.{place}"/f"trainer.{place}"/' tests/agree/loop/test_mutation.py
python3 $T/move.py $T/packages.txt
git add -A
find fivefold tests -type d -empty -delete
git ls-files '*.py' | xargs grep -lE '/ "(train|check)" /' | xargs -r sed -i -E -e 's#/ "train" /#/ "trainer" /#' -e 's#/ "check" / "traces" /#/ "profiling" / "traces" /#'
git add -A
