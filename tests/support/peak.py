"""How much memory tensors take at once."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes of tensors of a kind of device, made inside, that are alive at once."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.known: set[int] = set()
        self.live = self.most = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it imports the compiler: 1.5 s

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._count((args, kwargs), made=False)
        result = function(*args, **(kwargs or {}))
        self._count(result, made=True)
        return result

    def _count(self, tensors, *, made: bool) -> None:
        with torch._C.DisableTorchFunction():  # tensors without data say that they are on a GPU
            here = [x for x in tree_leaves(tensors) if isinstance(x, torch.Tensor) and x.device.type == self.device]
            stores = [x.untyped_storage() for x in here]
        for storage in stores:
            if storage._cdata not in self.known:
                size = storage.nbytes() if made else 0
                self.known.add(storage._cdata)
                self.live += size
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self._forget, storage._cdata, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size
