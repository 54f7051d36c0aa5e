"""Models and tokenizers: locating, downloading and converting them."""
