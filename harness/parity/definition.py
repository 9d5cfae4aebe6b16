"""What transformers says of a checkpoint, in a process of its own: the definition, and the noise of its own bfloat16.

python -m harness.parity.definition CHECKPOINT SEQUENCES OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(checkpoint: str, sequences: str, out: str) -> None:
    """Write the log-probabilities after each token of each sequence.

    Args:
        checkpoint: folder of it.
        sequences: JSON file, lists of token ids.
        out: npz to write: `float32-N` and `bfloat16-N`, [tokens, V] fp32, of the N-th sequence.
    """
    from slimserve.engine import torchvision_cpu

    torchvision_cpu.install()
    import numpy
    import torch
    from transformers import Qwen4ExpForCausalLM

    torch.set_grad_enabled(False)
    found = {}
    for kind in (torch.float32, torch.bfloat16):
        model = Qwen4ExpForCausalLM.from_pretrained(checkpoint, dtype=kind, attn_implementation="eager").eval()
        for number, tokens in enumerate(json.loads(Path(sequences).read_text())):
            logits = model(torch.tensor([tokens])).logits[0].float()
            found[f"{str(kind).removeprefix('torch.')}-{number}"] = logits.log_softmax(-1).numpy()
    numpy.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
