"""The rules of speculative decoding: acceptance, sampling, noise, trees, grammars. No I/O."""
