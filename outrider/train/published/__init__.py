"""Training of drafters in the formats of the field, which vLLM and SGLang load as they are."""
