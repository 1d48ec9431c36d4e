"""Writes the peers' weights from the demo GGUF: the same dequantized values in every format.

    python weights.py DEMO.gguf OUT     with torch, transformers and gguf installed

OUT/gguf/smollm2-135m-{f32,f16,bf16,q8_0}.gguf, and OUT/smollm2-135m as a Hugging Face folder in
float32. Uses none of the engine's own readers, so that peers do not inherit their faults.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

KINDS = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
WRITTEN_BY_GGUF = ("GGUF.", "general.architecture", "general.file_type")


def write_gguf(reader: gguf.GGUFReader, target: Path, kind: str) -> None:
    """Copy the metadata and write every matrix at `kind` (vectors stay float32)."""
    quantization, file_type = KINDS[kind]
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, item in reader.fields.items():
        if not name.startswith(WRITTEN_BY_GGUF):
            sub_type = item.types[-1] if item.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, item.contents(), item.types[0], sub_type=sub_type)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = values.astype(np.float32).reshape(shape)
        if len(shape) == 1 or kind == "f32":
            writer.add_tensor(tensor.name, values)
        else:
            packed = gguf.quants.quantize(values, quantization)
            writer.add_tensor(tensor.name, packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(demo: Path, target: Path) -> None:
    """Save the dequantized model as safetensors with its tokenizer."""
    where = {"pretrained_model_name_or_path": str(demo.parent), "gguf_file": demo.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    state = model.state_dict()
    config = model.config
    # It was loaded as "quantized with gguf" and refuses to be saved as such: move the values to a
    # fresh model of the same configuration.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(state)
    fresh.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(target)


def main() -> None:
    demo, out = Path(sys.argv[1]), Path(sys.argv[2])
    (out / "gguf").mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(demo)
    for kind in KINDS:
        write_gguf(reader, out / "gguf" / f"smollm2-135m-{kind}.gguf", kind)
    shutil.copy(demo, out / "gguf" / "smollm2-135m-instruct-q4_1.gguf")
    write_folder(demo, out / "smollm2-135m")


if __name__ == "__main__":
    main()
