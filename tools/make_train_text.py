"""Make the text that `ladder train` learns from: this project's own prose and code at one commit.

A fixed commit makes a fixed text, so that curves of different days can be laid over each other. It
needs git and a clone that has the commit; `ladder train` needs neither, the text is committed.

    python tools/make_train_text.py [--out harness/data/train_text.txt]
"""

import argparse
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "harness" / "data" / "train_text.txt"
COMMIT = "c59bc183a5b9fc898fd5a7b87dce45a3fffcdf85"
ENDINGS = (".md", ".cpp", ".hpp", ".py")  # prose first, then code
LEFT_OUT = "tests"


class NoText(Exception):
    """The text can't be made; the message says why."""


def git(*arguments: str) -> str:
    """What a git command prints; NoText where it fails."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    except OSError as error:
        raise NoText(f"git can't be run: {error.strerror}") from None
    if done.returncode:
        raise NoText(done.stderr.decode(errors="replace"))
    return done.stdout.decode()


def make(commit: str = COMMIT) -> str:
    """The files with one of ENDINGS at `commit`, in ENDINGS' order and by path, end to end."""
    names = git("ls-tree", "-r", "-z", "--name-only", commit).split("\0")
    paths = [path for path in map(PurePosixPath, names) if path.suffix in ENDINGS]
    paths = [path for path in paths if path.parts[0] != LEFT_OUT]
    paths.sort(key=lambda path: (ENDINGS.index(path.suffix), path))
    return "\n".join(git("show", f"{commit}:{path}") for path in paths)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="the file to write")
    out = parser.parse_args(argv).out
    try:
        text = make()
        out.write_bytes(text.encode())  # no other line ends on any system
    except (OSError, NoText) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(f"{out}: {len(text):,} characters, {len(set(text))} different ones")
    return 0


if __name__ == "__main__":
    sys.exit(main())
