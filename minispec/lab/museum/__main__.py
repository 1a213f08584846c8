"""`python -m minispec.lab.museum [FILE]`: compute the table and write the page; without FILE, print it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from minispec.lab.museum import PIECES
from minispec.lab.museum.table import render, table


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)  # the models are tiny
    page = render(table(PIECES, lambda name: print(name, file=sys.stderr)))
    if arguments:
        Path(arguments[0]).write_text(page, encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main(sys.argv[1:])
