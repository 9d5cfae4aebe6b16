"""`python -m slimserve` is the `slimserve` command."""

import sys

from slimserve.cli import main

sys.exit(main())
