"""The env line of a run: its machine and software, without host name, user or paths."""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.records.schema import SCHEMA_VERSION

ROOT = Path(__file__).parents[2]
# what a peer's package is called in a table: its title
PEER_PACKAGES = {
    "flash-attn-4": "FlashAttention-4",
    "fa3-fwd": "FlashAttention-3",
    "flashinfer-python": "FlashInfer",
}
CUDNN_PACKAGES = "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"  # torch's own, where pip installed it


def version(package: str) -> str | None:
    """The installed version of `package`, None where it isn't installed. Imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """The ladder's own version: that of this checkout, or as installed."""
    project = ROOT / "pyproject.toml"
    if project.is_file() and (found := re.search(r'^version = "(.+)"', project.read_text(), re.M)):
        return found[1]
    return version("attention-ladder") or "of unknown version"


def cpu_model() -> str:
    """The processor's name, as the system reports it."""
    with contextlib.suppress(OSError):
        if said := re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M):
            return said[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """The machine's memory in bytes, None where the system doesn't say."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def commit() -> str | None:
    """The checkout's git commit, with '-dirty' where tracked files differ; None without git."""
    if not (ROOT / ".git").exists():
        return None
    try:
        head = git("rev-parse", "HEAD")
        return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@functools.cache
def tracked() -> frozenset[Path] | None:
    """The files that git has of this checkout; None where git doesn't know it."""
    try:
        names = git("ls-files", "-z").split("\0") if (ROOT / ".git").exists() else []
    except (OSError, subprocess.CalledProcessError):
        return None
    return frozenset(ROOT / name for name in names if name) or None


def own_files(pattern: str, folder: Path | None = None) -> list[Path]:
    """The checkout's own files that match `pattern`, sorted: not what a user left in it.

    Where git doesn't know the checkout, as after unpacking an archive, and in a `folder` outside
    it, all that match.
    """
    folder = folder or ROOT
    own = tracked() if folder.is_relative_to(ROOT) else None
    return [path for path in sorted(folder.glob(pattern)) if own is None or path in own]


def sources_digest() -> str:
    """A digest of the project's own code, which identifies it where there is no git."""
    digest = hashlib.sha256()
    packages = ("stages", "harness", "attention_ladder", "course", "ladder")
    for pattern in (*(f"{package}/**/*.py" for package in packages), "csrc/*.?pp"):
        for path in own_files(pattern):
            digest.update(path.relative_to(ROOT).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def peer_versions() -> dict[str, str]:
    """What -> its version: CUDA and cuDNN, as torch uses them, and each peer's package, if there.

    Imports nothing: a run's own process uses no GPU.
    """
    found = {title: version(package) for package, title in PEER_PACKAGES.items()}
    torch = importlib.util.find_spec("torch")
    if torch and torch.origin:
        said = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
        cuda = re.search(r"^cuda\b[^=]*= *['\"](.+)['\"]", said, re.MULTILINE)
        found["CUDA"] = cuda[1] if cuda else None
        cudnn = map(version, CUDNN_PACKAGES)
        found["cuDNN"] = next(filter(None, cudnn), None) if cuda else None
    return {title: number for title, number in sorted(found.items()) if number}


def gpu() -> tuple[str, str] | None:
    """The first GPU's name and its driver's version, from nvidia-smi; None without a GPU."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        name, driver = out.splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None
    return name, driver


def make_env(
    device: str, plan: list[dict[str, Any]], stages: list[dict[str, Any]], arguments: dict[str, Any]
) -> dict[str, Any]:
    """The env record of a run on `device` of the cells in `plan`."""
    card = gpu()
    return {
        "kind": "env",
        "schema": SCHEMA_VERSION,
        "plan": plan,
        "rungs": stages,
        "arguments": arguments,
        "device": device,
        "device_name": card[0] if card and device == "cuda" else cpu_model(),
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "triton": version("triton"),
        "numpy": version("numpy"),
        "driver": card[1] if card else None,
        "versions": peer_versions() if device == "cuda" else {},
        "system": f"{sys.platform} {platform.machine()}",
        "commit": commit(),
        "sources": sources_digest(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
