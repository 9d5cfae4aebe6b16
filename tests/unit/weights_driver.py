"""Fetches from a hub in a process of its own, which a test can kill.

python weights_driver.py TARGET MANIFEST REPO REVISION
"""

from __future__ import annotations

import sys
from pathlib import Path

from weights_support import hub_checkpoint

from slimserve.errors import SlimserveError
from slimserve.weights import fetch, read_manifest


def main() -> int:
    target, manifest = Path(sys.argv[1]), read_manifest(Path(sys.argv[2]))
    try:
        fetch(hub_checkpoint(manifest, sys.argv[3], sys.argv[4]), target, manifest, lambda done, total, name: None)
    except SlimserveError as error:
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
