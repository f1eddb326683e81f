"""Which files a stage has, what its first file declares, and a digest of all code behind a result.

Nothing here runs a stage or imports torch, which takes seconds. Whoever needs a stage's files asks
`files_of`: a stage is a file, or a folder whose first file, __init__.py, names the others.
"""

import ast
import functools
import hashlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STAGES, PEERS = ROOT / "stages", ROOT / "harness" / "peers"
WORDS = ("title", "idea", "still_hurts")  # of STAGE = Stage(...): text for people
FIRST = "__init__.py"  # of a folder
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef  # may have a docstring


def built_in_files() -> list[Path]:
    """The first files of the stages in stages/, by number."""
    found = [*STAGES.glob("s[0-9][0-9]_*.py"), *STAGES.glob(f"s[0-9][0-9]_*/{FIRST}")]
    return sorted(found, key=label)


def twin_files() -> list[Path]:
    """The files of the stages that are written once more for a CPU, by number."""
    return sorted(STAGES.glob("cpu/s[0-9][0-9]_*.py"), key=label)


def twin_file(stage: int) -> Path:
    """The file of a stage that is written once more for a CPU; KeyError where there is none."""
    return {number_of(path): path for path in twin_files()}[stage]


def peer_files() -> list[Path]:
    """The files of the peers, by number."""
    return sorted(PEERS.glob("p[0-9]*_*.py"))


def rank_peer_files() -> list[Path]:
    """The files of the peers that several ranks compute together, by number."""
    return sorted(PEERS.glob("ranks/p[0-9]*_*.py"))


def label(path: Path) -> str:
    """What a stage in the file `path` is called by people: its file's name, or its folder's."""
    return path.parent.name if path.name == FIRST else path.name


def number_of(path: Path) -> int:
    """The number of a built-in stage, by its first file."""
    return int(label(path)[1:3])


def part_of(path: Path) -> str:
    """The stage that a file in stages/, or in a folder there, is a part of: 's07', or ''."""
    inside = path.relative_to(STAGES).parts if STAGES in path.parents else ()
    return next((part[:3] for part in inside if part[1:3].isdigit()), "")


def first_file(stage: int | Path) -> Path:
    """The first file of a stage: of a built-in one by number, or of any by its file or folder.

    Raises KeyError where there is no stage of that number.
    """
    if isinstance(stage, int):
        return {number_of(path): path for path in built_in_files()}[stage]
    return stage / FIRST if stage.is_dir() else stage


def files_of(stage: int | Path) -> list[Path]:
    """The files of a stage that are here, in the order in which a reader takes them.

    stage: its number, if it is a built-in one, else its file or folder. Raises KeyError where there
    is no stage of that number, ValueError where the names of the files are no literals.
    """
    first = first_file(stage)
    names = ast.literal_eval(declared(first).get("files", ast.Tuple([])))
    others = (first.parent / name for name in names)
    return [first, *(path.resolve() for path in others if path.is_file())]


def declared(path: Path) -> dict[str, ast.expr]:
    """The arguments of `STAGE = Stage(...)` in the file `path`, as expressions; {} without it."""
    for node in parsed(path.read_bytes()).body:
        match node:
            case ast.Assign(
                [ast.Name("STAGE")], ast.Call(ast.Name("Stage"), args=[], keywords=keywords)
            ):
                return {each.arg: each.value for each in keywords if each.arg}
    return {}


@functools.cache
def parsed(text: bytes) -> ast.Module:
    """The syntax tree of a file in Python, for all who ask: to be read only."""
    return ast.parse(text)


def read_declared(path: Path) -> dict[str, Any]:
    """The keyword arguments of `STAGE = Stage(...)` in the file `path`, without defaults.

    Raises ValueError where there is no such call, or its values are not literals.
    """
    if not (found := declared(path)):
        raise ValueError(f"{label(path)}: no STAGE = Stage(...) with keywords in it")
    return {name: ast.literal_eval(value) for name, value in found.items()}


# what kernels are computed with, and launched in
COMMON = tuple(f"stages.common.{name}" for name in ("kernels", "products", "fit"))


def behind(stage: int | Path) -> list[Path]:
    """All files that compute a stage's results: its first, what it imports, what isn't in Python.

    Of stages/common/ only COMMON: the rest checks input, launches, and computes nothing. A file of
    a folder that no other imports, such as a smaller version of a stage, is behind itself only.
    """
    found: list[Path] = []
    first, *others = files_of(stage)
    left = [first, *(path for path in others if path.suffix != ".py")]
    while left:
        path = left.pop(0)
        if path not in found:
            found.append(path)
            left += imported(path, path.read_bytes() if path.suffix == ".py" else b"")
    return found


@functools.cache
def imported(path: Path, text: bytes) -> list[Path]:
    """The files of stages and peers that the Python file `path`, with that text, imports.

    Of someone else's file, also those beside it, or beside its folder (stages.load).
    """
    found: list[Path] = []
    others = not {STAGES, PEERS} & {*path.parents}
    beside = path.parent.parent if (path.parent / FIRST).is_file() else path.parent
    for node in imports(text):
        names, folder = [name.name for name in node.names], ROOT
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{name}" for name in names)]
        if own := isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
        for name in names:
            # theirs, unless it is in a package of the ladder
            theirs = others and not own and not (ROOT / name.partition(".")[0] / FIRST).is_file()
            if own or theirs or name.startswith(("stages.s", "harness.peers.", *COMMON)):
                place = (beside if theirs else folder) / name.replace(".", "/")
                found += (x for x in (place.with_suffix(".py"), place / FIRST) if x.is_file())
    return found


@functools.cache
def imports(text: bytes) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a file in Python, anywhere in it."""
    return [x for x in ast.walk(parsed(text)) if isinstance(x, (ast.Import, ast.ImportFrom))]


def code_of(stage: int | Path) -> str:
    """The digest of the code behind a stage's results (`behind`), in hexadecimal.

    It changes with the code alone, not with comments, layout, text for people, or a file's place.
    """
    each = sorted(digest(path.read_bytes(), path.suffix == ".py") for path in behind(stage))
    return each[0] if len(each) == 1 else hashlib.sha256(" ".join(each).encode()).hexdigest()


@functools.cache
def digest(text: str | bytes, python: bool = True) -> str:
    """The SHA-256 of a file's code, in hexadecimal; of all its text unless it is in `python`.

    Of Python it is that of the syntax tree without docstrings, messages and imports, written out by
    `plain`, since ast.dump differs between Python versions. Raises SyntaxError where it is none.
    """
    data = repr(plain(ast.parse(text))) if python else text
    data = data.encode("utf-8", "replace") if isinstance(data, str) else data
    return hashlib.sha256(data).hexdigest()


def plain(node: Any) -> Any:
    """A syntax node as nested lists: its kind, and its fields that are not empty."""
    if isinstance(node, list):
        return [plain(x) for x in node if not isinstance(x, (ast.Import, ast.ImportFrom))]
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return ["Raise", plain(node.exc.func)]  # an error's message is no code
    found: list[Any] = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        if (
            name == "body"
            and isinstance(node, DOCUMENTED)
            and ast.get_docstring(node, False) is not None
        ):
            value = value[1:]
        if name == "keywords" and getattr(getattr(node, "func", None), "id", "") == "Stage":
            text = [x for x in value if x.arg in WORDS and isinstance(x.value, ast.Constant)]
            value = [x for x in value if x.arg != "files" and x not in text]
        if isinstance(node, ast.JoinedStr):  # some Pythons end an f-string with an empty text
            value = [part for part in value if getattr(part, "value", None) != ""]
        if value not in (None, []):
            found += [name, plain(value)]
    return found
