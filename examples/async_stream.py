"""Send concurrent requests from one event loop, and cancel one of them. Start the services first: `outrider up`.

python examples/async_stream.py [ENDPOINT,ENDPOINT...]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from outrider import DEFAULT_ENDPOINT, AsyncClient, Finished, SamplingParams, Tokens

QUESTIONS = ("Name three rivers.", "Name three mountains.", "Name three seas.")
PARAMS = SamplingParams(temperature=0.0, max_tokens=40)


async def answer(client: AsyncClient, question: str) -> None:
    text = ""
    async for reply in client.generate(chat=[("user", question)], params=PARAMS):
        if isinstance(reply, Tokens | Finished):
            text += reply.text
    print(f"{question} {text!r}")


async def first_words(client: AsyncClient, question: str) -> None:
    """Cancel the request by leaving the block: all services free its session."""
    text = ""
    async with contextlib.aclosing(client.generate(chat=[("user", question)], params=PARAMS)) as replies:
        async for reply in replies:
            if isinstance(reply, Tokens):
                text += reply.text
            if len(text) > 20:
                break
    print(f"{question} {text!r}, and so on")


async def main(endpoints: list[str]) -> None:
    async with AsyncClient(endpoints, api_key=os.environ.get("OUTRIDER_API_KEY", "")) as client:
        await asyncio.gather(*(answer(client, question) for question in QUESTIONS))
        await first_words(client, "Tell me a long story.")


if __name__ == "__main__":
    asyncio.run(main((sys.argv[1] if len(sys.argv) > 1 else DEFAULT_ENDPOINT).split(",")))
