"""Generation of text: a decode with caches, on the layers of any `Decoder`."""
