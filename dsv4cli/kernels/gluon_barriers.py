"""What warps with tasks of their own tell each other, in Gluon: which slot of a ring is filled, which is free."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def ring(SLOTS: gl.constexpr, FILLING: gl.constexpr, FREEING: gl.constexpr):
    """For each slot one that so many fill, and one that so many free."""
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(filled.index(slot), count=FILLING)
        mbarrier.init(freed.index(slot), count=FREEING)
    return filled, freed


@gluon.jit
def await_filled(barriers, number):
    """Until what has this number is in its slot: slots are filled in turn."""
    slots: gl.constexpr = barriers.shape[0]
    mbarrier.wait(barriers.index(number % slots), number // slots & 1)


@gluon.jit
def await_freed(barriers, number):
    """Until the slot for this number may be filled."""
    slots: gl.constexpr = barriers.shape[0]
    mbarrier.wait(barriers.index(number % slots), (number // slots & 1) ^ 1)


@gluon.jit
def tell(barriers, number):
    """That the slot of this number is filled, or free."""
    mbarrier.arrive(barriers.index(number % barriers.shape[0]), count=1)
