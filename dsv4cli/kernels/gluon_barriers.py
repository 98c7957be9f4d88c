"""Barriers in Gluon: which slots of a ring buffer are full and which are free; the end of the previous launch."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def ring(SLOTS: gl.constexpr, FILLING: gl.constexpr, FREEING: gl.constexpr):
    """Return two barriers for each slot: one that completes after FILLING arrivals, one after FREEING arrivals."""
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(filled.index(slot), count=FILLING)
        mbarrier.init(freed.index(slot), count=FREEING)
    return filled, freed


@gluon.jit
def await_filled(barriers, number):
    """Wait until the slot of item `number` is filled. Slots are filled in turn."""
    slots: gl.constexpr = barriers.shape[0]
    mbarrier.wait(barriers.index(number % slots), number // slots & 1)


@gluon.jit
def await_freed(barriers, number):
    """Wait until the slot of item `number` may be filled."""
    slots: gl.constexpr = barriers.shape[0]
    mbarrier.wait(barriers.index(number % slots), (number // slots & 1) ^ 1)


@gluon.jit
def tell(barriers, number):
    """Signal that the slot of item `number` is filled, or free."""
    mbarrier.arrive(barriers.index(number % barriers.shape[0]), count=1)


@gluon.jit
def wait_for_inputs(OVERLAP: gl.constexpr):
    """Do what `pdl.wait_for_inputs` does, in Gluon."""
    if OVERLAP:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
