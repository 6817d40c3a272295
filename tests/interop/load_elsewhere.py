"""Run as a script where `boost` cannot be imported: loads exported directories and writes what they compute.

Arguments: a file for the results, then directories. Each directory's model gets the ids beside it.
"""

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class Blocked(MetaPathFinder):
    """Hides a package, installed or not."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "boost":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocked())

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

try:
    import boost  # noqa: F401
except ModuleNotFoundError:
    pass
else:
    sys.exit("boost can be imported")

results = {}
for directory in map(Path, sys.argv[2:]):
    name = directory.name
    remote = (directory / "modeling_boost.py").exists()
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=remote).eval()
    config = AutoConfig.from_pretrained(directory, trust_remote_code=remote)
    assert type(model).__name__ == config.architectures[0], name
    assert next(model.parameters()).dtype == getattr(torch, str(config.dtype).removeprefix("torch.")), name
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == config.tie_word_embeddings, name
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode(tokenizer("Fellow citizens of the Senate")["input_ids"]) == "Fellow citizens of the Senate"
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == config.eos_token_id, name
    model.generation_config.eos_token_id = None  # to compare texts of equal length
    ids = load_file(directory.parent / f"{name}.ids.safetensors")["ids"]
    with torch.no_grad():
        results[f"{name}.logits"] = model(ids).logits
        for cached in (True, False):
            text = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=cached, pad_token_id=0)
            results[f"{name}.{'cached' if cached else 'whole'}"] = text.contiguous()
save_file(results, sys.argv[1])
