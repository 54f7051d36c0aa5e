"""Where models and tokenizers come from."""
