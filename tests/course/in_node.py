"""Runs the page's modules in node, where there is one."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "course" / "page" / "web"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def in_node(modules, expression, data):
    """What `expression` is for `data`, in JavaScript, with what each of `modules` exports.

    Infinity and NaN come back as the strings "Infinity", "-Infinity" and "NaN".
    """
    imports = "".join(f"import * as {name} from '{(WEB / name).as_uri()}.js';" for name in modules)
    code = imports + (
        "import { readFileSync } from 'node:fs';"
        "const data = JSON.parse(readFileSync(0, 'utf8'));"
        "const plain = (_, x) => typeof x === 'number' && !Number.isFinite(x) ? String(x) : x;"
        f"console.log(JSON.stringify({expression}, plain));"
    )
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", code],
        input=json.dumps(data), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
