"""`python -m zorselike.cli`."""

import sys

from zorselike.cli.main import main

sys.exit(main())
