"""Published drafters: recognise a checkpoint from its files, check it, and compute draft logits with it."""
