"""python run.py [KEY=VALUE ...] [-m]: one point, or a sweep over comma-separated values.

See README.md for the usual commands and `python run.py --help` for the keys.
"""

import sys

from xsparse.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
