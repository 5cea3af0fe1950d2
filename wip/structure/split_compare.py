"""Split rendering/compare.py: records and their computation to results/step_comparison.py."""
import ast, re, subprocess
from pathlib import Path
src = Path('fivefold/rendering/compare.py'); text = src.read_text()
tree = ast.parse(text); lines = text.splitlines(keepends=True)
MOVE = {'Row', 'read_pair', 'compare', 'assumed', 'so_far', '_is_positive', '_row', '_state_rows', '_traffic_rows', '_sums', 'Unit'}
moved, kept, header = [], [], []
for i, node in enumerate(tree.body):
    start = min([node.lineno] + [d.lineno for d in getattr(node, 'decorator_list', [])]) - 1
    end = tree.body[i + 1].lineno - 1 if i + 1 < len(tree.body) else len(lines)
    nxt = tree.body[i + 1] if i + 1 < len(tree.body) else None
    if nxt is not None: end = min([nxt.lineno] + [d.lineno for d in getattr(nxt, 'decorator_list', [])]) - 1
    chunk = ''.join(lines[start:end])
    name = getattr(node, 'name', None) or (node.targets[0].id if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else None)
    if isinstance(node, (ast.Import, ast.ImportFrom)) or (i == 0): header.append(chunk)
    elif name in MOVE: moved.append(chunk)
    else: kept.append(chunk); print('kept', name)
imports = ''.join(header[1:])
doc = header[0]
Path('fivefold/results/step_comparison.py').write_text(doc + imports + '\n' + ''.join(moved))
src.write_text('"""A table of two steps of one layout, predicted and measured, quantity by quantity."""\n\n' + imports + 'from fivefold.results.step_comparison import Row, compare\n\n' + ''.join(kept))
files = subprocess.run(['git', 'ls-files', '*.py', '*.md'], capture_output=True, text=True).stdout.split()
pattern = re.compile(r'(?m)^([ \t]*)from fivefold\.rendering\.compare import ([^(\n]+|\([^)]*\))$')
def put(m):
    names = [n.strip() for n in m[2].strip('()').replace('\n', ' ').split(',') if n.strip()]
    there = [n for n in names if n.split(' as ')[0] in MOVE]; here = [n for n in names if n not in there]
    out = []
    if here: out.append(f'{m[1]}from fivefold.rendering.compare import ' + ', '.join(here))
    if there: out.append(f'{m[1]}from fivefold.results.step_comparison import ' + ', '.join(there))
    return '\n'.join(out)
for f in files:
    p = Path(f)
    if p == src or p.is_symlink() or not p.exists(): continue
    t = p.read_text(); n = pattern.sub(put, t)
    if n != t: p.write_text(n)
