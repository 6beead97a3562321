"""Make the demo's shipped files: python scripts/make_demo_model.py FOLDER_OF_THE_BF16_MODEL TEXT [TEXT ...]

Writes pagedweight/assets/tiny-qwen2-moe (the checkpoint, calibrated on the texts, with its tokenizer) and, beside the
held-out text, reference.safetensors: the text's token ids and the bf16 model's last hidden state at each of them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import pagedweight
from pagedweight.demo.evaluation import WINDOW_TOKENS

ASSETS = Path(pagedweight.__file__).parent / "assets"


def write_checkpoint(source: Path, texts: list[Path], out: Path) -> None:
    """Quantize and calibrate the model into `out`, keeping the model card that is there."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "checkpoint"
        pagedweight.quantize(str(source), str(made))
        pagedweight.calibrate(made, texts, model=source)
        shutil.rmtree(out / "pagedweight", ignore_errors=True)
        shutil.copytree(made, out, dirs_exist_ok=True)


@torch.no_grad()
def write_reference(source: Path, folder: Path) -> None:
    """Token ids (windows, T) int32 and output-head inputs (windows, T, H) fp16; bf16 weights, fp32 arithmetic."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.tensor(tokenizer((folder / "heldout.txt").read_text(encoding="utf-8"))["input_ids"])
    tokens = ids[: len(ids) // WINDOW_TOKENS * WINDOW_TOKENS].view(-1, WINDOW_TOKENS)
    hidden = model.model(tokens).last_hidden_state
    save_file({"tokens": tokens.int(), "hidden": hidden.half()}, folder / "reference.safetensors")


def main() -> None:
    source, *texts = map(Path, sys.argv[1:])
    write_checkpoint(source, texts, ASSETS / "tiny-qwen2-moe")
    write_reference(source, ASSETS / "heldout")


if __name__ == "__main__":
    main()
