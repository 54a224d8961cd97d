"""Raw text -> corpora: formats, cleaning, filters, fingerprints of sentences, held-out text, work in parallel."""
