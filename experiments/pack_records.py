"""Replaces the records of finished studies by two tables each, once every record has come back unchanged.

python experiments/pack_records.py experiments/speed experiments/dose
"""

import argparse
from pathlib import Path

from semdiag_models.sweeps.runs import SCHEMA, pack


def main() -> None:
    """Pack each folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of semdiag sweep --records")
    for folder in parser.parse_args().folders:
        print(f"{folder}: {pack(folder, SCHEMA)} runs")


if __name__ == "__main__":
    main()
