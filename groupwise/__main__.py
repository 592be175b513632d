import sys

from groupwise.cli import main

sys.exit(main())
