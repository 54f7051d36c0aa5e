"""To be imported before anything else by a process that has no use for torch.

Where torch is installed transformers loads it just to read a tokenizer: two
seconds of a start and half of the memory. It goes without where there is none.
"""

import os
import sys

sys.modules["torch"] = None  # type: ignore[assignment]  # to everybody as if it were not installed
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # of torch missing
