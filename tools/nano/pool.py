"""Generates text for training a drafter: `python -m tools.nano.pool FILE` writes rows of short conversations."""

import argparse
from multiprocessing import Pool
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.nano.stream import packed

# first seed of batches: nano's training used the seeds from 0 on
FIRST_SEED = 500_000_000
# rows per piece of work
PIECE = 50


def make(number: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make one piece: ids int16 and learned bool (whether the token is in an answer), both [PIECE, width]."""
    ids, weights = packed("short", FIRST_SEED + number, PIECE, width - 2)
    return torch.from_numpy(ids.astype("int16")), torch.from_numpy(weights >= 1)


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int16 and learned bool [N, width], as `main` wrote them."""
    tensors = load_file(path)
    return tensors["ids"], tensors["learned"]


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--width", type=int, default=768, help="tokens of a row, a multiple of 128")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with Pool(arguments.workers) as pool:
        pieces = pool.starmap(make, [(number, arguments.width) for number in range(arguments.rows // PIECE)], 1)
    ids, learned = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
    save_file({"ids": ids, "learned": learned}, arguments.file)


if __name__ == "__main__":
    main()
