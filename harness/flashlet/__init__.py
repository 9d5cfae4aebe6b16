"""Trains flashlet: the smallest model of Flash-Next's architecture that can remember.

    python -m harness.flashlet tokenizer FOLDER
    python -m harness.flashlet train FOLDER [--minutes 8.5]
    python -m harness.flashlet export FOLDER CHECKPOINT

What it is trained on, and what it can do, is on its card (profiles/weights/flashlet-bf16/README.md).
"""
