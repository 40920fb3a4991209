"""A device that is not the CPU, for machines without a GPU.

It computes on the CPU, but its tensors are of another device to torch: an operation that is given both, a tensor
that goes to NumPy, or a generator of the wrong device is refused as on a GPU. Nothing is said of speed, of the
rounding of another processor, or of what only CUDA has.
"""

import hashlib
import os
import subprocess
import types
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "second_device"  # modules get a method of this name: no model may have a part that is called so
_SOURCE = Path(__file__).with_name("device.cpp")
_BUILT = _SOURCE.parents[2] / ".pytest_cache" / "second_device"


def make_second_device():
    """Compile the device, if this version of it has not been, and make torch know it by this name."""
    torch.ops.load_library(_library())
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    random = torch.Generator(device=NAME)
    for name, value in {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True,
        "manual_seed_all": None, "_is_in_bad_fork": False,
        "get_amp_supported_dtype": [torch.float16, torch.bfloat16],
    }.items():  # fmt: skip
        setattr(module, name, lambda *_, value=value: value)
    module.default_generators = (random,)
    module.get_rng_state = lambda *_: random.get_state()
    module.set_rng_state = lambda state, *_: random.set_state(state)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()


def _library():
    said = f"{torch.__version__} {torch.__file__}".encode()
    digest = hashlib.sha256(_SOURCE.read_bytes() + Path(__file__).read_bytes() + said).hexdigest()[:16]
    library = _BUILT / f"second_device_{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_name(f"{os.getpid()}.so")
        options = ["-shared", "-fPIC", "-std=c++20", "-O1", *(f"-I{x}" for x in cpp_extension.include_paths())]
        libraries = [*(f"-L{x}" for x in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu", "-ltorch"]
        subprocess.run(["g++", *options, str(_SOURCE), "-o", str(made), *libraries], check=True)
        made.replace(library)
    return str(library)
