"""The engine without a GPU: torch functions in place of its compiled CUDA extension.

`install()` runs once, before anything imports `exllamav3`. The kernels are in one file a family; `extension.py` puts
them together, `install.py` lists everything that is replaced in the engine itself.

Arithmetic is fp32 throughout. So are activations, and keys and values unless `cache_mode` packs them; but the engine
keeps fp16 between the steps of sliding attention and experts, and in the caches of latent and sliding attention.
Weights are held once, in 16 bits (`linear.py`). What is not covered stands in `coverage.py`, whose `check()` refuses
models that need it.

libgomp keeps a pool of workers for every thread that calls it, and on few cores two pools make decoding two to three
times slower: exactly one thread of the process may call torch. The number of OpenMP threads stays torch's default.
"""

from backends.exllamav3.cpu.coverage import check
from backends.exllamav3.cpu.install import install

__all__ = ["check", "install"]
