"""Import this module first in a process that does not need torch.

If torch is installed, transformers loads it even to read a tokenizer, which
costs two seconds and half of the memory. Without torch it reads the tokenizer too.
"""

import os
import sys

sys.modules["torch"] = None  # type: ignore[assignment]  # imports fail as if it were not installed
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing
