"""Fill grades into the table that Moodle or Canvas exports; every other byte of it stays.

Moodle's grading worksheet has a row for each participant ("Identifier": "Participant 123"), a
column "Grade", and maybe "Maximum Grade" and "Feedback comments". Canvas's gradebook has a row for
each student ("ID"), a column for each assignment ("Lab 5 (1234)"), and a row "Points Possible".
"""

import codecs
import html
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from course.lab.grading.submissions import MOODLE, Found, NotGraded, Submission

BOMS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
SEPARATORS = ",;\t"
PARTICIPANT = re.compile(r"\D+(\d+)")  # the first word is translated
ASSIGNMENT = re.compile(r"(.+) \(\d+\)")
POINTS_POSSIBLE = "Points Possible"
NOT_A_GRADE = ("EX", "N/A")  # excused, and not assigned: stay

Span = tuple[int, int]


@dataclass
class Gradebook:
    """The table in the file `path`: where each cell's text begins and ends, [row][column].

    students: the row of each student, by number. grade, comments: the columns of the grade and
    of comments, -1 where there is none. maximum: of a row, '' where not known.
    """

    path: Path
    bom: bytes
    encoding: str
    text: str
    separator: str
    cells: list[list[Span]]
    students: dict[str, int] = field(default_factory=dict)
    grade: int = -1
    comments: int = -1
    maximum: Callable[[int], str] = lambda row: ""

    def value(self, row: int, column: int) -> str:
        """Return the value of a cell, without quotes."""
        begin, end = self.cells[row][column]
        text = self.text[begin:end]
        return text[1:-1].replace('""', '"') if text[:1] == '"' else text

    def quoted(self, value: str, like: str) -> str:
        """Return a cell's text, in quotes where it needs them or `like` has them."""
        need = like[:1] == '"' or any(x in value for x in (self.separator, '"', "\r", "\n"))
        return '"' + value.replace('"', '""') + '"' if need else value


@dataclass(frozen=True)
class Grade:
    """A student's grade: points of max_points, and words for the student."""

    points: float
    max_points: float
    comment: str


def read(path: Path, column: str | None, found: Found) -> Gradebook:
    """Read the table of whoever exported the submissions `found`; `column`: of the grades.

    Raises NotGraded where it is no such table, doesn't say which column is meant, or nobody knows
    whose the submissions are.
    """
    if not found.origin:
        raise NotGraded(
            f"--gradebook: whose {found.submissions[0].path.name} is, its name doesn't say: "
            "expected a folder as Moodle or Canvas exports it"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotGraded(f"--gradebook: {path}: {error.strerror}") from None
    bom = next((bom for bom in BOMS if data.startswith(bom)), b"")
    encoding = BOMS.get(bom, "utf-8")
    try:
        text = data[len(bom) :].decode(encoding)
    except UnicodeDecodeError:  # any bytes, and the same when it is written
        encoding = "latin-1"
        text = data[len(bom) :].decode(encoding)
    first = re.sub(r'"[^"]*"', "", text.splitlines()[0]) if text else ""
    separator = max(SEPARATORS, key=first.count)
    book = Gradebook(path, bom, encoding, text, separator, split(text, separator))
    width = len(book.cells[0])
    for number, row in enumerate(book.cells):
        if len(row) != width and row[0][0] != row[-1][1]:  # an empty line is none
            raise NotGraded(
                f"--gradebook: {path}: row {number + 1} has {len(row)} cells, the first row {width}"
            )
    book.cells = [row for row in book.cells if len(row) == width]
    (of_moodle if found.origin == MOODLE else of_canvas)(book, column)
    return book


def split(text: str, separator: str) -> list[list[Span]]:
    """Return where the cells of a CSV file begin and end, for each row."""
    cell = re.compile(rf'"(?:[^"]|"")*"[^{separator}\r\n]*|[^{separator}\r\n]*')
    rows: list[list[Span]] = [[]]
    at = 0
    while True:
        match = cell.match(text, at)
        assert match is not None  # it matches nothing, too
        rows[-1].append(match.span())
        at = match.end()
        if text[at : at + 1] == separator:
            at += 1
            continue
        at += 2 if text[at : at + 2] == "\r\n" else 1
        if at >= len(text):
            return rows
        rows.append([])


def of_moodle(book: Gradebook, column: str | None) -> None:
    """Find the columns of a grading worksheet."""
    names = [book.value(0, at) for at in range(len(book.cells[0]))]
    rows = range(1, len(book.cells))
    identifiers = [
        at
        for at in range(len(names))
        if rows and all(PARTICIPANT.fullmatch(book.value(row, at)) for row in rows)
    ]
    if not identifiers:
        raise NotGraded(
            f"--gradebook: {book.path}: no column such as 'Participant 123' for each student: "
            "expected the grading worksheet of Moodle's assignment"
        )
    for row in rows:
        match = PARTICIPANT.fullmatch(book.value(row, identifiers[0]))
        assert match is not None
        add(book, match[1], row)
    book.grade = the_column(book, names, column, lambda name: name == "Grade")
    lower = [name.casefold() for name in names]
    if "maximum grade" in lower:
        most = lower.index("maximum grade")
        book.maximum = lambda row: book.value(row, most)
    if "feedback comments" in lower:
        book.comments = lower.index("feedback comments")


def of_canvas(book: Gradebook, column: str | None) -> None:
    """Find the columns of a gradebook."""
    names = [book.value(0, at) for at in range(len(book.cells[0]))]
    if "ID" not in names:
        raise NotGraded(
            f"--gradebook: {book.path}: no column 'ID': expected the gradebook that Canvas exports"
        )
    possible = None
    for row in range(1, len(book.cells)):
        if book.value(row, 0).strip() == POINTS_POSSIBLE:
            possible = row
        elif student := book.value(row, names.index("ID")).strip():
            add(book, student, row)
    book.grade = the_column(book, names, column, lambda name: bool(ASSIGNMENT.fullmatch(name)))
    if possible is not None:
        most = book.value(possible, book.grade)
        book.maximum = lambda row: most


def add(book: Gradebook, student: str, row: int) -> None:
    """Note a student's row. Raises NotGraded where there is another."""
    if student in book.students:
        raise NotGraded(f"--gradebook: {book.path}: two rows have the student {student}")
    book.students[student] = row


def the_column(
    book: Gradebook, names: Sequence[str], asked: str | None, fits: Callable[[str], bool]
) -> int:
    """Return the column of the grades: the one `asked` for, else the only one that `fits`."""
    if asked is None:
        found = [at for at, name in enumerate(names) if fits(name)]
    else:
        found = [at for at, name in enumerate(names) if name == asked]
        found = found or [
            at for at, name in enumerate(names)
            if (match := ASSIGNMENT.fullmatch(name)) and match[1] == asked
        ]  # fmt: skip
    if len(found) == 1:
        return found[0]
    known = ", ".join(name for name in names if fits(name)) or ", ".join(names)
    got = "which column is the grade's?" if asked is None else f"--column: got {asked!r};"
    raise NotGraded(f"--gradebook: {book.path}: {got} --column names one of: {known}")


def fill(
    book: Gradebook, submissions: Sequence[Submission], grades: Mapping[str, Grade]
) -> tuple[bytes, list[str]]:
    """Return the file with the grades of `submissions`, by their names; and what to know of it.

    A submission is matched by its student's number, and only if the name is the same, too: a
    group's number may be another student's. One without a grade is left as it is, as are students
    without a submission.
    """
    changes: dict[Span, str] = {}
    said: list[str] = []
    scaled: set[tuple[float, float]] = set()
    for each in submissions:
        row = book.students.get(each.student)
        if row is None or not same_student(book, row, each):
            where = "no row" if row is None else "a row with another name"
            said.append(f"{each.name}: {where} in {book.path.name}: not filled in")
            continue
        if each.name not in grades:
            said.append(f"{each.name}: not filled in: to be reviewed, or not graded")
            continue
        grade, old = grades[each.name], book.value(row, book.grade)
        most = number(book.maximum(row))
        if most and grade.max_points and most != grade.max_points:
            scaled.add((grade.max_points, most))
            value = grade.points * most / grade.max_points
        else:
            value = grade.points
        new = f"{round(value, 2):g}"
        if old.strip() in NOT_A_GRADE:
            said.append(f"{each.name}: stays {old.strip()}")
            continue
        if number(old) is not None and number(old) != number(new):
            said.append(f"{each.name}: was {old}, is {new}")
        span = book.cells[row][book.grade]
        new = new.replace(".", ",") if "," in f"{old}{book.maximum(row)}" else new
        changes[span] = book.quoted(new, book.text[slice(*span)])
        if book.comments >= 0 and not book.value(row, book.comments).strip():
            span = book.cells[row][book.comments]
            changes[span] = book.quoted(
                html.escape(grade.comment, quote=False), book.text[slice(*span)]
            )
    for ours, theirs in sorted(scaled):
        said.append(f"grades are scaled: {ours:g} points here are {theirs:g} there")
    text = book.text
    for (begin, end), cell in sorted(changes.items(), reverse=True):
        text = text[:begin] + cell + text[end:]
    return book.bom + text.encode(book.encoding, "xmlcharrefreplace"), said


def same_student(book: Gradebook, row: int, each: Submission) -> bool:
    """Whether a row has the name of a submission's student, or is one of unknown names."""
    name = plain(each.who)
    cells = [plain(book.value(row, at)) for at in range(len(book.cells[row]))]
    return f"{name}{each.student}" in cells or name in (*cells, *map("".join, pairwise(cells)))


def plain(name: str) -> str:
    """Return a name's letters and digits, without accents: files can't have all other signs."""
    folded = unicodedata.normalize("NFKD", name).casefold()
    return "".join(x for x in folded if x.isalnum())


def number(text: str) -> float | None:
    """Read a number, with a decimal point or comma; None where it is none."""
    try:
        return float(text.strip().replace(",", "."))
    except ValueError:
        return None
