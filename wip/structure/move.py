"""Move modules of the package by a table, and rewrite every mention: imports, dotted strings, file paths, documents."""
import ast, io, os, re, subprocess, sys, tokenize
from pathlib import Path

TABLE = {}
for line in Path(sys.argv[1]).read_text().splitlines():
    line = line.split('#')[0].strip()
    if line:
        old, new = line.split()
        TABLE[old] = new
ROOT = Path.cwd()
assert (ROOT / 'fivefold').is_dir()

def files(suffixes):
    out = subprocess.run(['git', 'ls-files'], capture_output=True, text=True, check=True).stdout.splitlines()
    return [Path(f) for f in out if Path(f).suffix in suffixes or Path(f).name in ('Makefile', 'run', 'Dockerfile')]

def modules():
    result = []
    for path in sorted(Path('fivefold').rglob('*.py')):
        name = '.'.join(path.with_suffix('').parts[1:]).removesuffix('.__init__')
        if name and name != '__init__':
            result.append((name, path))
    return result

def new_name(name):
    """The new dotted name of a module, without the root."""
    parts = name.split('.')
    for i in range(len(parts), 0, -1):
        head = '.'.join(parts[:i])
        if head in TABLE:
            return '.'.join([TABLE[head], *parts[i:]])
    return name

OLD = modules()
OLDNAMES = {name for name, _ in OLD} | {'.'.join(n.split('.')[:i]) for n, _ in OLD for i in range(1, n.count('.') + 1)}
missing = [old for old in TABLE if old not in OLDNAMES]
assert not missing, missing
RENAMED = {name: new_name(name) for name in sorted(OLDNAMES) if new_name(name) != name}

# 1. rewrite text
DOTTED = sorted(RENAMED, key=len, reverse=True)
dotted_re = re.compile(r'\b(fivefold|tests)\.(' + '|'.join(re.escape(d) for d in DOTTED) + r')(?![\w(])')
# paths: fivefold/plan/x.py, plan/x.py, `plan/count`; only with a slash in it or a trailing slash
PATHS = sorted((d.replace('.', '/') for d in RENAMED), key=len, reverse=True)
path_re = re.compile(r'(?<![\w/.:@-])((?:\./)?(?:fivefold|tests)/)?(' + '|'.join(re.escape(p) for p in PATHS) + r')(?=(\.py\b|/|(?![\w.-])))')

CHILDREN = {}
for _n in OLDNAMES:
    if '.' in _n: CHILDREN.setdefault(_n.split('.')[0], set()).add(_n.split('.')[1])
def swap_paths(text):
    def put(m):
        path = m[2]
        after = m[3]
        full = m[1] is not None
        if not full and '/' not in path and after != '/':
            return m[0]  # a plain word
        if not full and '/' not in path:  # a bare package: only before a module of its own, or nothing
            rest = re.match(r'/([\w*{]*)', m.string[m.end():])
            if rest and rest[1] and rest[1] not in CHILDREN[path] and rest[1][0] not in '*{':
                return m[0]
        return (m[1] or '') + RENAMED[path.replace('/', '.')].replace('.', '/')
    return path_re.sub(put, text)

API = {'train', 'plan', 'search', 'sweep', 'trace', 'watch', 'load', 'predict', 'compare'}
def swap_dotted(text):
    def put(m):
        name = m[2]
        rest = m.string[m.end():m.end() + 40]
        if name in ('train', 'plan') and not rest.startswith('.') and 'import' not in m.string[max(0, m.start() - 8):m.start()] \
                and not m.string[max(0, m.start() - 5):m.start()].endswith('from ') and not rest.startswith('"') and not rest.startswith("'"):
            return m[0]
        return m[1] + '.' + RENAMED[name]
    return dotted_re.sub(put, text)

def split_imports(path, text):
    """Give `from fivefold.a import b` (b a module that moves elsewhere or is renamed) an import of its own."""
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    edits, names = [], {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ImportFrom) and node.module and (node.module == 'fivefold' or node.module.startswith('fivefold.')) and not node.level):
            continue
        parent = node.module.removeprefix('fivefold').lstrip('.')
        newparent = new_name(parent) if parent else ''
        keep, moved = [], []
        for alias in node.names:
            full = f'{parent}.{alias.name}' if parent else alias.name
            if full in RENAMED and RENAMED[full] != (f'{newparent}.{alias.name}' if newparent else alias.name):
                moved.append((alias, RENAMED[full]))
            else:
                keep.append(alias)
        if not moved:
            continue
        indent = ' ' * node.col_offset
        out = []
        if keep:
            out.append(f"{indent}from {node.module} import " + ', '.join(a.name + (f' as {a.asname}' if a.asname else '') for a in keep) + '\n')
        for alias, target in moved:
            home, _, last = target.rpartition('.')
            home = 'fivefold' + (f'.{home}' if home else '')
            home = home.replace('fivefold.', 'FIVEFOLD.')  # not swapped again
            if alias.asname:
                out.append(f'{indent}from {home} import {last} as {alias.asname}\n')
            else:
                out.append(f'{indent}from {home} import {last}\n')
                if last != alias.name:
                    names[alias.name] = last
        edits.append((node.lineno - 1, node.end_lineno, ''.join(out)))
    for start, end, new in sorted(edits, reverse=True):
        lines[start:end] = [new]
    text = ''.join(lines)
    if names:
        bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} \
            | {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        anywhere = bound | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        for old, last in list(names.items()):
            if old in bound or last in anywhere:
                print('ALIAS KEPT', path, old, last)
                text = re.sub(rf'(?m)^(\s*from FIVEFOLD\S* import {last})$', rf'\1 as {old}', text)
                del names[old]
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        spots = []
        for i, tok in enumerate(tokens):
            if tok.type == tokenize.NAME and tok.string in names and (i == 0 or tokens[i - 1].string != '.') and tokens[i + 1].string in '.,)]:' and tokens[i+1].string != '':
                if tokens[i - 1].string == 'import':
                    continue
                spots.append((tok.start, tok.string))
        lines = text.splitlines(keepends=True)
        for (row, col), old in sorted(spots, reverse=True):
            line = lines[row - 1]
            lines[row - 1] = line[:col] + names[old] + line[col + len(old):]
        text = ''.join(lines)
    return text

changed = 0
for path in files({'.py', '.md', '.toml', '.yml', '.yaml', '.html', '.txt', '.cfg', '.js', '.sh', '.ipynb', '.csv'}):
    if not path.exists() or path.is_symlink() or 'validation' in path.parts or path.name == 'CHANGELOG.md':
        continue
    if path.suffix == '.csv' and 'errors' not in path.name: continue
    try: text = before = path.read_text(encoding='utf-8')
    except UnicodeDecodeError: continue
    if path.parts[:3] == ('tests', 'formats', 'published') or path.parts[:3] == ('docs', 'decisions', 'x'):
        continue
    if path.suffix == '.py':
        text = split_imports(path, text)
    if path.parts[:2] == ('tests', 'agree') or path.parts[:2] == ('tests', 'architecture'):
        text = re.sub(r'(["\'])(train|plan)\.(?=[a-z_.]+:[A-Za-z])', lambda m: m[1] + RENAMED.get(m[2], m[2]) + '.', text)
    text = swap_paths(swap_dotted(text)).replace('FIVEFOLD.', 'fivefold.')
    if text != before:
        path.write_text(text, encoding='utf-8'); changed += 1

# 2. move files
MOVED_TESTS = {}
def deepen(a, b):
    delta, low = len(b.parts) - len(a.parts), len(a.parts) - 2
    if delta and a.suffix == '.py':
        text = a.read_text(encoding='utf-8')
        new = re.sub(r'((?:__file__\)|HERE)\.parents\[)(\d+)', lambda m: m[1] + str(int(m[2]) + (delta if int(m[2]) >= low else 0)), text)
        if new != text: print('parents', a, b); a.write_text(new, encoding='utf-8')
def git_mv(a, b):
    if a.parts[0] == 'tests': deepen(a, b)
    if a.parts[0] == 'tests' and a.name.startswith('test_'): MOVED_TESTS[a.as_posix()] = b.as_posix()
    b.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(['git', 'mv', str(a), str(b)], check=True)

for name, path in OLD:
    if name not in RENAMED: continue
    target = Path('fivefold', *RENAMED[name].split('.'))
    target = target / '__init__.py' if path.name == '__init__.py' else target.with_suffix('.py')
    if target.exists(): print('EXISTS', path, target); continue
    deepen(path, target)
    git_mv(path, target)
    # the test of this name
    test = Path('tests', *path.relative_to('fivefold').parent.parts, f'test_{path.stem}.py')
    if path.name != '__init__.py' and test.exists():
        goal = Path('tests', *target.relative_to('fivefold').parent.parts, f'test_{target.stem}.py')
        if not goal.exists(): git_mv(test, goal)
# data files and test folders of moved packages
for old in sorted(TABLE, key=len, reverse=True):
    source, target = Path('fivefold', *old.split('.')), Path('fivefold', *TABLE[old].split('.'))
    if source.is_dir():
        for f in sorted(source.rglob('*')):
            if f.is_file() and '__pycache__' not in f.parts:
                git_mv(f, target / f.relative_to(source))
    source, target = Path('tests', *old.split('.')), Path('tests', *TABLE[old].split('.'))
    if source.is_dir():
        for f in sorted(source.rglob('*')):
            if f.is_file() and '__pycache__' not in f.parts:
                goal = target / f.relative_to(source)
                if goal.exists(): print('TEST EXISTS', f, goal); continue
                git_mv(f, goal)
gone = {a: b for a, b in MOVED_TESTS.items() if a != b}
gone |= {a.removesuffix('.py').replace('/', '.'): b.removesuffix('.py').replace('/', '.') for a, b in gone.items()}
if not gone: print(changed, "files rewritten"); sys.exit()
test_re = re.compile('|'.join(sorted((re.escape(a) for a in gone), key=len, reverse=True)))
for path in files({'.py', '.md', '.toml'}):
    if path.is_symlink() or path.name == 'CHANGELOG.md' or not path.exists(): continue
    text = path.read_text(encoding='utf-8')
    new = test_re.sub(lambda m: gone[m[0]], text)
    if new != text: path.write_text(new, encoding='utf-8')
print(changed, 'files rewritten')
