"""Import this module first in a service that does not need torch.

If torch is installed, transformers loads it even to read a tokenizer, which costs two seconds and half of the memory.
Without torch it reads the tokenizer too. gRPC's handlers of forks, off here, hang a service that can have no process.
"""

import os
import sys

sys.modules["torch"] = None  # type: ignore[assignment]  # imports fail as if it were not installed
os.environ |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0"} | os.environ
