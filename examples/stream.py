"""Stream one answer. Start the services first: `outrider up`.

python examples/stream.py "Why is the sky blue?" [ENDPOINT,ENDPOINT...]

With several endpoints, the coordinators of one fleet, the stream continues on the next one when one fails. The API key,
if the coordinator requires one, is read from OUTRIDER_API_KEY.
"""

from __future__ import annotations

import os
import sys

from outrider import DEFAULT_ENDPOINT, Client, Finished, SamplingParams, Tokens


def stream(prompt: str, endpoints: list[str]) -> None:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=200)
    with Client(endpoints, api_key=os.environ.get("OUTRIDER_API_KEY", "")) as client:
        for reply in client.generate(chat=[("user", prompt)], params=params):
            if isinstance(reply, Tokens):
                print(reply.text, end="", flush=True)
            elif isinstance(reply, Finished):
                steps = reply.stats.steps
                print(f"{reply.text}\n{reply.output_tokens} tokens in {steps} steps of the target")


if __name__ == "__main__":
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Why is the sky blue?"
    stream(prompt, (sys.argv[2] if len(sys.argv) > 2 else DEFAULT_ENDPOINT).split(","))
