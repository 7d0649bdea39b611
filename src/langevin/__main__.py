"""`python -m langevin`."""

import sys

from langevin.cli import main

sys.exit(main())
