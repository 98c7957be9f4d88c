"""Random damage to a GGUF file, most of it in the header."""

import random
import struct

# what counts, lengths, offsets and types are replaced with
EXTREMES = (0, 1, 2**15, 2**31 - 1, 2**32 - 1, 2**32, 2**48, 2**63 - 1, 2**63, 2**64 - 1)


def mutated(content: bytes, header: int, seed: int) -> bytes:
    """Return a copy of a file whose header has `header` bytes, with one to three damages."""
    rng = random.Random(seed)
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(found) > 64:
            rng.choice(DAMAGES)(found, min(header, len(found) - 16), rng)
    return bytes(found)


def _place(header: int, rng: random.Random) -> int:
    """Return a place in the header, most often among the first keys or in the list of tensors."""
    keys, tensors = range(min(header, 3000)), range(max(header - 12000, 0), header)
    return rng.choice(rng.choice((keys, tensors, tensors, range(header))))


def _flip(content: bytearray, header: int, rng: random.Random) -> None:
    content[_place(header, rng)] ^= 1 << rng.randrange(8)


def _extreme(content: bytearray, header: int, rng: random.Random) -> None:
    number = rng.choice(EXTREMES)
    size = 8 if number >= 2**32 else rng.choice((4, 8))
    place = max(_place(header, rng), 4)
    content[place : place + size] = number.to_bytes(size, "little")


def _counts(content: bytearray, header: int, rng: random.Random) -> None:
    place = rng.choice((8, 16))
    (count,) = struct.unpack_from("<Q", content, place)
    struct.pack_into("<Q", content, place, max(count + rng.choice((-5, -1, 1, 3)), 0))


def _cut(content: bytearray, header: int, rng: random.Random) -> None:
    del content[rng.randrange(header) if rng.random() < 0.5 else rng.randrange(len(content)) :]


def _drop(content: bytearray, header: int, rng: random.Random) -> None:
    place = _place(header, rng)
    del content[place : place + rng.choice((1, 4, 8, 100))]


def _insert(content: bytearray, header: int, rng: random.Random) -> None:
    place = _place(header, rng)
    content[place:place] = rng.randbytes(rng.choice((1, 4, 8, 100)))


def _repeat(content: bytearray, header: int, rng: random.Random) -> None:
    place, size = _place(header, rng), rng.choice((8, 24, 60))
    content[place:place] = content[place : place + size]


def _append(content: bytearray, header: int, rng: random.Random) -> None:
    content += bytes(rng.choice((1, 40, 5000)))


def _swap(content: bytearray, header: int, rng: random.Random) -> None:
    first, second = _place(header - 8, rng), _place(header - 8, rng)
    content[first : first + 8], content[second : second + 8] = (
        content[second : second + 8],
        content[first : first + 8],
    )


DAMAGES = (_flip, _extreme, _extreme, _counts, _cut, _drop, _insert, _repeat, _append, _swap)
