"""The setting `batch_invariant`: what a request gets does not depend, in any bit, on what else the engine computes.

A library may compute a row of a product in another way when there are more or fewer rows, and so round it otherwise.
Here each operation computes a row in the same way wherever it stands: in a batch or alone, in a chunk or a decode step.

`cpu.py` is the runner that `engine/model_runner.py` chooses; it sets the variant of the operations (`ops.py`) and the
attention backend (`attention.py`). Kernels of a GPU would be a table and a runner of the same kind.
"""
