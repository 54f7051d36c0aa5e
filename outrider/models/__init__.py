"""Models and tokenizers: locating, downloading, and reading GGUF files."""

GGUF, INDEX = "weights.gguf", "gguf.json"  # in the folder of a GGUF file: the file, and what is known of it
INDEX_VERSION = 6  # older ones are made anew
