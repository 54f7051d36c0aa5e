"""A target that speaks harmony, as gpt-oss does: its special tokens, and a chat template with the rules of its own.

The template writes messages as that of gpt-oss does, character by character, and refuses what that refuses. Tools are
shorter: it has their names, descriptions, fields and some defaults, and no types.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from outrider.testing.toy_models import byte_tokenizer
from tests.architectures import tiny_model

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
TEMPLATE = """
{%- set told = messages[0].content if messages[0].role in ("developer", "system") else "" -%}
{%- set given = messages[1:] if messages[0].role in ("developer", "system") else messages -%}
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {{ strftime_now("%Y-%m-%d") }}

Reasoning: {{ reasoning_effort | default("medium") }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.
{%- if tools %}{{ "\\n" }}Calls to these tools must go to the commentary channel: 'functions'.{% endif %}<|end|>
{%- if told or tools %}<|start|>developer<|message|>
    {%- if told %}# Instructions{{ "\\n\\n" + told + "\\n\\n" }}{% endif %}
    {%- if tools %}# Tools{{ "\\n\\n## functions\\n\\nnamespace functions {\\n\\n" }}
        {%- for tool in tools | map(attribute="function") %}
            {{- "// " + tool.description + "\\n" + "type " + tool.name + " = (_: {" }}
            {%- for name, schema in (tool.parameters.properties or {}).items() %}
                {{- name + ": any," + ("// default: " + schema.default if schema.default and schema.enum else "") }}
            {%- endfor %}
            {{- "}) => any;\\n\\n" }}
        {%- endfor %}} // namespace functions
    {%- endif %}<|end|>
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in given %}
    {%- if message.role == "assistant" %}
        {%- for text in (message.content, message.thinking) if text is string and "<|channel|>" in text %}
            {{- raise_exception("You have passed a message containing <|channel|> tags.") }}
        {%- endfor %}
        {%- if "tool_calls" in message %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
            {%- endif %}
            {%- set answered = namespace(found=false) %}
            {%- for later in given[loop.index:] if later.role == "assistant" and "tool_calls" not in later %}
                {%- set answered.found = true %}
            {%- endfor %}
            {%- if (message.content or message.thinking) and not answered.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.content or message.thinking) }}<|end|>
            {%- endif %}
            {%- set called.name = message.tool_calls[0].function.name %}
            {{- "<|start|>assistant to=functions." + called.name }}<|channel|>commentary json<|message|>
            {{- message.tool_calls[0].function.arguments | tojson }}<|call|>
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking }}<|end|>
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}<|return|>
        {%- else %}
            {%- set called.name = none %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}<|end|>
        {%- endif %}
    {%- elif message.role == "tool" %}
        {%- if called.name is none %}{{ raise_exception("There was no previous message with a tool call!") }}{% endif %}
        {{- "<|start|>functions." + called.name }} to=assistant<|channel|>commentary<|message|>
        {{- message.content | tojson }}<|end|>
    {%- elif message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content }}<|end|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""


def harmony_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.eos_token, tokenizer.chat_template = "<|return|>", TEMPLATE
    return tokenizer


def make_gpt_oss(folder: Path, sharpness: float = 1.0) -> Path:
    """Make a gpt-oss of random weights, whose answers end with `<|return|>` or `<|call|>`, as those of the real one."""
    tokenizer = harmony_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    changes = {"vocab_size": len(tokenizer), "eos_token_id": ends[0], "sliding_window": 128}
    model = tiny_model("gpt_oss", changes | {"max_position_embeddings": 4096, "initial_context_length": 4096})
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
