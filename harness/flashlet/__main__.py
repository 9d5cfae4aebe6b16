"""Makes flashlet: its tokenizer, its training, its checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    """Do one of the three; 75 when the training has not come to its end yet."""
    parser = argparse.ArgumentParser(prog="python -m harness.flashlet", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("tokenizer", help="make the tokenizer")
    verb.add_argument("folder", type=Path)
    verb = verbs.add_parser("train", help="train, or go on with it")
    verb.add_argument("folder", type=Path, help="with the tokenizer; the state is kept in it")
    verb.add_argument("--minutes", type=float, default=8.5, help="after which it stops, to be taken up again")
    verb.add_argument("--compile", action="store_true", help="with torch.compile")
    verb = verbs.add_parser("export", help="write the checkpoint")
    verb.add_argument("folder", type=Path)
    verb.add_argument("checkpoint", type=Path)
    asked = parser.parse_args()
    if asked.verb == "tokenizer":
        from harness.flashlet import tokenizer

        tokenizer.train(asked.folder)
        return 0
    if asked.verb == "export":
        from harness.flashlet import export

        export.write(asked.folder, asked.checkpoint)
        return 0
    import torch

    from harness.flashlet.train import Training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers = max(0, (os.cpu_count() or 1) - 2)
    training = Training(asked.folder, device, workers=workers, compiled=asked.compile)
    done = training.run(60 * asked.minutes, lambda line: print(line, flush=True))
    return 0 if done else 75


if __name__ == "__main__":
    sys.exit(main())
